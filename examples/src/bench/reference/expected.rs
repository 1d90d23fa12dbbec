//! What should come out, where the recording has no elements.
use collectives::{Collective, Partition, ReduceOp};

use super::Case;
use crate::bench::numbers::Number;

/// What a rank gives or gets: elements, or nothing.
pub(super) type Side<T> = Option<Vec<T>>;

/// A plain fold in rank order, and parts where they belong: for what gloo refuses.
pub(super) fn plain<T: Number>(case: &Case, inputs: &[Side<T>]) -> Vec<Side<T>> {
    let given: Vec<&[T]> = inputs.iter().flatten().map(Vec::as_slice).collect();
    let folded = || {
        let mut sum = given[0].to_vec();
        for other in &given[1..] {
            T::fold(case.reduce.unwrap_or(ReduceOp::Sum), &mut sum, other);
        }
        sum
    };
    let part = |rank| Partition::new(case.len, case.world).range(rank);
    let of = |rank: usize| match case.collective {
        Collective::AllReduce => Some(folded()),
        Collective::Reduce => (rank == case.root).then(folded),
        Collective::ReduceScatter => Some(folded()[part(rank)].to_vec()),
        Collective::Broadcast => inputs[case.root].clone(),
        Collective::AllGather => Some(given.concat()),
        Collective::AllToAll => Some(
            given
                .iter()
                .flat_map(|giver| giver[part(rank)].to_vec())
                .collect(),
        ),
        _ => None,
    };
    (0..case.world).map(of).collect()
}

/// gloo's all_reduce, element by element: its order and its blocks, from its source.
///
/// Block `b` is `((x[b-1] + x[b-2]) + …) + x[b]`, indices going down around the ring.
/// Its hash is compared with the recorded one, so that this cannot be wrong unseen.
pub(super) fn gloo_ring<T: Number>(case: &Case, inputs: &[Side<T>]) -> Vec<T> {
    const LARGEST_SEGMENT: usize = 1 << 20;
    let (world, size) = (case.world, case.dtype.size());
    let bytes = case.len * size;
    let segments = (bytes.div_ceil(LARGEST_SEGMENT).div_ceil(world) * world).max(2 * world);
    let block = segments / world * bytes.div_ceil(segments).div_ceil(size);
    let given: Vec<&[T]> = inputs.iter().flatten().map(Vec::as_slice).collect();
    let mut sums = vec![T::of(0.0); case.len];
    for (number, sums) in sums.chunks_mut(block.max(1)).enumerate() {
        let at = number * block..number * block + sums.len();
        let order = (1..=world).map(|down| (number + world - down) % world);
        for (turn, rank) in order.enumerate() {
            let addends = &given[rank][at.clone()];
            match turn {
                0 => sums.copy_from_slice(addends),
                _ => T::fold(ReduceOp::Sum, sums, addends),
            }
        }
    }
    if case.reduce == Some(ReduceOp::Mean) {
        T::divide(&mut sums, world);
    }
    sums
}
