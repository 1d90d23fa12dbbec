//! What `auto` picks: the cheapest by what was measured, and never by accident.
use collectives::{
    Algorithm, Call, Collective, CommunicatorConfig, DType, Operator, ReduceOp, Route,
    tuning::{Cost, MEASURED, cheapest, crossover},
};
use proptest::prelude::*;

use crate::world::each_rank;

fn call(collective: Collective, bytes: usize) -> Call {
    Call {
        collective,
        op: Some(Operator::Named(ReduceOp::Sum)),
        root: None,
        dtype: DType::U8,
        len: bytes,
        terms: 0,
    }
}

fn cost(ranks: usize, algorithm: Algorithm, alpha_us: f64, beta_us_per_kib: f64) -> Cost {
    Cost {
        collective: Collective::AllReduce,
        ranks,
        algorithm,
        alpha_us,
        beta_us_per_kib,
    }
}

/// Among 2 ranks the ring overtakes the tree at 4 KiB, among 8 at 64 KiB.
fn rows() -> Vec<Cost> {
    vec![
        cost(2, Algorithm::Tree, 10.0, 2.0),
        cost(2, Algorithm::Ring, 14.0, 1.0),
        cost(8, Algorithm::Tree, 20.0, 3.0),
        cost(8, Algorithm::Ring, 84.0, 2.0),
        cost(8, Algorithm::Naive, 500.0, 9.0),
    ]
}

/// What stands in for a measurement.
fn default_of(collective: Collective) -> Algorithm {
    match collective {
        Collective::AllGather | Collective::ReduceScatter => Algorithm::Ring,
        _ => Algorithm::Tree,
    }
}

#[test]
fn the_cheaper_of_two_lines_is_taken_on_each_side_of_their_crossing() {
    let config = CommunicatorConfig::new().with_tuning(rows());
    for (world, crossing) in [(2, 4 << 10), (8, 64 << 10)] {
        let pick = |bytes| config.pick(&call(Collective::AllReduce, bytes), world);
        for bytes in [0, 1, crossing - 1] {
            assert_eq!(pick(bytes), Algorithm::Tree, "{bytes} bytes, {world} ranks");
        }
        for bytes in [crossing + 1, 1 << 20, 1 << 30] {
            assert_eq!(pick(bytes), Algorithm::Ring, "{bytes} bytes, {world} ranks");
        }
    }
}

#[test]
fn the_nearest_number_of_ranks_decides() {
    // 16 KiB: the ring among 2, the tree among 8.
    let pick = |world| cheapest(&rows(), &call(Collective::AllReduce, 16 << 10), world).unwrap();
    assert_eq!([1, 2, 3, 4].map(pick), [Algorithm::Ring; 4]);
    assert_eq!([6, 7, 8, 9, 1024].map(pick), [Algorithm::Tree; 5]);
}

#[test]
fn elements_count_by_their_bytes() {
    let wide = |dtype| Call {
        dtype,
        ..call(Collective::AllReduce, 1000)
    };
    // 4096 bytes lie between a thousand of four bytes and a thousand of eight.
    assert_eq!(
        cheapest(&rows(), &wide(DType::F32), 2),
        Some(Algorithm::Tree)
    );
    assert_eq!(
        cheapest(&rows(), &wide(DType::F64), 2),
        Some(Algorithm::Ring)
    );
}

#[test]
fn lines_cross_where_both_cost_the_same() {
    let [tree, ring, ..] = rows()[..] else {
        unreachable!("there are five rows")
    };
    let bytes = crossover(&tree, &ring).unwrap();
    assert_eq!(bytes, 4096);
    assert_eq!(tree.predict_us(bytes), ring.predict_us(bytes));
    assert_eq!(crossover(&ring, &tree), None, "the tree never overtakes");
    assert_eq!(crossover(&tree, &tree), None);
    let worse = cost(2, Algorithm::Naive, 11.0, 2.0);
    assert_eq!(
        crossover(&tree, &worse),
        None,
        "parallel lines do not cross"
    );
}

#[test]
fn rows_of_one_operation_say_nothing_of_another() {
    let config = CommunicatorConfig::new().with_tuning(rows());
    for collective in [
        Collective::Barrier,
        Collective::Broadcast,
        Collective::AllGather,
    ] {
        let (it, plain) = (call(collective, 1 << 20), CommunicatorConfig::new());
        assert_eq!(cheapest(&rows(), &it, 2), None);
        assert_eq!(config.pick(&it, 2), plain.pick(&it, 2));
    }
}

#[test]
fn auto_goes_by_the_built_in_table_and_the_default_where_that_is_silent() {
    let config = CommunicatorConfig::new();
    let all = Collective::PLANNED.into_iter().chain([Collective::Barrier]);
    for collective in all {
        for world in 1..=65 {
            for bytes in [0, 1, 1 << 10, 48 << 10, 1 << 20, 1 << 28] {
                let it = call(collective, bytes);
                let due = cheapest(MEASURED, &it, world).unwrap_or(default_of(collective));
                assert_eq!(config.pick(&it, world), due, "{it} among {world}");
            }
        }
    }
}

#[test]
fn the_built_in_table_never_picks_by_accident() {
    for (index, row) in MEASURED.iter().enumerate() {
        assert!(Collective::PLANNED.contains(&row.collective), "{row:?}");
        assert!(row.ranks >= 2, "{row:?}");
        assert!(row.alpha_us.is_finite() && row.alpha_us > 0.0, "{row:?}");
        assert!(
            row.beta_us_per_kib.is_finite() && row.beta_us_per_kib > 0.0,
            "{row:?}"
        );
        let key = |row: &Cost| (row.collective, row.ranks, row.algorithm);
        let again = MEASURED[index + 1..].iter().find(|it| key(it) == key(row));
        assert_eq!(again, None, "one row for each");
        // An algorithm is cheap only beside another that was measured under the same conditions.
        for other in MEASURED.iter().filter(|it| it.collective == row.collective) {
            let measured = |it: &&Cost| {
                (it.collective, it.ranks, it.algorithm)
                    == (row.collective, row.ranks, other.algorithm)
            };
            assert!(
                MEASURED.iter().any(|it| measured(&it)),
                "{row:?} lacks {}",
                other.algorithm
            );
        }
    }
}

#[test]
fn an_algorithm_by_name_does_not_ask_the_table() {
    for &algorithm in Algorithm::ALL {
        let config = CommunicatorConfig::new()
            .with_algorithm(algorithm)
            .with_tuning(rows());
        for bytes in [0, 1 << 20] {
            assert_eq!(
                config.pick(&call(Collective::AllReduce, bytes), 2),
                algorithm
            );
        }
    }
}

#[test]
fn what_auto_picked_is_what_ran() {
    let config = CommunicatorConfig::new().with_tuning(rows());
    each_rank(2, &config, |mut communicator| {
        for len in [100, 10_000] {
            let mut buffer = vec![1u8; len];
            communicator.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        }
        let ran = communicator.stats().algorithms(Collective::AllReduce);
        assert!(ran.eq([Algorithm::Tree, Algorithm::Ring].map(Route::from)));
    });
}

proptest! {
    #[test]
    fn the_pick_is_never_dearer_than_another_row_of_its_ranks(
        lines in prop::collection::vec((0usize..5, 0.0f64..100.0, 0.0f64..10.0), 1..6),
        bytes in 0usize..1 << 22,
    ) {
        let costs: Vec<_> = lines
            .iter()
            .map(|&(index, alpha, beta)| cost(4, Algorithm::ALL[index], alpha, beta))
            .collect();
        let pick = cheapest(&costs, &call(Collective::AllReduce, bytes), 4).unwrap();
        let least = |costs: &mut dyn Iterator<Item = &Cost>| {
            costs.map(|cost| cost.predict_us(bytes)).fold(f64::INFINITY, f64::min)
        };
        let picked = least(&mut costs.iter().filter(|cost| cost.algorithm == pick));
        prop_assert_eq!(picked, least(&mut costs.iter()));
    }

    #[test]
    fn a_line_is_found_again_from_its_points(alpha in 0.1f64..100.0, beta in 0.01f64..10.0) {
        let true_cost = cost(4, Algorithm::Ring, alpha, beta);
        let times: Vec<_> = (6..24).map(|bit| (1 << bit, true_cost.predict_us(1 << bit))).collect();
        let found = Cost::fit(Collective::AllReduce, 4, Algorithm::Ring, &times);
        // Exact points: what is left is rounding, amplified by the range of sizes squared.
        prop_assert!((found.alpha_us / alpha - 1.0).abs() < 1e-6, "{found:?}");
        prop_assert!((found.beta_us_per_kib / beta - 1.0).abs() < 1e-6, "{found:?}");
    }
}

#[test]
fn one_size_alone_gives_a_cost_without_slope() {
    let found = Cost::fit(Collective::AllReduce, 2, Algorithm::Tree, &[(1024, 8.0)]);
    assert_eq!((found.alpha_us, found.beta_us_per_kib), (8.0, 0.0));
}

#[test]
fn costs_that_cannot_be_are_refused_by_name() {
    for odd in [f64::NAN, -f64::NAN, f64::INFINITY, -1.0] {
        for (key, cost) in [
            ("tuning.alpha_us", cost(2, Algorithm::Naive, odd, 1.0)),
            (
                "tuning.beta_us_per_kib",
                cost(2, Algorithm::Naive, 1.0, odd),
            ),
        ] {
            let config = CommunicatorConfig::new().with_tuning(vec![cost]);
            let error = config.validate().unwrap_err().to_string();
            assert!(error.starts_with(&format!("{key} = ")), "{error}");
        }
    }
}
