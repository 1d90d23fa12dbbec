//! Ring: bandwidth-optimal, latency linear in the world size.
//!
//! Data flow down the ranks. In N - 1 turns of a reduce_scatter chunk `c` starts
//! at rank `c - 1` and gathers addends down to rank `c`, which keeps it; N - 1
//! turns of an all_gather hand the chunks on. An all_reduce is both: each rank
//! sends 2(N-1)/N of the buffer, whatever the world size.
//!
//! Direction and blocks of the all_reduce are gloo's, so its bits are gloo's:
//! block `b` is `((x[b-1] + x[b-2]) + …) + x[b]`.
use super::{Family, Traffic};
use crate::{
    Call, Collective, Partition, Place, Schedule,
    schedule::{Step, Then},
};

pub(super) struct Ring;

impl Family for Ring {
    fn all_reduce(&self, place: Place, len: usize, size: usize, plan: &mut Schedule) {
        let chunks = gloo_blocks(len, size, place.world);
        plan.extend(reduce_turns(place, chunks));
        plan.extend(gather_turns(place, chunks));
    }

    fn reduce(&self, place: Place, root: usize, len: usize, plan: &mut Schedule) {
        let end = place.world - 1;
        plan.extend(relay(place, len, end - place.seat(root), Then::Reduce));
    }

    fn broadcast(&self, place: Place, root: usize, len: usize, plan: &mut Schedule) {
        let from_root = (place.world - place.seat(root)) % place.world;
        plan.extend(relay(place, len, from_root, Then::Replace));
    }

    fn all_gather(&self, place: Place, len: usize, plan: &mut Schedule) {
        plan.extend(gather_turns(place, Partition::new(len, place.world)));
    }

    fn reduce_scatter(&self, place: Place, len: usize, plan: &mut Schedule) {
        plan.extend(reduce_turns(place, Partition::new(len, place.world)));
    }

    fn traffic(&self, call: &Call, place: Place) -> Traffic {
        let n = call.len;
        let all_but = |chunks: Partition, rank: usize| n - chunks.range(rank).len();
        let parts = Partition::new(n, place.world);
        let seat = place.seat(call.root.unwrap_or(0));
        let unless = |at: usize| if seat == at { 0 } else { n };
        let (sent, received) = match call.collective {
            // Up the chain sits seat N - 1, which is the first to speak.
            Collective::Reduce => (unless(0), unless(place.world - 1)),
            Collective::Broadcast => (unless(1), unless(0)),
            Collective::AllGather => (all_but(parts, place.down(1)), all_but(parts, place.rank)),
            Collective::ReduceScatter => (all_but(parts, place.rank), all_but(parts, place.up(1))),
            _ => {
                let blocks = gloo_blocks(n, call.dtype.size(), place.world);
                (
                    all_but(blocks, place.rank) + all_but(blocks, place.down(1)),
                    all_but(blocks, place.up(1)) + all_but(blocks, place.rank),
                )
            }
        };
        Traffic { sent, received }
    }
}

/// Leaves chunk `r` of the reduced buffer on rank `r`.
fn reduce_turns(place: Place, chunks: Partition) -> impl Iterator<Item = Step> {
    (1..place.world).map(move |turn| {
        Step::send(place.down(1), chunks.range(place.up(turn))).and_recv(
            place.up(1),
            chunks.range(place.up(turn + 1)),
            Then::Reduce,
        )
    })
}

/// Hands chunk `r`, which rank `r` holds, to every rank.
fn gather_turns(place: Place, chunks: Partition) -> impl Iterator<Item = Step> {
    (0..place.world - 1).map(move |turn| {
        Step::send(place.down(1), chunks.range(place.up(turn))).and_recv(
            place.up(1),
            chunks.range(place.up(turn + 1)),
            Then::Replace,
        )
    })
}

/// One buffer handed down the whole ring, cut into as many pieces as there are
/// ranks: a rank hands a piece on while it receives the next. `hop` is how many
/// ranks stand before this one.
fn relay(place: Place, len: usize, hop: usize, then: Then) -> impl Iterator<Item = Step> {
    let pieces = Partition::new(len, place.world);
    let (first, last) = (hop == 0, hop == place.world - 1);
    let turns = if place.world > 1 { place.world + 1 } else { 0 };
    (0..turns).filter_map(move |turn| {
        let leaves = (turn > 0 && !last).then(|| pieces.range(turn - 1));
        let lands = (turn < place.world && !first).then(|| pieces.range(turn));
        match (leaves, lands) {
            (Some(out), Some(back)) => {
                Some(Step::send(place.down(1), out).and_recv(place.up(1), back, then))
            }
            (Some(out), None) => Some(Step::send(place.down(1), out)),
            (None, Some(back)) => Some(Step::recv(place.up(1), back, then)),
            (None, None) => None,
        }
    })
}

/// The blocks of gloo's ring: segments of about 1 MiB, at least two a rank.
///
/// Source: gloo's `allreduce.cc`; checked bit for bit against recorded outputs.
fn gloo_blocks(len: usize, size: usize, world: usize) -> Partition {
    const LARGEST_SEGMENT: usize = 1 << 20;
    let bytes = len * size;
    let segments = (bytes.div_ceil(LARGEST_SEGMENT).div_ceil(world) * world).max(2 * world);
    let segment = bytes.div_ceil(segments).div_ceil(size);
    Partition::new(len, world).with_piece((segments / world * segment).max(1))
}
