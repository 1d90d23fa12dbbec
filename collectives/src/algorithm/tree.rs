//! Binomial tree: few hops, the whole buffer on each.
//!
//! Ranks sit in the order of their distance from the root. Seat `s` hears from
//! `s + 1`, `s + 2`, `s + 4`, … below its own lowest set bit, nearest first, and
//! then speaks to the seat that has that bit cleared. So the sum is the tree
//! T(n) = T(p) + T(n - p), p the largest power of two below n, at every world
//! size. An all_reduce takes 2 log2 N hops and N - 1 buffers each way in all.
use super::{Family, Traffic};
use crate::{
    Call, Collective, Partition, Place, Schedule,
    schedule::{Step, Then},
};

pub(super) struct Tree;

impl Family for Tree {
    fn all_reduce(&self, place: Place, len: usize, _size: usize, plan: &mut Schedule) {
        self.reduce(place, 0, len, plan);
        self.broadcast(place, 0, len, plan);
    }

    fn reduce(&self, place: Place, root: usize, len: usize, plan: &mut Schedule) {
        plan.extend(climb(place, root, |_| 0..len, Then::Reduce));
    }

    fn broadcast(&self, place: Place, root: usize, len: usize, plan: &mut Schedule) {
        plan.extend(descend(place, root, |_| 0..len));
    }

    fn all_gather(&self, place: Place, len: usize, plan: &mut Schedule) {
        let parts = Partition::new(len, place.world);
        let branch = |seat| parts.span(seat..seat + branch(seat, place.world));
        plan.extend(climb(place, 0, branch, Then::Replace));
        self.broadcast(place, 0, len, plan);
    }

    fn reduce_scatter(&self, place: Place, len: usize, plan: &mut Schedule) {
        let parts = Partition::new(len, place.world);
        let branch = |seat| parts.span(seat..seat + branch(seat, place.world));
        self.reduce(place, 0, len, plan);
        plan.extend(descend(place, 0, branch));
    }

    fn traffic(&self, call: &Call, place: Place) -> Traffic {
        let n = call.len;
        let seat = place.seat(call.root.unwrap_or(0));
        let parts = Partition::new(n, place.world);
        let to_parent = if seat > 0 { n } else { 0 };
        let to_children = children(seat, place.world) * n;
        // What hangs below this seat, itself included; parts lie in seat order here.
        let whole = parts.span(seat..seat + branch(seat, place.world)).len();
        let below = whole - parts.range(seat).len();
        let above = if seat > 0 { whole } else { 0 };
        let (sent, received) = match call.collective {
            Collective::Reduce => (to_parent, to_children),
            Collective::Broadcast => (to_children, to_parent),
            Collective::AllGather => (above + to_children, below + to_parent),
            Collective::ReduceScatter => (to_parent + below, to_children + above),
            _ => (to_parent + to_children, to_parent + to_children),
        };
        Traffic { sent, received }
    }
}

/// Towards the root: take what each child has, then hand on what hangs here.
fn climb(
    place: Place,
    root: usize,
    carried: impl Fn(usize) -> std::ops::Range<usize>,
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
fn descend(
    place: Place,
    root: usize,
    carried: impl Fn(usize) -> std::ops::Range<usize>,
) -> impl Iterator<Item = Step> {
    climb(place, root, carried, Then::Replace)
        .rev()
        .map(Step::mirrored)
}

/// How many seats speak to this one: the bits below its lowest, as far as seats go.
fn children(seat: usize, world: usize) -> usize {
    let lowest = seat.trailing_zeros();
    let seats_left = (world - seat).next_power_of_two().trailing_zeros();
    lowest.min(seats_left) as usize
}

/// How many seats hang on this one, itself included.
fn branch(seat: usize, world: usize) -> usize {
    let below = if seat == 0 {
        world
    } else {
        seat & seat.wrapping_neg()
    };
    below.min(world - seat)
}
