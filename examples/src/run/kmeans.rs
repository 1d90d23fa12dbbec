//! `kmeans fit`, printed.

use collectives::{Collective, Partition, Row, launch};
use serde_json::json;

use super::{counted, say};
use crate::{
    Columns, ConfigError, Error, KMeansCli, KMeansError, KMeansFit, KMeansOptions, KMeansSettings,
    Matrix, article_start, fit, grouped, iris, print, read_csv,
};

const COLUMNS: Columns<5> = Columns::new([
    ("iteration", 9),
    ("inertia", 16),
    ("after update", 16),
    ("farthest move", 13),
    ("counts", 6),
]);

/// Clusters and prints; the outcome is whether all ranks hold the same
/// centroids, bit for bit.
///
/// # Errors
/// [`Error`], before or while the iterations run.
pub fn run_kmeans(cli: &KMeansCli) -> Result<bool, Error> {
    let settings = cli.settings()?;
    if cli.print_config() {
        say(print(&settings).trim_end());
        return Ok(true);
    }
    let (data, start) = rows(&settings)?;
    let options = KMeansOptions {
        k: settings.run.k.unwrap_or(start.rows()),
        epsilon: settings.run.epsilon,
        max_iter: settings.run.max_iter,
    };
    let world = settings.run.world_size;
    let ranks = launch::spawn(world, &settings.collectives, |mut communicator| {
        let range = Partition::new(data.rows(), world).range(communicator.rank());
        let fit = fit(&mut communicator, &data.part(range), &start, &options)?;
        let stats = communicator.stats();
        let algorithms = stats.algorithms(Collective::AllReduce);
        let names: Vec<String> = algorithms.map(|algorithm| algorithm.to_string()).collect();
        Ok::<_, KMeansError>((fit, stats.of(Collective::AllReduce), names.join("+")))
    })?;
    let equal = ranks.iter().all(|(fit, ..)| same_bits(fit, &ranks[0].0));
    let (fit, reduced, algorithm) = &ranks[0];
    match cli.json() {
        true => say_json(fit, world, algorithm, equal),
        false => say_text(fit, &data, world, reduced, algorithm, equal),
    }
    Ok(equal)
}

/// The data and the start. What is wrong with k, n and the start is left to
/// [`fit`], except where there would be no start at all.
fn rows(settings: &KMeansSettings) -> Result<(Matrix, Matrix), Error> {
    let KMeansSettings { run, data, .. } = settings;
    let embedded = data.file.as_os_str().is_empty();
    let rows = match embedded {
        true => iris(),
        false => read_csv(&data.file)?,
    };
    if !data.init.as_os_str().is_empty() {
        return Ok((rows, read_csv(&data.init)?));
    }
    if let Some(k) = run.k
        && k > rows.rows()
    {
        let (k, n) = (k as u64, rows.rows() as u64);
        return Err(KMeansError::TooManyClusters { k, n }.into());
    }
    match embedded {
        true => Ok((rows, article_start())),
        false => Err(Error::Config(ConfigError::Value {
            key: "data.init".to_owned(),
            value: "\"\"".to_owned(),
            allowed: "rows of your own need a start: --init FILE.csv, one centroid a line"
                .to_owned(),
        })),
    }
}

fn same_bits(left: &KMeansFit, right: &KMeansFit) -> bool {
    let bits = |fit: &KMeansFit| -> Vec<u64> {
        let values = fit.centroids.values().iter();
        values.map(|value| value.to_bits()).collect()
    };
    bits(left) == bits(right) && left.counts == right.counts
}

/// A line for each iteration, then one for the result.
fn say_json(fit: &KMeansFit, world: usize, algorithm: &str, equal: bool) {
    for (index, iteration) in fit.iterations.iter().enumerate() {
        say(json!({
            "iteration": index + 1,
            "buffer": iteration.buffer,
            "inertia": iteration.inertia,
            "inertia_after": iteration.inertia_after,
            "moved": iteration.moved,
        }));
    }
    let inertia: Vec<f64> = fit.iterations.iter().map(|it| it.inertia).collect();
    let after: Vec<f64> = fit.iterations.iter().map(|it| it.inertia_after).collect();
    say(json!({
        "centroids": fit.centroids.iter().collect::<Vec<_>>(),
        "counts": fit.counts,
        "inertia": inertia,
        "inertia_after": after,
        "iterations": fit.iterations.len(),
        "converged": fit.converged,
        "world_size": world,
        "algorithm": algorithm,
        "bits_equal_ranks": equal,
    }));
}

fn say_text(
    fit: &KMeansFit,
    data: &Matrix,
    world: usize,
    reduced: &Row,
    algorithm: &str,
    equal: bool,
) {
    /// Buffers up to this length are short enough to read.
    const SHORT: usize = 24;
    let (k, columns) = (fit.centroids.rows(), fit.centroids.columns());
    say(format_args!(
        "{} rows of {columns} columns over {world} ranks, {k} clusters\n",
        grouped(data.rows() as u64)
    ));
    say(COLUMNS.heading());
    for (index, iteration) in fit.iterations.iter().enumerate() {
        let clusters = iteration.buffer.chunks_exact(columns + 1);
        let counts: Vec<String> = clusters
            .map(|cluster| cluster[columns].to_string())
            .collect();
        say(COLUMNS.line([
            (index + 1).to_string(),
            format!("{:.9}", iteration.inertia),
            format!("{:.9}", iteration.inertia_after),
            format!("{:.6}", iteration.moved),
            counts.join("/"),
        ]));
    }
    let first = &fit.iterations[0].buffer;
    if first.len() <= SHORT {
        say("\nbuffer after the first all-reduce, for each cluster its sums and its count:");
        for cluster in first.chunks_exact(columns + 1) {
            say(format_args!("  {}", numbers(cluster, 1)));
        }
    }
    say("\ncentroids:");
    for centroid in fit.centroids.iter() {
        say(format_args!("  {}", numbers(centroid, 12)));
    }
    say(format_args!(
        "\n{} of {} f64 by {algorithm}, one an iteration; {}",
        counted(reduced.calls as usize, "all-reduce"),
        reduced.elements / reduced.calls.max(1),
        match fit.converged {
            true => "converged",
            false => "stopped by the limit of iterations",
        }
    ));
    say(match equal {
        true => "All ranks hold the same centroids, bit for bit.",
        false => "RANKS HOLD DIFFERENT CENTROIDS.",
    });
}

/// With as many decimals as asked for at most.
fn numbers(values: &[f64], decimals: usize) -> String {
    let shown = values.iter().map(|value| {
        let text = format!("{value:.decimals$}");
        let text = match text.contains('.') {
            true => text.trim_end_matches('0').trim_end_matches('.'),
            false => &text,
        };
        text.to_owned()
    });
    shown.collect::<Vec<_>>().join(" ")
}
