//! Which algorithm is fastest, by what was measured.
use serde::{Deserialize, Serialize};

use crate::{Algorithm, Call, Collective};

/// What one collective by one algorithm costs: `alpha_us + beta_us_per_kib * KiB`.
///
/// Both are fitted to measured times of the transport at hand: `bench crossover`
/// measures, fits and writes them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cost {
    /// The operation.
    pub collective: Collective,
    /// Among how many ranks.
    pub ranks: usize,
    /// By which algorithm.
    pub algorithm: Algorithm,
    /// Microseconds of a call without bytes.
    pub alpha_us: f64,
    /// Microseconds for each KiB of the buffer.
    pub beta_us_per_kib: f64,
}

impl Cost {
    /// The predicted time of a buffer of `bytes`, in microseconds.
    pub fn predict_us(&self, bytes: usize) -> f64 {
        self.alpha_us + self.beta_us_per_kib * bytes as f64 / 1024.0
    }

    /// Fits the two numbers to `(bytes, microseconds)`, so that relative errors are
    /// small: least squares, each time weighted by its inverse square.
    ///
    /// ```
    /// use collectives::{Algorithm, Collective, tuning::Cost};
    /// let times = [(1024, 3.0), (2048, 5.0), (4096, 9.0)];
    /// let cost = Cost::fit(Collective::AllReduce, 4, Algorithm::Ring, &times);
    /// assert!((cost.alpha_us - 1.0).abs() < 1e-9 && (cost.beta_us_per_kib - 2.0).abs() < 1e-9);
    /// ```
    pub fn fit(
        collective: Collective,
        ranks: usize,
        algorithm: Algorithm,
        times: &[(usize, f64)],
    ) -> Self {
        let mut sums = [0.0; 5];
        for &(bytes, time) in times {
            let (kib, weight) = (bytes as f64 / 1024.0, 1.0 / (time * time));
            let terms = [1.0, kib, kib * kib, time, kib * time];
            sums.iter_mut()
                .zip(terms)
                .for_each(|(sum, term)| *sum += weight * term);
        }
        let [one, x, xx, y, xy] = sums;
        let determinant = one * xx - x * x;
        let slope = if determinant > 0.0 {
            (one * xy - x * y) / determinant
        } else {
            0.0
        };
        let beta_us_per_kib = slope.max(0.0);
        Self {
            collective,
            ranks,
            algorithm,
            alpha_us: ((y - beta_us_per_kib * x) / one).max(0.0),
            beta_us_per_kib,
        }
    }
}

/// The cheapest algorithm for `call` among `world` ranks, as far as `costs` tell:
/// by the rows of the nearest number of ranks.
pub fn cheapest(costs: &[Cost], call: &Call, world: usize) -> Option<Algorithm> {
    let same = |cost: &&Cost| cost.collective == call.collective;
    let nearest = costs
        .iter()
        .filter(same)
        .map(|cost| cost.ranks)
        .min_by_key(|ranks| ranks.abs_diff(world))?;
    costs
        .iter()
        .filter(same)
        .filter(|cost| cost.ranks == nearest)
        .min_by(|a, b| {
            a.predict_us(call.bytes())
                .total_cmp(&b.predict_us(call.bytes()))
        })
        .map(|cost| cost.algorithm)
}

/// The size from which `large` is cheaper than `small`, in bytes: where the two
/// lines cross. None if one is cheaper throughout.
pub fn crossover(small: &Cost, large: &Cost) -> Option<usize> {
    let (alpha, beta) = (
        large.alpha_us - small.alpha_us,
        small.beta_us_per_kib - large.beta_us_per_kib,
    );
    (alpha > 0.0 && beta > 0.0).then(|| (alpha / beta * 1024.0) as usize)
}

/// What `auto` goes by where nothing else was measured: threads over channels.
///
/// By `bench crossover` on two cores of an AMD EPYC, ranks pinned, shortest times of
/// several interleaved rounds from 1 KiB to 16 MiB, 2026-11-30. The ring overtakes the tree
/// at 4 KiB among two ranks, at 110 KiB among four and at 260 KiB among eight; halving is
/// level with the ring, or ahead.
pub const MEASURED: &[Cost] = &[
    all_reduce(2, Algorithm::Naive, 0.84, 0.1194),
    all_reduce(2, Algorithm::Tree, 0.94, 0.0607),
    all_reduce(2, Algorithm::Ring, 0.98, 0.0361),
    all_reduce(2, Algorithm::Halving, 0.91, 0.0358),
    all_reduce(2, Algorithm::Direct, 0.98, 0.0637),
    all_reduce(4, Algorithm::Naive, 6.87, 0.3192),
    all_reduce(4, Algorithm::Tree, 7.77, 0.2232),
    all_reduce(4, Algorithm::Ring, 16.16, 0.1423),
    all_reduce(4, Algorithm::Halving, 10.19, 0.1181),
    all_reduce(4, Algorithm::Direct, 26.35, 0.2219),
    all_reduce(8, Algorithm::Naive, 15.40, 0.8114),
    all_reduce(8, Algorithm::Tree, 24.76, 0.6862),
    all_reduce(8, Algorithm::Ring, 73.64, 0.4611),
    all_reduce(8, Algorithm::Halving, 35.99, 0.4164),
    all_reduce(8, Algorithm::Direct, 107.89, 0.8201),
];

const fn all_reduce(
    ranks: usize,
    algorithm: Algorithm,
    alpha_us: f64,
    beta_us_per_kib: f64,
) -> Cost {
    Cost {
        collective: Collective::AllReduce,
        ranks,
        algorithm,
        alpha_us,
        beta_us_per_kib,
    }
}
