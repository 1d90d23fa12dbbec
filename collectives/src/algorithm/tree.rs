//! Binomial tree: few hops, the whole buffer on each.
//!
//! Ranks sit in the order of their distance from the root. Seat `s` hears from
//! `s + 1`, `s + 2`, `s + 4`, … below its own lowest set bit, nearest first, and
//! then speaks to the seat that has that bit cleared. So the sum is the tree
//! T(n) = T(p) + T(n - p), p the largest power of two below n, at every world
//! size. An all_reduce takes 2 log2 N hops and N - 1 buffers each way in all.
//!
//! A deterministic reduce climbs to rank 0, so that its order does not depend on
//! the root, and takes one hop more to another root.
use std::ops::Range;

use super::{Family, Flow, Shape};
use crate::{
    Collective, Place, Plan,
    schedule::{Step, Then},
};

pub(super) struct Tree;

impl Family for Tree {
    fn plan(&self, shape: &Shape<'_>, plan: &mut Plan) {
        let place = shape.place;
        let whole = |_| shape.whole();
        let branch = |seat| shape.parts.span(seat..seat + branch(seat, place.world));
        match shape.collective {
            Collective::AllReduce => {
                reduce(shape, 0, plan);
                plan.spread.extend(descend(place, 0, whole));
            }
            Collective::Reduce => {
                let top = top(shape);
                reduce(shape, top, plan);
                plan.spread.extend(last_hop(shape, top));
            }
            Collective::Broadcast => plan.spread.extend(descend(place, shape.root, whole)),
            Collective::AllGather => {
                plan.spread.extend(climb(place, 0, branch, Then::Replace));
                plan.spread.extend(descend(place, 0, whole));
            }
            _ => {
                reduce(shape, 0, plan);
                plan.spread.extend(descend(place, 0, branch));
            }
        }
    }

    fn flow(&self, shape: &Shape<'_>) -> [Flow; 2] {
        let (n, place) = (shape.len(), shape.place);
        let top = match shape.collective {
            Collective::Reduce => top(shape),
            _ => shape.root,
        };
        let seat = place.seat(top);
        let to_parent = if seat > 0 { n } else { 0 };
        let to_children = children(seat, place.world) * n;
        let (up, down) = (
            Flow::new(to_parent, to_children),
            Flow::new(to_children, to_parent),
        );
        // What hangs below this seat, itself included; there the seat is the rank.
        let hanging = || {
            shape
                .parts
                .span(seat..seat + branch(seat, place.world))
                .len()
        };
        let below = || hanging() - shape.own().len();
        let above = || if seat > 0 { hanging() } else { 0 };
        match shape.collective {
            Collective::AllReduce => [up, down],
            Collective::Reduce if top == shape.root => [up, Flow::NONE],
            Collective::Reduce if place.rank == top => [up, Flow::new(n, 0)],
            Collective::Reduce if shape.is_root() => [up, Flow::new(0, n)],
            Collective::Reduce => [up, Flow::NONE],
            Collective::Broadcast => [Flow::NONE, down],
            Collective::AllGather => [
                Flow::NONE,
                Flow::new(above() + to_children, below() + to_parent),
            ],
            _ => [up, Flow::new(below(), above())],
        }
    }
}

/// The rank at which a reduce ends its climb.
fn top(shape: &Shape<'_>) -> usize {
    if shape.deterministic { 0 } else { shape.root }
}

fn reduce(shape: &Shape<'_>, top: usize, plan: &mut Plan) {
    let whole = |_| shape.whole();
    plan.reduce
        .extend(climb(shape.place, top, whole, Then::Reduce));
    if shape.place.rank == top {
        plan.owned = shape.whole();
    }
}

/// From the top of the tree to a root that sits elsewhere.
fn last_hop(shape: &Shape<'_>, top: usize) -> Option<Step> {
    if top == shape.root {
        None
    } else if shape.place.rank == top {
        Some(Step::send(shape.root, shape.whole()))
    } else {
        shape
            .is_root()
            .then(|| Step::recv(top, shape.whole(), Then::Replace))
    }
}

/// Towards the root: take what each child has, then hand on what hangs here.
/// `carried` is what a seat hands on.
pub(super) fn climb(
    place: Place,
    root: usize,
    carried: impl Fn(usize) -> Range<usize>,
    then: Then,
) -> impl DoubleEndedIterator<Item = Step> {
    let seat = place.seat(root);
    let rank_at = move |seat: usize| (seat + root) % place.world;
    let hand_on = (seat > 0).then(|| Step::send(rank_at(seat & (seat - 1)), carried(seat)));
    (0..children(seat, place.world))
        .map(move |bit| {
            let child = seat + (1 << bit);
            Step::recv(rank_at(child), carried(child), then)
        })
        .chain(hand_on)
}

/// Away from the root: the way up, backwards.
pub(super) fn descend(
    place: Place,
    root: usize,
    carried: impl Fn(usize) -> Range<usize>,
) -> impl Iterator<Item = Step> {
    let up = climb(place, root, carried, Then::Replace);
    up.rev().map(|step| step.mirrored(Then::Replace))
}

/// How many seats speak to this one: the bits below its lowest, as far as seats go.
pub(super) fn children(seat: usize, world: usize) -> usize {
    let lowest = seat.trailing_zeros();
    let seats_left = (world - seat).next_power_of_two().trailing_zeros();
    lowest.min(seats_left) as usize
}

/// How many seats hang on this one, itself included.
pub(super) fn branch(seat: usize, world: usize) -> usize {
    let hanging = if seat == 0 {
        world
    } else {
        seat & seat.wrapping_neg()
    };
    hanging.min(world - seat)
}
