//! Recursive halving and doubling: the fewest bytes in the fewest hops.
//!
//! An all_reduce among a power of two exchanges halves with the rank 1 away, then
//! quarters with the one 2 away, and so on, and goes the same way back. Nearest
//! partner first, so the sum is the one tree over ranks; 2 log2 N hops, and each
//! rank sends 2(N-1)/N of the buffer.
//!
//! At any other world size, and for the other collectives, a rank doubles what it
//! holds from the ranks 1, 2, 4, … above (for a reduction the same way backwards):
//! as many hops and bytes, in another order of the sum.
//!
//! Sources: Rabenseifner 2004 (halving and doubling); Bruck et al. 1997 (any world size).
use std::ops::Range;

use super::{Family, Flow, Shape, tree};
use crate::{
    Collective, Place, Plan,
    schedule::{Step, Then},
};

pub(super) struct Halving;

impl Family for Halving {
    fn plan(&self, shape: &Shape<'_>, plan: &mut Plan) {
        let branch = |seat| {
            let seats = seat..seat + tree::branch(seat, shape.place.world);
            shape.parts.span(seats)
        };
        match shape.collective {
            Collective::AllReduce if shape.place.world.is_power_of_two() => butterfly(shape, plan),
            Collective::AllReduce => {
                plan.reduce.extend(fold_in(shape, 0));
                plan.owned = shape.own();
                plan.spread.extend(double(shape, 0));
            }
            Collective::Reduce => {
                plan.reduce.extend(fold_in(shape, shape.root));
                plan.owned = shape.parts.range(shape.place.seat(shape.root));
                plan.spread
                    .extend(tree::climb(shape.place, shape.root, branch, Then::Replace));
            }
            Collective::Broadcast => {
                plan.spread
                    .extend(tree::descend(shape.place, shape.root, branch));
                plan.spread.extend(double(shape, shape.root));
            }
            Collective::AllGather => plan.spread.extend(double(shape, 0)),
            _ => {
                plan.reduce.extend(fold_in(shape, 0));
                plan.owned = shape.own();
            }
        }
    }

    fn flow(&self, shape: &Shape<'_>) -> [Flow; 2] {
        let (n, place) = (shape.len(), shape.place);
        let seat = place.seat(shape.root);
        let own = shape.parts.range(seat).len();
        let sent: usize = doublings(place.world)
            .flat_map(|(_, count)| cyclic(seat, count, place.world))
            .flatten()
            .map(|seats| shape.parts.span(seats).len())
            .sum();
        let double = Flow::new(sent, n - own);
        let fold_in = Flow::new(n - own, sent);
        // A tree's way to or from the root: all that hangs on a seat passes it.
        let hanging = shape
            .parts
            .span(seat..seat + tree::branch(seat, place.world))
            .len();
        let above = if seat > 0 { hanging } else { 0 };
        let up = Flow::new(above, hanging - own);
        match shape.collective {
            Collective::AllReduce if place.world.is_power_of_two() => {
                let add = |(all, _), half: Half| (all + half.keep.len(), half.keep.len());
                let (all, last) = halves(shape).fold((0, n), add);
                [Flow::new(n - last, all), Flow::new(all, n - last)]
            }
            Collective::AllReduce => [fold_in, double],
            Collective::Reduce => [fold_in, up],
            Collective::Broadcast => {
                let (sent, received) = (up.received + double.sent, up.sent + double.received);
                [Flow::NONE, Flow::new(sent, received)]
            }
            Collective::AllGather => [Flow::NONE, double],
            _ => [fold_in, Flow::NONE],
        }
    }
}

/// One exchange of halves.
struct Half {
    partner: usize,
    give: Range<usize>,
    keep: Range<usize>,
}

/// The buffer halved with the partner 1, 2, 4, … away: the lower half to the
/// rank whose bit is clear.
fn halves(shape: &Shape<'_>) -> impl Iterator<Item = Half> + use<> {
    let Place { rank, world } = shape.place;
    let mut held = shape.whole();
    (0..world.trailing_zeros()).map(move |bit| {
        let middle = held.start + held.len().div_ceil(2);
        let (low, high) = (held.start..middle, middle..held.end);
        let (keep, give) = if rank >> bit & 1 == 0 {
            (low, high)
        } else {
            (high, low)
        };
        held = keep.clone();
        Half {
            partner: rank ^ 1 << bit,
            give,
            keep,
        }
    })
}

fn butterfly(shape: &Shape<'_>, plan: &mut Plan) {
    plan.owned = shape.whole();
    for Half {
        partner,
        give,
        keep,
    } in halves(shape)
    {
        plan.owned = keep.clone();
        plan.reduce
            .push(Step::send(partner, give).and_recv(partner, keep, Then::Reduce));
    }
    let back = plan.reduce.iter().rev().cloned();
    plan.spread
        .extend(back.map(|step| step.mirrored(Then::Replace)));
}

/// Distances 1, 2, 4, … below `world`, and the parts that then change hands.
fn doublings(world: usize) -> impl DoubleEndedIterator<Item = (usize, usize)> {
    (0..world.next_power_of_two().trailing_zeros()).map(move |bit| {
        let distance = 1 << bit;
        (distance, distance.min(world - distance))
    })
}

/// `count` seats from `first` on, around the end: one range of seats, or two.
fn cyclic(first: usize, count: usize, world: usize) -> [Option<Range<usize>>; 2] {
    let first = first % world;
    let wrapped = (first + count).saturating_sub(world);
    let around = (wrapped > 0).then_some(0..wrapped);
    [Some(first..first + count - wrapped), around]
}

/// From its own part to all: part `s` of the buffer starts at seat `s`.
fn double<'a>(shape: &Shape<'a>, root: usize) -> impl DoubleEndedIterator<Item = Step> + use<'a> {
    let (place, parts) = (shape.place, shape.parts);
    let seat = place.seat(root);
    doublings(place.world).flat_map(move |(distance, count)| {
        let gives = cyclic(seat, count, place.world);
        let takes = cyclic(seat + distance, count, place.world);
        gives.into_iter().zip(takes).filter_map(move |pair| {
            let send = |seats| Step::send(place.down(distance), parts.span(seats));
            let (give, take) = pair;
            match take {
                None => give.map(send),
                Some(seats) => {
                    let step = give.map(send).unwrap_or_default();
                    Some(step.and_recv(place.up(distance), parts.span(seats), Then::Replace))
                }
            }
        })
    })
}

/// From all to its own part: the doubling backwards, with sums for copies.
fn fold_in<'a>(shape: &Shape<'a>, root: usize) -> impl Iterator<Item = Step> + use<'a> {
    double(shape, root)
        .rev()
        .map(|step| step.mirrored(Then::Reduce))
}
