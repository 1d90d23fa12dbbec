//! Everything through one rank: the reference the others are checked against.
//!
//! Steps: 2 for most ranks, 2(N-1) for the one in the middle, whose link carries
//! the sum of all: 2(N-1) times the buffer for an all_reduce.
use super::{Family, Traffic};
use crate::{
    Call, Collective, Partition, Place, Schedule,
    schedule::{Step, Then},
};

pub(super) struct Naive;

impl Family for Naive {
    fn all_reduce(&self, place: Place, len: usize, _size: usize, plan: &mut Schedule) {
        self.reduce(place, 0, len, plan);
        self.broadcast(place, 0, len, plan);
    }

    fn reduce(&self, place: Place, root: usize, len: usize, plan: &mut Schedule) {
        if place.rank == root {
            plan.extend(others(place).map(|from| Step::recv(from, 0..len, Then::Reduce)));
        } else {
            plan.push(Step::send(root, 0..len));
        }
    }

    fn broadcast(&self, place: Place, root: usize, len: usize, plan: &mut Schedule) {
        if place.rank == root {
            plan.extend(others(place).map(|to| Step::send(to, 0..len)));
        } else {
            plan.push(Step::recv(root, 0..len, Then::Replace));
        }
    }

    fn all_gather(&self, place: Place, len: usize, plan: &mut Schedule) {
        let parts = Partition::new(len, place.world);
        if place.rank == 0 {
            plan.extend(
                others(place).map(|from| Step::recv(from, parts.range(from), Then::Replace)),
            );
        } else {
            plan.push(Step::send(0, parts.range(place.rank)));
        }
        self.broadcast(place, 0, len, plan);
    }

    fn reduce_scatter(&self, place: Place, len: usize, plan: &mut Schedule) {
        let parts = Partition::new(len, place.world);
        self.reduce(place, 0, len, plan);
        if place.rank == 0 {
            plan.extend(others(place).map(|to| Step::send(to, parts.range(to))));
        } else {
            plan.push(Step::recv(0, parts.range(place.rank), Then::Replace));
        }
    }

    fn traffic(&self, call: &Call, place: Place) -> Traffic {
        let (n, peers) = (call.len, place.world - 1);
        let centre = place.rank == call.root.unwrap_or(0);
        let own = Partition::new(n, place.world).range(place.rank).len();
        let (sent, received) = match (call.collective, centre) {
            (Collective::Reduce, true) => (0, peers * n),
            (Collective::Reduce, false) => (n, 0),
            (Collective::Broadcast, true) => (peers * n, 0),
            (Collective::Broadcast, false) => (0, n),
            (Collective::AllGather, true) => (peers * n, n - own),
            (Collective::AllGather, false) => (own, n),
            (Collective::ReduceScatter, true) => (n - own, peers * n),
            (Collective::ReduceScatter, false) => (n, own),
            (_, true) => (peers * n, peers * n),
            (_, false) => (n, n),
        };
        Traffic { sent, received }
    }
}

fn others(place: Place) -> impl Iterator<Item = usize> {
    (0..place.world).filter(move |&rank| rank != place.rank)
}
