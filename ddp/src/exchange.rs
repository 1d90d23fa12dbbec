//! Sums whose shards do not close to one vector a rank.
//!
//! Each rank's aligned blocks go, part by part, to the part's owner, which finishes the tree over
//! all shards; the parts are then gathered. With b blocks on a rank that is b (N-1)/N vectors sent
//! and one (N-1)/N for the gathering, against 2 (N-1)/N for an all-reduce of closed sums.
use collectives::Communicator;

use crate::real::{self, Real};
use crate::shards::{Shards, Sum};

/// Replaces `first` by T(V) over the blocks of all ranks. `first` is the first block of this rank,
/// `others` are the rest of them, in order.
pub(crate) fn all_reduce_blocks<'a, T: Real>(
    first: &mut [T],
    others: impl Iterator<Item = &'a [T]> + Clone,
    shards: Shards,
    communicator: &mut Communicator,
) -> collectives::Result<()> {
    reduce_scatter_blocks(first, others, shards, communicator)?;
    communicator.all_gather_in_place(first)
}

/// As [`all_reduce_blocks`], but each rank's part alone; the rest of `first` stays as it was.
pub(crate) fn reduce_scatter_blocks<'a, T: Real>(
    first: &mut [T],
    others: impl Iterator<Item = &'a [T]> + Clone,
    shards: Shards,
    communicator: &mut Communicator,
) -> collectives::Result<()> {
    let len = first.len();
    let world = communicator.world_size();
    let parts = communicator.partition(len);
    let own = communicator.part(len);
    let blocks = |rank| shards.blocks_of(rank);
    let here = blocks(communicator.rank()).len();

    let mut give = Vec::with_capacity(here * len);
    for rank in 0..world {
        give.extend_from_slice(&first[parts.range(rank)]);
        for other in others.clone() {
            give.extend_from_slice(&other[parts.range(rank)]);
        }
    }
    let give_counts: Vec<usize> = (0..world).map(|to| here * parts.range(to).len()).collect();
    let take_counts: Vec<usize> = (0..world)
        .map(|from| blocks(from).len() * own.len())
        .collect();
    let mut take = vec![T::from_f64(0.0); take_counts.iter().sum()];
    communicator.all_to_all_v(&give, &give_counts, &mut take, &take_counts)?;

    if !own.is_empty() {
        let mut sum = Sum::default();
        let all_blocks = (0..world).flat_map(blocks);
        for (block, part) in all_blocks.zip(take.chunks_exact(own.len())) {
            sum.push_block(block, part.to_vec(), add());
        }
        if let Some(sum) = sum.finish(add()) {
            first[own].copy_from_slice(&sum);
        }
    }
    Ok(())
}

/// Adds the sums of all ranks, continuing the tree if there is one; every rank gets the result.
pub(crate) fn all_reduce<T: Real>(
    sum: Sum<Vec<T>>,
    shards: Option<Shards>,
    communicator: &mut Communicator,
) -> collectives::Result<Vec<T>> {
    match shards.filter(|shards| !shards.is_closed()) {
        Some(shards) => {
            let mut blocks = sum.into_values();
            let mut first = blocks.remove(0);
            let others = blocks.iter().map(Vec::as_slice);
            all_reduce_blocks(&mut first, others, shards, communicator)?;
            Ok(first)
        }
        None => {
            let mut closed = sum.finish(add()).unwrap_or_default();
            communicator.all_reduce(&mut closed, collectives::ReduceOp::Sum)?;
            Ok(closed)
        }
    }
}

/// How a tree over vectors adds two of them.
fn add<T: Real>() -> impl FnMut(&mut Vec<T>, Vec<T>) {
    |left, right| real::add(left, &right)
}
