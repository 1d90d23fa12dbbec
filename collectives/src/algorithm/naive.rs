//! Everything through one rank: the reference the others are checked against.
//!
//! Steps: 2 for most ranks, 2(N-1) for the one in the middle, whose link carries
//! the sum of all: 2(N-1) times the buffer for an all_reduce.
use super::{Family, Flow, Shape, segments};
use crate::{
    Collective, Plan,
    schedule::{Step, Then},
};

pub(super) struct Naive;

impl Family for Naive {
    fn plan(&self, shape: &Shape<'_>, plan: &mut Plan) {
        match shape.collective {
            Collective::AllReduce => {
                reduce(shape, plan);
                hand_out(shape, plan);
            }
            Collective::Reduce => reduce(shape, plan),
            Collective::Broadcast => hand_out(shape, plan),
            Collective::AllGather => {
                match shape.is_root() {
                    true => plan.spread.extend(
                        shape
                            .others()
                            .map(|from| Step::recv(from, shape.parts.range(from), Then::Replace)),
                    ),
                    false => plan.spread.push(Step::send(shape.root, shape.own())),
                }
                hand_out(shape, plan);
            }
            _ => {
                reduce(shape, plan);
                match shape.is_root() {
                    true => plan.spread.extend(
                        shape
                            .others()
                            .map(|to| Step::send(to, shape.parts.range(to))),
                    ),
                    false => {
                        plan.spread
                            .push(Step::recv(shape.root, shape.own(), Then::Replace));
                    }
                }
            }
        }
    }

    fn flow(&self, shape: &Shape<'_>) -> [Flow; 2] {
        let (n, peers) = (shape.len(), shape.place.world - 1);
        let own = shape.own().len();
        let (gather, hand_out) = match shape.is_root() {
            true => (Flow::new(0, peers * n), Flow::new(peers * n, 0)),
            false => (Flow::new(n, 0), Flow::new(0, n)),
        };
        match (shape.collective, shape.is_root()) {
            (Collective::AllReduce, _) => [gather, hand_out],
            (Collective::Reduce, _) => [gather, Flow::NONE],
            (Collective::Broadcast, _) => [Flow::NONE, hand_out],
            (Collective::AllGather, true) => [Flow::NONE, Flow::new(peers * n, n - own)],
            (Collective::AllGather, false) => [Flow::NONE, Flow::new(own, n)],
            (_, true) => [gather, Flow::new(n - own, 0)],
            (_, false) => [gather, Flow::new(0, own)],
        }
    }

    fn carries_partial_sums(&self) -> bool {
        false
    }
}

fn reduce(shape: &Shape<'_>, plan: &mut Plan) {
    if !shape.is_root() {
        plan.reduce.push(Step::send(shape.root, shape.whole()));
        return;
    }
    plan.owned = shape.whole();
    if shape.place.world == 1 {
        return;
    }
    for segment in segments(shape.whole(), shape.segment) {
        let recv = |from| Step::recv(from, segment.clone(), Then::SetAside);
        plan.reduce.extend(shape.others().map(recv));
        plan.reduce.push(Step::fold(segment.clone()));
    }
}

fn hand_out(shape: &Shape<'_>, plan: &mut Plan) {
    match shape.is_root() {
        true => plan
            .spread
            .extend(shape.others().map(|to| Step::send(to, shape.whole()))),
        false => plan
            .spread
            .push(Step::recv(shape.root, shape.whole(), Then::Replace)),
    }
}
