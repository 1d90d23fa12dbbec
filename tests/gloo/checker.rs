//! What the comparison would not let pass.
use collectives::{Collective, DType, ReduceOp};
use examples::{
    SplitMix64,
    bench::reference::{Case, Outputs, Recording, Rule, Way, check, inputs},
};

/// The recorded sum of seventeen f32 on three ranks.
fn sum() -> Case {
    recorded("all_reduce-w3-f32-17-sum")
}

fn recorded(name: &str) -> Case {
    let mut cases = Recording::committed().cases.into_iter();
    cases.find(|case| case.name == name).expect("recorded")
}

/// Faults by the ring and by every other way.
fn faults(case: &Case) -> (Option<String>, Vec<Option<String>>) {
    let (ring, others): (Vec<_>, Vec<_>) = check(case, &Way::all())
        .into_iter()
        .partition(|outcome| outcome.way == Way::RING);
    let fault = ring.into_iter().next().expect("one ring").fault;
    (fault, others.into_iter().map(|other| other.fault).collect())
}

fn gloo_gave(case: &mut Case, change: impl Fn(&mut Vec<u8>)) {
    let Outputs::Elements(outputs) = &mut case.outputs else {
        panic!("elements are recorded");
    };
    change(outputs[1].as_mut().expect("every rank gets a sum"));
}

#[test]
fn a_wrong_element_is_named() {
    let mut case = sum();
    assert_eq!(faults(&case).0, None);
    // The last bit of the second element's fraction: as near as another order may be,
    // but not what a ring gives.
    gloo_gave(&mut case, |bytes| bytes[4] ^= 1);
    let (ring, others) = faults(&case);
    let ring = ring.expect("a fault");
    assert!(ring.starts_with("rank 1, element 1: "), "{ring}");
    assert_eq!(others, vec![None; 9]);
    // The sign; then no number; then too few.
    let changes: [fn(&mut Vec<u8>); 3] = [
        |bytes| bytes[7] ^= 0x80,
        |bytes| bytes[4..8].copy_from_slice(&f32::NAN.to_le_bytes()),
        |bytes| bytes.truncate(4),
    ];
    for change in changes {
        let mut case = sum();
        gloo_gave(&mut case, change);
        let (ring, others) = faults(&case);
        assert!(ring.is_some() && others.iter().all(Option::is_some));
    }
}

#[test]
fn a_rule_is_as_wide_as_it_says() {
    let of = |dtype, reduce| Case {
        dtype,
        reduce: Some(reduce),
        ..sum()
    };
    let epsilon = f64::from(f32::EPSILON);
    let near = |rule: Rule, dtype, reduce, ours: f64, gloo: f64| {
        rule.allows(&of(dtype, reduce), [1.0, 2.0, 3.0].into_iter(), ours, gloo)
    };
    let (f32, f16) = (DType::F32, DType::F16);
    use ReduceOp::{Mean, Product, Sum};
    // 3 eps · 6, of a mean a third.
    for (reduce, exact, most) in [(Sum, 6.0, 18.0), (Product, 6.0, 18.0), (Mean, 2.0, 6.0)] {
        assert!(near(
            Rule::Bound,
            f32,
            reduce,
            exact + most * epsilon,
            exact
        ));
        assert!(!near(
            Rule::Bound,
            f32,
            reduce,
            exact + (most + 1.0) * epsilon,
            exact
        ));
    }
    // However far gloo is, and no farther.
    assert!(near(Rule::Nearer, f16, Sum, 5.75, 6.25));
    assert!(!near(Rule::Nearer, f16, Sum, 6.0 + 20.0 * epsilon, 6.0));
    for rule in [Rule::Bits, Rule::Equal] {
        assert!(!near(rule, f32, Sum, 6.0 + epsilon, 6.0));
    }
    for rule in [Rule::Bits, Rule::Equal, Rule::Bound, Rule::Nearer] {
        assert!(!near(rule, f32, Sum, f64::NAN, 6.0), "{rule}");
        assert!(!near(rule, f32, Sum, 6.0, f64::NAN), "{rule}");
    }
    let rule = |dtype, reduce| Rule::of(&of(dtype, reduce), Way::RING);
    assert_eq!(
        [Sum, Mean, Product].map(|reduce| rule(f32, reduce)),
        [Rule::Bits, Rule::Bits, Rule::Bound]
    );
    assert_eq!(rule(f16, Sum), Rule::Nearer);
    let two = |dtype| Case {
        world: 2,
        ..of(dtype, Sum)
    };
    assert_eq!(
        [f32, f16].map(|dtype| Rule::of(&two(dtype), Way::RING)),
        [Rule::Equal; 2]
    );
}

#[test]
fn a_refusal_is_answered_by_the_table_alone() {
    let all = |case: &Case, said: &str| {
        for outcome in check(case, &Way::all()) {
            let fault = outcome.fault.expect("a fault");
            assert!(fault.contains(said), "{fault}");
        }
    };
    // What gloo refuses and no row has.
    let refused = Case {
        refused: Some("no".to_owned()),
        ..sum()
    };
    all(&refused, "no row says what we do");
    // What a row has and gloo does.
    let done = Case {
        refused: None,
        ..recorded("all_reduce-w3-i32-6-avg")
    };
    all(&done, "gloo does that");
    // What is carried out, though a row has it as refused.
    let carried_out = Case {
        collective: Collective::AllReduce,
        root: 3,
        refused: Some("no".to_owned()),
        ..sum()
    };
    all(&carried_out, "carried out, and should be refused");
}

#[test]
fn the_generator_is_splitmix64() {
    // The first numbers of its authors' implementation for this seed.
    let mut draws = SplitMix64::new(1_234_567);
    let first = [(); 3].map(|()| draws.next_u64());
    let expected = [
        6_457_827_717_110_365_317,
        3_203_168_211_198_807_973,
        9_817_491_932_198_370_423,
    ];
    assert_eq!(first, expected);
}

#[test]
fn sums_of_drawn_numbers_depend_on_their_order() {
    // Else the same bits would say nothing about the order of a ring.
    let [a, b, c] = [0, 1, 2].map(|rank| {
        let bytes = inputs(7, rank, DType::F32, 1000).expect("f32 are drawn");
        let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().expect("four bytes"));
        bytes.chunks_exact(4).map(number).collect::<Vec<_>>()
    });
    let differs = |&i: &usize| (a[i] + b[i]) + c[i] != (b[i] + c[i]) + a[i];
    let share = (0..1000).filter(differs).count();
    assert!(share > 100, "{share} of 1000");
}
