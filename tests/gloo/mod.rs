//! Our collectives against PyTorch's gloo: recorded results always, a live PyTorch
//! where there is one. What is compared how is `examples::bench::reference`, which
//! `bench verify` uses too. See README.md.
mod checker;
mod live;
mod random;

use std::collections::{BTreeMap, BTreeSet};

use collectives::{Algorithm, Collective, ReduceOp};
use examples::bench::reference::{ANSWERS, Case, Recording, Rule, Tally, Way};

/// Every case in every way; all hold, and none is missing.
fn tally<'a>(cases: impl IntoIterator<Item = &'a Case>) -> Tally {
    let cases: Vec<_> = cases.into_iter().collect();
    let tally = Tally::of(cases.iter().copied(), &Way::all());
    assert!(tally.faults.is_empty(), "{}", tally.first_faults());
    let runs = |algorithm, deterministic| {
        let lines = tally.lines.iter().filter(|((_, way, _), _)| {
            (way.algorithm, way.deterministic) == (algorithm, deterministic)
        });
        lines
            .flat_map(|(_, line)| line.runs.values())
            .sum::<usize>()
    };
    use Algorithm::{Direct, Halving, Naive, Ring, Tree};
    for algorithm in [Naive, Tree, Ring, Halving, Direct] {
        for deterministic in [false, true] {
            assert_eq!(runs(algorithm, deterministic), cases.len(), "{algorithm}");
        }
    }
    assert_eq!(Algorithm::ALL.len(), 5);
    tally
}

#[test]
fn every_recorded_case_is_answered_by_every_algorithm() {
    let recording = Recording::committed();
    assert_eq!(recording.backend, "gloo");
    assert!(recording.torch.starts_with("2.13.0"), "{}", recording.torch);
    let (large, small): (Vec<_>, Vec<_>) = recording.cases.iter().partition(|case| case.is_large());
    let tally = tally(small);

    // A comparison that runs on nothing proves nothing.
    let compared = [
        (Collective::AllReduce, 430),
        (Collective::Reduce, 315),
        (Collective::ReduceScatter, 315),
        (Collective::Broadcast, 90),
        (Collective::AllGather, 50),
        (Collective::Gather, 90),
        (Collective::Scatter, 90),
        (Collective::AllToAll, 50),
        (Collective::SendRecv, 40),
    ];
    assert_eq!(tally.compared, BTreeMap::from(compared));
    let answered = [
        ("a mean of integers", 45),
        ("bits of floats", 60),
        ("a root that is no rank", 15),
        ("a message to oneself", 5),
        ("an all_to_all of unequal parts", 4),
        ("an all_gather of unequal parts", 4),
        ("a reduce_scatter of unequal parts", 4),
        ("unsigned integers of 32 and 64 bits", 60),
    ];
    assert_eq!(tally.answered, BTreeMap::from(answered));
    for case in &recording.cases {
        let kinds = ANSWERS.iter().filter(|answer| (answer.holds)(case)).count();
        assert_eq!(kinds, usize::from(case.refused.is_some()), "{}", case.name);
    }
    let all = compared.iter().map(|(_, count)| count).sum::<usize>()
        + answered.iter().map(|(_, count)| count).sum::<usize>()
        + large.len();
    assert_eq!((all, large.len()), (recording.cases.len(), 48));

    // Worlds of 3 to 5, where order matters; of the ten ways, one is gloo's. In an all_reduce
    // f32 has 11 sums, 8 means, a product, and f64 has 8, 8 and 1; in a reduce and a
    // reduce_scatter either has 3, 3 and 1, as 16-bit floats have throughout.
    let (bits, bound) = (3 * (11 + 8 + 8 + 8), 3 * (37 + 2 * 2 * 7 + 1) * 10);
    let (nearer, refused) = (3 * 3 * 2 * 7 * 10, (45 + 60 + 15 + 5 + 4) * 10);
    let runs = [
        (Rule::Bits, bits),
        (
            Rule::Equal,
            10 * (all - large.len()) - bound - nearer - refused,
        ),
        (Rule::Bound, bound - bits),
        (Rule::Nearer, nearer),
        (Rule::Refused, refused),
    ];
    assert_eq!(tally.runs(), BTreeMap::from(runs));
}

#[test]
fn a_ring_has_gloos_bits_on_either_side_of_its_block_rule() {
    // 4 to 20 MiB, where gloo's ring has more blocks than two a rank: inputs by seed,
    // results by hash.
    let recording = Recording::committed();
    let large: Vec<_> = recording
        .cases
        .iter()
        .filter(|case| case.is_large())
        .collect();
    let kinds: BTreeSet<_> = large
        .iter()
        .map(|case| {
            (
                case.world,
                case.dtype.name(),
                case.reduce == Some(ReduceOp::Mean),
            )
        })
        .collect();
    // 2 to 5 ranks, two types, sum and mean; of each, lengths below and above.
    assert_eq!((large.len(), kinds.len()), (48, 4 * 2 * 2));
    let tally = tally(large);
    assert_eq!(tally.large, 48);
    // Of two numbers there is one sum, in all ten ways; of more, the ring's is gloo's.
    let runs = [
        (Rule::Equal, 12 * 10),
        (Rule::Bits, 36),
        (Rule::Bound, 36 * 9),
    ];
    assert_eq!(tally.runs(), BTreeMap::from(runs));
}
