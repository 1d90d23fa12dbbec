//! Lloyd's iteration on one rank's rows.

use collectives::{Communicator, ReduceOp};

use super::KMeansError;
use super::agree::agree;
use crate::Matrix;

/// When to stop, and how many clusters are meant.
#[derive(Debug, Clone, PartialEq)]
pub struct KMeansOptions {
    /// Clusters.
    pub k: usize,
    /// Stop when no centroid moved farther than this (a distance, not its
    /// square; Alink's rule). 0 stops when nothing moved at all.
    pub epsilon: f64,
    /// Stop after this many iterations in any case.
    pub max_iter: usize,
}

/// What one iteration saw and did; the same on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct KMeansIteration {
    /// The reduced buffer: for each cluster its d sums, then its count.
    pub buffer: Vec<f64>,
    /// Sum of squared distances from the rows to the centroids that the
    /// iteration started from.
    pub inertia: f64,
    /// The same rows in the same clusters, to the centroids it ended with.
    pub inertia_after: f64,
    /// How far the centroid moved that moved farthest.
    pub moved: f64,
}

/// Where the iterations ended; the same on all ranks, bit for bit.
#[derive(Debug, Clone, PartialEq)]
pub struct KMeansFit {
    /// One row a cluster.
    pub centroids: Matrix,
    /// Rows in each cluster, as the last iteration assigned them.
    pub counts: Vec<u64>,
    /// One entry an iteration.
    pub iterations: Vec<KMeansIteration>,
    /// Whether the last iteration moved no centroid by more than epsilon.
    pub converged: bool,
}

/// Clusters the rows of all ranks. `part` is this rank's share: the ranks'
/// parts in rank order are the data, and a part may be empty (with the
/// columns of the others).
///
/// A row goes to the nearest centroid, the one with the lower index among
/// equals; a cluster without rows keeps its centroid. Distances are sums of
/// squared differences, not the expanded square, so nothing cancels.
///
/// An iteration costs one all-reduce of k * (d + 1) f64 and nothing else. The
/// inertia needs no place in that buffer: each rank keeps its own part of
/// each iteration's inertia, and one all-gather after the last iteration
/// brings them together, added in rank order. `inertia_after` follows without
/// another pass over the rows from `inertia - sum of count * move squared`,
/// which holds because a cluster's new centroid is the mean of its rows; it
/// rounds by a few units in the last place of `inertia`.
///
/// # Errors
/// [`KMeansError`] for input that cannot be clustered, the same on every
/// rank and before the first iteration (one all-gather sees to that), or for
/// a failed collective.
pub fn fit(
    communicator: &mut Communicator,
    part: &Matrix,
    start: &Matrix,
    options: &KMeansOptions,
) -> Result<KMeansFit, KMeansError> {
    agree(communicator, part, start, options)?;
    let mut centroids = start.clone();
    let mut buffer = vec![0.0; options.k * (start.columns() + 1)];
    let mut own_inertia = Vec::new();
    let mut iterations = Vec::new();
    let mut converged = false;
    while iterations.len() < options.max_iter && !converged {
        buffer.fill(0.0);
        own_inertia.push(accumulate(part, &centroids, &mut buffer));
        communicator.all_reduce(&mut buffer, ReduceOp::Sum)?;
        // The buffer is the same on all ranks, and so is the verdict.
        if !buffer.iter().all(|sum| sum.is_finite()) {
            let iteration = iterations.len() + 1;
            return Err(KMeansError::Overflow { iteration });
        }
        let (moved, gained) = update(&mut centroids, &buffer);
        converged = moved <= options.epsilon;
        iterations.push(KMeansIteration {
            buffer: buffer.clone(),
            inertia: 0.0,
            inertia_after: -gained,
            moved,
        });
    }
    let world = communicator.world_size();
    let mut all_inertia = vec![0.0; world * own_inertia.len()];
    communicator.all_gather(&own_inertia, &mut all_inertia)?;
    let count = iterations.len();
    for (index, iteration) in iterations.iter_mut().enumerate() {
        iteration.inertia = all_inertia.iter().skip(index).step_by(count).sum();
        iteration.inertia_after += iteration.inertia;
        if !iteration.inertia_after.is_finite() {
            let iteration = index + 1;
            return Err(KMeansError::Overflow { iteration });
        }
    }
    let clusters = buffer.chunks_exact(start.columns() + 1);
    Ok(KMeansFit {
        centroids,
        counts: clusters.map(|cluster| count_of(cluster) as u64).collect(),
        iterations,
        converged,
    })
}

/// Adds each row to the sums and the count of its nearest centroid; returns
/// the sum of the squared distances to them.
fn accumulate(part: &Matrix, centroids: &Matrix, buffer: &mut [f64]) -> f64 {
    let width = centroids.columns() + 1;
    let mut inertia = 0.0;
    for row in part.iter() {
        let (cluster, distance) = nearest(row, centroids);
        inertia += distance;
        let place = &mut buffer[cluster * width..(cluster + 1) * width];
        for (sum, value) in place.iter_mut().zip(row) {
            *sum += value;
        }
        place[width - 1] += 1.0;
    }
    inertia
}

/// The nearest centroid, the lower index among equals, and its distance
/// squared.
fn nearest(row: &[f64], centroids: &Matrix) -> (usize, f64) {
    let mut best = (0, f64::INFINITY);
    for (index, centroid) in centroids.iter().enumerate() {
        let distance = squared_distance(row, centroid);
        if distance < best.1 {
            best = (index, distance);
        }
    }
    best
}

/// Moves each centroid to the mean of its rows. Returns the greatest move,
/// and how much smaller the inertia is for all the moves together.
fn update(centroids: &mut Matrix, buffer: &[f64]) -> (f64, f64) {
    let columns = centroids.columns();
    let mut moved: f64 = 0.0;
    let mut gained = 0.0;
    let places = centroids.values_mut().chunks_exact_mut(columns);
    for (centroid, cluster) in places.zip(buffer.chunks_exact(columns + 1)) {
        let count = count_of(cluster);
        if count == 0.0 {
            continue;
        }
        let mean: Vec<f64> = cluster[..columns].iter().map(|sum| sum / count).collect();
        let squared = squared_distance(centroid, &mean);
        moved = moved.max(squared.sqrt());
        gained += count * squared;
        centroid.copy_from_slice(&mean);
    }
    (moved, gained)
}

/// The count lies behind the sums.
fn count_of(cluster: &[f64]) -> f64 {
    *cluster.last().expect("a cluster ends with its count")
}

fn squared_distance(left: &[f64], right: &[f64]) -> f64 {
    left.iter()
        .zip(right)
        .map(|(left, right)| (left - right) * (left - right))
        .sum()
}
