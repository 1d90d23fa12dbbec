//! KMeans over ranks: the article's numbers, and input that cannot be.

use collectives::{Algorithm, Collective, Communicator, CommunicatorConfig, Partition, launch};
use examples::{
    Error, KMeansError, KMeansFit, KMeansOptions, Matrix, article_start, fit, iris, parse_iris,
};
use serde_json::Value;

const WORLDS: [usize; 5] = [1, 2, 3, 4, 8];

fn options(k: usize) -> KMeansOptions {
    KMeansOptions {
        k,
        epsilon: 1e-4,
        max_iter: 50,
    }
}

/// Balanced parts.
fn parts(data: &Matrix, world: usize) -> Vec<Matrix> {
    let partition = Partition::new(data.rows(), world);
    (0..world)
        .map(|rank| data.part(partition.range(rank)))
        .collect()
}

/// What every rank got, and what its all-reduces were.
fn on_ranks(
    parts: &[Matrix],
    start: &Matrix,
    options: &KMeansOptions,
    algorithm: Algorithm,
) -> Vec<(Result<KMeansFit, KMeansError>, u64, u64)> {
    let config = CommunicatorConfig::new().with_algorithm(algorithm);
    launch::spawn(parts.len(), &config, |mut communicator: Communicator| {
        let part = &parts[communicator.rank()];
        let outcome = fit(&mut communicator, part, start, options);
        let row = communicator.stats().of(Collective::AllReduce);
        Ok::<_, KMeansError>((outcome, row.calls, row.elements))
    })
    .unwrap()
}

fn fitted(data: &Matrix, start: &Matrix, world: usize) -> KMeansFit {
    let ranks = on_ranks(
        &parts(data, world),
        start,
        &options(start.rows()),
        Algorithm::Ring,
    );
    let mut fits = ranks.into_iter().map(|(outcome, ..)| outcome.unwrap());
    let first = fits.next().unwrap();
    assert!(fits.all(|fit| fit == first), "ranks differ");
    first
}

/// The error that all ranks agree on, before any all-reduce.
fn refused(parts: &[Matrix], start: &Matrix, options: &KMeansOptions) -> KMeansError {
    let ranks = on_ranks(parts, start, options, Algorithm::Ring);
    let first = ranks[0].0.clone().unwrap_err();
    for (outcome, calls, _) in ranks {
        assert_eq!(outcome.unwrap_err(), first);
        assert_eq!(calls, 0);
    }
    first
}

fn column(values: &[f64]) -> Matrix {
    Matrix::new(1, values.to_vec())
}

fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(inner) => inner.iter().flat_map(numbers).collect(),
        Value::Number(number) => vec![number.as_f64().unwrap()],
        other => panic!("{other} in a list of numbers"),
    }
}

fn assert_near(left: &[f64], right: &[f64], what: &str) {
    assert_eq!(left.len(), right.len(), "{what}");
    for (left, right) in left.iter().zip(right) {
        assert!(
            (left - right).abs() <= 1e-9 * right.abs().max(1.0),
            "{what}: {left} {right}"
        );
    }
}

#[test]
fn the_first_all_reduce_gives_the_article_s_fifteen_numbers() {
    let article = [
        404.3, 183.1, 329.3, 117.2, 61.0, 250.3, 170.9, 73.2, 12.2, 50.0, 221.9, 104.1, 161.3,
        50.4, 39.0,
    ];
    for world in WORLDS {
        let fit = fitted(&iris(), &article_start(), world);
        assert_near(&fit.iterations[0].buffer, &article, "the article's buffer");
    }
}

#[test]
fn all_traces_are_reproduced_for_every_world_size_and_algorithm() {
    let file = include_str!("../data/iris_kmeans_expected.json");
    let expected: Value = serde_json::from_str(file).unwrap();
    let cases = expected["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 9);
    for case in cases {
        let data = match case["file"].as_str().unwrap() {
            "iris.csv" => iris(),
            _ => parse_iris(include_str!("../data/iris-fisher.csv")),
        };
        let start = Matrix::new(4, numbers(&case["start_centroids"]));
        for world in WORLDS {
            for &algorithm in Algorithm::ALL {
                let ranks = on_ranks(&parts(&data, world), &start, &options(3), algorithm);
                let what = format!("{} on {world} ranks by {algorithm}", case["name"]);
                check_trace(case, &ranks, &what);
            }
        }
    }
}

fn check_trace(case: &Value, ranks: &[(Result<KMeansFit, KMeansError>, u64, u64)], what: &str) {
    let fit = ranks[0].0.as_ref().unwrap();
    let expected = case["iterations"].as_array().unwrap();
    assert_eq!(fit.iterations.len(), expected.len(), "{what}");
    assert!(fit.converged, "{what}");
    for (iteration, expected) in fit.iterations.iter().zip(expected) {
        let sums = expected["sums"].as_array().unwrap().iter();
        let counts = expected["counts"].as_array().unwrap();
        let buffer: Vec<f64> = sums
            .zip(counts)
            .flat_map(|(sums, count)| [numbers(sums), numbers(count)].concat())
            .collect();
        assert_near(&iteration.buffer, &buffer, what);
        let figures = [iteration.inertia, iteration.inertia_after, iteration.moved];
        // Printed to nine digits, so good to half of the last one.
        for (figure, key) in
            figures
                .iter()
                .zip(["inertia_before", "inertia_after", "max_centroid_move"])
        {
            let value = expected[key].as_f64().unwrap();
            assert!(
                (figure - value).abs() <= 1e-9,
                "{what}: {key} {figure} {value}"
            );
        }
    }
    assert_near(
        fit.centroids.values(),
        &numbers(&case["final_centroids"]),
        what,
    );
    let inertia = fit.iterations.last().unwrap().inertia_after;
    assert_near(&[inertia], &numbers(&case["final_inertia"]), what);
    for (outcome, calls, elements) in ranks {
        let other = outcome.as_ref().unwrap();
        let bits = |fit: &KMeansFit| -> Vec<u64> {
            fit.centroids
                .values()
                .iter()
                .map(|value| value.to_bits())
                .collect()
        };
        assert_eq!(bits(other), bits(fit), "{what}");
        // One all-reduce of k * (d + 1) doubles an iteration, and no other.
        assert_eq!(*calls, expected.len() as u64, "{what}");
        assert_eq!(*elements, 15 * expected.len() as u64, "{what}");
    }
}

#[test]
fn an_empty_cluster_keeps_its_centroid() {
    let data = column(&[0.0, 0.0, 0.0, 10.0]);
    let start = column(&[0.0, 10.0, 100.0]);
    // With eight ranks, some have no rows at all.
    for world in [1, 2, 4, 8] {
        let fit = fitted(&data, &start, world);
        assert_eq!(fit.centroids.values(), [0.0, 10.0, 100.0]);
        assert_eq!(fit.counts, [3, 1, 0]);
        assert_eq!(fit.iterations[0].inertia, 0.0);
    }
    // Empty on some ranks only is not empty.
    let parts = [column(&[0.0, 1.0]), column(&[10.0, 11.0])];
    let ranks = on_ranks(&parts, &column(&[0.0, 10.0]), &options(2), Algorithm::Tree);
    let fit = ranks[0].0.as_ref().unwrap();
    assert_eq!(
        (fit.centroids.values(), fit.counts.as_slice()),
        ([0.5, 10.5].as_slice(), [2, 2].as_slice())
    );
}

#[test]
fn ties_go_to_the_lower_index() {
    let fit = fitted(&column(&[0.0, 1.0, 2.0]), &column(&[0.0, 2.0]), 2);
    assert_eq!(fit.iterations[0].buffer, [1.0, 2.0, 2.0, 1.0]);
}

#[test]
fn more_clusters_than_rows_is_the_same_error_on_all_ranks() {
    let ten: Vec<f64> = (0..10).map(f64::from).collect();
    let eleven: Vec<f64> = (0..11).map(f64::from).collect();
    for world in [1, 2, 4] {
        let parts = parts(&column(&ten), world);
        let error = refused(&parts, &column(&eleven), &options(11));
        assert_eq!(error, KMeansError::TooManyClusters { k: 11, n: 10 });
    }
    // More clusters than rows of a part are no error, nor are as many as rows.
    let alone = fitted(&column(&ten), &column(&ten[..5]), 1);
    for world in [4, 8] {
        assert_eq!(fitted(&column(&ten), &column(&ten[..5]), world), alone);
    }
    let fit = fitted(&column(&ten), &column(&ten), 4);
    assert_eq!(fit.iterations[0].inertia, 0.0);
}

#[test]
fn no_clusters_no_rows_and_misfits_are_the_same_error_on_all_ranks() {
    let data = column(&[1.0, 2.0, 3.0]);
    let none = Matrix::new(1, Vec::new());
    let error = refused(&parts(&data, 2), &none, &options(0));
    assert_eq!(error, KMeansError::NoClusters);
    let error = refused(&parts(&none, 2), &column(&[1.0]), &options(1));
    assert_eq!(error, KMeansError::NoRows);
    let error = refused(&parts(&data, 2), &column(&[1.0]), &options(2));
    assert_eq!(error, KMeansError::StartRows { rows: 1, k: 2 });
    let error = refused(
        &parts(&data, 2),
        &Matrix::new(2, vec![1.0, 2.0]),
        &options(1),
    );
    assert_eq!(
        error,
        KMeansError::StartColumns {
            got: 2,
            expected: 1
        }
    );
    let error = refused(&parts(&data, 2), &column(&[f64::NAN]), &options(1));
    assert_eq!(error, KMeansError::StartNotFinite { row: 0 });
    let unlike = [column(&[1.0]), Matrix::new(2, vec![1.0, 2.0])];
    let error = refused(&unlike, &column(&[1.0]), &options(1));
    assert_eq!(
        error,
        KMeansError::Columns {
            rank: 1,
            got: 2,
            expected: 1
        }
    );
    let endless = KMeansOptions {
        epsilon: -1.0,
        ..options(1)
    };
    assert!(matches!(
        refused(&parts(&data, 2), &column(&[1.0]), &endless),
        KMeansError::Options { .. }
    ));
}

#[test]
fn a_row_that_is_not_finite_is_named_by_its_global_number_on_all_ranks() {
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let data = column(&[0.0, 1.0, 10.0, 11.0, bad]);
        let error = refused(&parts(&data, 2), &column(&[0.0, 10.0]), &options(2));
        assert_eq!(error, KMeansError::NotFinite { row: 4, rank: 1 });
    }
    let error = refused(
        &parts(&column(&[f64::NAN; 3]), 2),
        &column(&[0.0]),
        &options(1),
    );
    assert_eq!(error, KMeansError::NotFinite { row: 0, rank: 0 });
}

#[test]
fn ranks_with_different_starts_are_told_apart() {
    let config = CommunicatorConfig::new();
    let outcomes = launch::spawn(3, &config, |mut communicator| {
        let rank = communicator.rank();
        let start = column(&[if rank == 1 { 5.0 } else { 4.0 }]);
        let part = column(&[1.0, 2.0]);
        Ok::<_, Error>(fit(&mut communicator, &part, &start, &options(1)).unwrap_err())
    });
    assert_eq!(outcomes.unwrap(), vec![KMeansError::Differs { rank: 1 }; 3]);
}

#[test]
fn the_result_does_not_depend_on_how_rows_are_dealt() {
    let data = Matrix::new(
        2,
        vec![1.0, 2.0, 1.0, 4.0, 1.0, 0.0, 4.0, 2.0, 4.0, 4.0, 4.0, 0.0],
    );
    for world in 1..=6 {
        // Already where it ends: one iteration moves nothing, and that is the end.
        let fit = fitted(&data, &Matrix::new(2, vec![1.0, 2.0, 4.0, 2.0]), world);
        assert_eq!(fit.centroids.values(), [1.0, 2.0, 4.0, 2.0]);
        assert_eq!((fit.iterations.len(), fit.iterations[0].inertia), (1, 16.0));
        let fit = fitted(&data, &Matrix::new(2, vec![1.0, 4.0, 4.0, 0.0]), world);
        assert_near(
            fit.centroids.values(),
            &[2.0, 10.0 / 3.0, 3.0, 2.0 / 3.0],
            "centroids",
        );
        assert_near(
            &[fit.iterations.last().unwrap().inertia],
            &[52.0 / 3.0],
            "inertia",
        );
        for iteration in &fit.iterations {
            // 12 or 18 would be sums that were not cleared.
            assert_eq!(iteration.buffer[2] + iteration.buffer[5], 6.0);
        }
    }
    let start = Matrix::new(2, vec![1.0, 4.0, 4.0, 0.0]);
    let even = fitted(&data, &start, 1);
    for lens in [vec![4, 1, 1], vec![6, 0], vec![0, 0, 6]] {
        let mut from = 0;
        let parts: Vec<Matrix> = lens
            .iter()
            .map(|len| {
                from += len;
                data.part(from - len..from)
            })
            .collect();
        let ranks = on_ranks(&parts, &start, &options(2), Algorithm::Tree);
        assert_eq!(ranks[0].0.as_ref().unwrap(), &even, "{lens:?}");
    }
}

#[test]
fn a_small_inertia_is_not_lost_to_cancellation() {
    let data = column(&[-1.0001, -0.9999, 0.9999, 1.0001]);
    let fit = fitted(&data, &column(&[-1.0, 1.0]), 2);
    assert!(
        (fit.iterations[0].inertia - 4e-8).abs() < 1e-15,
        "{}",
        fit.iterations[0].inertia
    );
}

#[test]
fn the_limit_of_iterations_holds() {
    let limited = KMeansOptions {
        max_iter: 2,
        ..options(3)
    };
    let ranks = on_ranks(
        &parts(&iris(), 3),
        &article_start(),
        &limited,
        Algorithm::Ring,
    );
    let fit = ranks[0].0.as_ref().unwrap();
    assert_eq!((fit.iterations.len(), fit.converged), (2, false));
    assert_eq!(fit.counts, [58, 50, 42]);
    // Nothing moves in the ninth iteration, so an epsilon of 0 ends too.
    let strict = KMeansOptions {
        epsilon: 0.0,
        ..options(3)
    };
    let ranks = on_ranks(
        &parts(&iris(), 3),
        &article_start(),
        &strict,
        Algorithm::Ring,
    );
    assert_eq!(ranks[0].0.as_ref().unwrap().iterations.len(), 9);
}

#[test]
fn numbers_too_large_to_add_or_square_are_the_same_error_on_all_ranks() {
    // The sum leaves f64's range; then only a square does.
    for large in [1e308, 1e200] {
        let data = column(&[large, large, -1.0, 2.0]);
        let start = column(&[1.0, 2.0]);
        for (outcome, ..) in on_ranks(&parts(&data, 2), &start, &options(2), Algorithm::Ring) {
            assert_eq!(outcome, Err(KMeansError::Overflow { iteration: 1 }));
        }
    }
}
