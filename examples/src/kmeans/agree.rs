//! Before the first iteration: all ranks see what each of them holds, and so
//! come to the same verdict on it.

use collectives::Communicator;

use super::KMeansOptions;
use crate::{Matrix, fingerprint};

/// Why there is nothing to iterate. Rows count from 0 over all ranks.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum KMeansError {
    /// No cluster is asked for.
    #[error("k = 0: allowed is 1 to the number of rows")]
    NoClusters,
    /// No rank has a row.
    #[error("n = 0: there are no rows to cluster")]
    NoRows,
    /// More clusters than rows.
    #[error("k = {k} clusters of n = {n} rows: allowed is k up to n")]
    TooManyClusters {
        /// Clusters asked for.
        k: u64,
        /// Rows on all ranks.
        n: u64,
    },
    /// Ranks hold rows of different widths.
    #[error("rank {rank} has rows of {got} columns, expected {expected} as on rank 0")]
    Columns {
        /// The first rank that differs.
        rank: usize,
        /// Its columns.
        got: u64,
        /// Rank 0's columns.
        expected: u64,
    },
    /// The start has another number of rows than there are clusters.
    #[error("the start has {rows} rows, expected k = {k}")]
    StartRows {
        /// Rows of the start.
        rows: u64,
        /// Clusters asked for.
        k: u64,
    },
    /// The start's rows have another width than the data's.
    #[error("the start has {got} columns, expected {expected} as in the data")]
    StartColumns {
        /// Columns of the start.
        got: u64,
        /// Columns of the data.
        expected: u64,
    },
    /// A starting centroid is NaN or infinite.
    #[error("row {row} of the start is not finite")]
    StartNotFinite {
        /// The row, from 0.
        row: u64,
    },
    /// A row holds NaN or an infinity.
    #[error("row {row} (on rank {rank}) is not finite")]
    NotFinite {
        /// The row, from 0 over all ranks.
        row: u64,
        /// The rank that holds it.
        rank: usize,
    },
    /// Epsilon or the limit of iterations makes no sense.
    #[error(
        "epsilon = {epsilon}, max_iter = {max_iter}: allowed are a number from 0 and 1 or more"
    )]
    Options {
        /// The distance given.
        epsilon: f64,
        /// The limit given.
        max_iter: usize,
    },
    /// Ranks were called with different starts or options.
    #[error("rank {rank} was called with another start, k, epsilon or max_iter than rank 0")]
    Differs {
        /// The first rank that differs.
        rank: usize,
    },
    /// The numbers are too large to be added up or squared.
    #[error(
        "iteration {iteration}: sums or squared distances leave the range of f64; scale the rows down"
    )]
    Overflow {
        /// The iteration, from 1.
        iteration: usize,
    },
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] collectives::Error),
}

/// What one rank holds, as the others need to know it: row counts, columns,
/// places of bad values, and a hash of what must be equal.
const FIELDS: usize = 8;

/// Stands for "none" among row numbers.
const NONE: u64 = u64::MAX;

/// Costs one all-gather of eight u64 a rank.
pub(super) fn agree(
    communicator: &mut Communicator,
    part: &Matrix,
    start: &Matrix,
    options: &KMeansOptions,
) -> Result<(), KMeansError> {
    let own: [u64; FIELDS] = [
        part.rows() as u64,
        part.columns() as u64,
        first_bad_row(part),
        start.rows() as u64,
        start.columns() as u64,
        first_bad_row(start),
        options.k as u64,
        fingerprint(
            start
                .values()
                .iter()
                .copied()
                .chain([options.epsilon])
                .map(f64::to_bits)
                .chain([options.max_iter as u64]),
        ),
    ];
    let mut all = vec![0; FIELDS * communicator.world_size()];
    communicator.all_gather(&own, &mut all)?;
    let ranks: Vec<&[u64]> = all.chunks_exact(FIELDS).collect();
    judge(&ranks, options)
}

/// The first thing wrong, from what all ranks said; so it is the same
/// everywhere.
fn judge(ranks: &[&[u64]], options: &KMeansOptions) -> Result<(), KMeansError> {
    let differs = |fields: std::ops::Range<usize>| {
        (1..ranks.len()).find(|&rank| ranks[rank][fields.clone()] != ranks[0][fields.clone()])
    };
    if let Some(rank) = differs(3..FIELDS) {
        return Err(KMeansError::Differs { rank });
    }
    let [_, columns, _, start_rows, start_columns, bad_start, k, _] = ranks[0] else {
        unreachable!("{FIELDS} fields a rank");
    };
    let n: u64 = ranks.iter().map(|fields| fields[0]).sum();
    if *k == 0 {
        return Err(KMeansError::NoClusters);
    }
    if n == 0 {
        return Err(KMeansError::NoRows);
    }
    if let Some(rank) = differs(1..2) {
        return Err(KMeansError::Columns {
            rank,
            got: ranks[rank][1],
            expected: *columns,
        });
    }
    let mut before = 0;
    for (rank, fields) in ranks.iter().enumerate() {
        if fields[2] != NONE {
            let row = before + fields[2];
            return Err(KMeansError::NotFinite { row, rank });
        }
        before += fields[0];
    }
    if *k > n {
        return Err(KMeansError::TooManyClusters { k: *k, n });
    }
    if start_rows != k {
        return Err(KMeansError::StartRows {
            rows: *start_rows,
            k: *k,
        });
    }
    if start_columns != columns {
        return Err(KMeansError::StartColumns {
            got: *start_columns,
            expected: *columns,
        });
    }
    if *bad_start != NONE {
        return Err(KMeansError::StartNotFinite { row: *bad_start });
    }
    if options.epsilon.is_nan() || options.epsilon < 0.0 || options.max_iter == 0 {
        return Err(KMeansError::Options {
            epsilon: options.epsilon,
            max_iter: options.max_iter,
        });
    }
    Ok(())
}

fn first_bad_row(matrix: &Matrix) -> u64 {
    let bad = matrix
        .iter()
        .position(|row| row.iter().any(|value| !value.is_finite()));
    bad.map_or(NONE, |row| row as u64)
}
