//! Ring: bandwidth-optimal, latency linear in the world size.
//!
//! Data flow down the ranks. In N - 1 turns of a reduce_scatter chunk `c` starts
//! at rank `c - 1` and gathers addends down to rank `c`, which keeps it; N - 1
//! turns of an all_gather hand the chunks on. An all_reduce is both: each rank
//! sends 2(N-1)/N of the buffer, whatever the world size.
//!
//! Direction and blocks of the all_reduce are gloo's, so its bits are gloo's:
//! block `b` is `((x[b-1] + x[b-2]) + …) + x[b]`.
use super::{Family, Flow, Shape};
use crate::{
    Collective, Partition, Parts, Place, Plan,
    schedule::{Step, Then},
};

pub(super) struct Ring;

impl Family for Ring {
    fn plan(&self, shape: &Shape<'_>, plan: &mut Plan) {
        let place = shape.place;
        match shape.collective {
            Collective::AllReduce => {
                let blocks = gloo_blocks(shape);
                plan.reduce.extend(turns(place, blocks, 1, Then::Reduce));
                plan.owned = blocks.range(place.rank);
                plan.spread.extend(turns(place, blocks, 0, Then::Replace));
            }
            Collective::Reduce => {
                let hop = place.world - 1 - place.seat(shape.root);
                plan.reduce.extend(relay(shape, hop, Then::Reduce));
                if shape.is_root() {
                    plan.owned = shape.whole();
                }
            }
            Collective::Broadcast => {
                let hop = (place.world - place.seat(shape.root)) % place.world;
                plan.spread.extend(relay(shape, hop, Then::Replace));
            }
            Collective::AllGather => {
                plan.spread
                    .extend(turns(place, shape.parts, 0, Then::Replace))
            }
            _ => {
                plan.reduce
                    .extend(turns(place, shape.parts, 1, Then::Reduce));
                plan.owned = shape.own();
            }
        }
    }

    fn flow(&self, shape: &Shape<'_>) -> [Flow; 2] {
        let (n, place) = (shape.len(), shape.place);
        let all_but = |chunks: Parts<'_>, rank: usize| n - chunks.range(rank).len();
        let gather =
            |chunks| Flow::new(all_but(chunks, place.down(1)), all_but(chunks, place.rank));
        let reduce = |chunks| Flow::new(all_but(chunks, place.rank), all_but(chunks, place.up(1)));
        let unless = |seat: usize| if place.seat(shape.root) == seat { 0 } else { n };
        match shape.collective {
            Collective::AllReduce => {
                let blocks = gloo_blocks(shape);
                [reduce(blocks), gather(blocks)]
            }
            // The chain ends at the root, and begins one seat down from it.
            Collective::Reduce => [Flow::new(unless(0), unless(place.world - 1)), Flow::NONE],
            Collective::Broadcast => [Flow::NONE, Flow::new(unless(1), unless(0))],
            Collective::AllGather => [Flow::NONE, gather(shape.parts)],
            _ => [reduce(shape.parts), Flow::NONE],
        }
    }
}

/// N - 1 turns, the first of which sends the chunk `first` places up from this
/// rank's own. From 1 on, chunk `r` ends on rank `r`; from 0 on, it starts there.
fn turns<'a>(
    place: Place,
    chunks: Parts<'a>,
    first: usize,
    then: Then,
) -> impl Iterator<Item = Step> + use<'a> {
    (first..first + place.world - 1).map(move |turn| {
        Step::send(place.down(1), chunks.range(place.up(turn))).and_recv(
            place.up(1),
            chunks.range(place.up(turn + 1)),
            then,
        )
    })
}

/// One buffer handed down the whole ring, cut into as many pieces as there are
/// ranks: a rank hands a piece on while it receives the next. `hop` is how many
/// ranks stand before this one.
fn relay(shape: &Shape<'_>, hop: usize, then: Then) -> impl Iterator<Item = Step> + use<> {
    let place = shape.place;
    let pieces = Partition::new(shape.len(), place.world);
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
fn gloo_blocks(shape: &Shape<'_>) -> Parts<'static> {
    const LARGEST_SEGMENT: usize = 1 << 20;
    let (len, world, size) = (shape.len(), shape.place.world, shape.dtype.size());
    let bytes = len * size;
    let segments = (bytes.div_ceil(LARGEST_SEGMENT).div_ceil(world) * world).max(2 * world);
    let segment = bytes.div_ceil(segments).div_ceil(size);
    Parts::Even(Partition::new(len, world).with_piece((segments / world * segment).max(1)))
}
