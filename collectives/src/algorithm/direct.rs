//! Direct: each part straight to the rank that owns it, and from there to all.
//!
//! In N - 1 turns a rank sends every other rank that rank's part, and sets aside
//! what the others send of its own; then it adds up, in the order of the one tree
//! over ranks. Same bytes as the ring in one hop a pass, but every rank speaks to
//! every other. With pieces of 4096 doubles this is Alink's AllReduce.
//!
//! Source: Alink's `AllReduce` operator; MPI texts call the passes pairwise exchange.
use super::{Family, Flow, Shape, nth_segment, segments};
use crate::{
    Collective, Partition, Parts, Plan,
    schedule::{Step, Then},
};

pub(super) struct Direct;

impl Family for Direct {
    fn plan(&self, shape: &Shape<'_>, plan: &mut Plan) {
        match shape.collective {
            Collective::AllReduce => {
                let shape = Shape {
                    parts: pieces(shape),
                    ..*shape
                };
                reduce(&shape, plan);
                plan.spread.extend(gather(&shape));
            }
            Collective::Reduce => {
                reduce(shape, plan);
                plan.spread.extend(to_root(shape));
            }
            Collective::Broadcast => {
                plan.spread
                    .extend(to_root(shape).map(|step| step.mirrored(Then::Replace)));
                plan.spread
                    .extend(gather(shape).filter_map(|step| past_root(shape, step)));
            }
            Collective::AllGather => plan.spread.extend(gather(shape)),
            _ => reduce(shape, plan),
        }
    }

    fn flow(&self, shape: &Shape<'_>) -> [Flow; 2] {
        let (n, peers) = (shape.len(), shape.place.world - 1);
        let passes = |own: usize| {
            let reduce = Flow::new(n - own, peers * own);
            [reduce, Flow::new(reduce.received, reduce.sent)]
        };
        let own = shape.own().len();
        let [reduce, gather] = passes(own);
        match shape.collective {
            Collective::AllReduce => passes(pieces(shape).range(shape.place.rank).len()),
            Collective::Reduce if shape.is_root() => [reduce, Flow::new(0, n - own)],
            Collective::Reduce => [reduce, Flow::new(own, 0)],
            // The root gives each rank its part, and its own part to all.
            Collective::Broadcast if shape.is_root() => {
                [Flow::NONE, Flow::new(n - own + peers * own, 0)]
            }
            Collective::Broadcast => [Flow::NONE, Flow::new((peers - 1) * own, n)],
            Collective::AllGather => [Flow::NONE, gather],
            _ => [reduce, Flow::NONE],
        }
    }

    fn carries_partial_sums(&self) -> bool {
        false
    }
}

/// Parts that are whole pieces, dealt evenly.
fn pieces(shape: &Shape<'_>) -> Parts<'static> {
    Parts::Even(Partition::new(shape.len(), shape.place.world).with_piece(shape.piece))
}

/// Segment by segment, so that what is set aside stays small.
fn reduce(shape: &Shape<'_>, plan: &mut Plan) {
    let place = shape.place;
    plan.owned = shape.own();
    if place.world == 1 {
        return;
    }
    let of =
        |rank: usize, index: usize| nth_segment(&shape.parts.range(rank), shape.segment, index);
    let longest = (0..place.world)
        .map(|rank| shape.parts.range(rank).len())
        .max()
        .unwrap_or(0);
    for index in 0..segments(0..longest, shape.segment).count() {
        let own = of(place.rank, index);
        plan.reduce.extend((1..place.world).filter_map(|turn| {
            let send = of(place.up(turn), index).map(|range| Step::send(place.up(turn), range));
            match (send, own.clone()) {
                (None, None) => None,
                (step, None) => step,
                (step, Some(own)) => Some(step.unwrap_or_default().and_recv(
                    place.down(turn),
                    own,
                    Then::SetAside,
                )),
            }
        }));
        plan.reduce.extend(own.map(Step::fold));
    }
}

/// Each rank gives its part to each other.
fn gather(shape: &Shape<'_>) -> impl Iterator<Item = Step> {
    let place = shape.place;
    (1..place.world).map(move |turn| {
        Step::send(place.up(turn), shape.own()).and_recv(
            place.down(turn),
            shape.parts.range(place.down(turn)),
            Then::Replace,
        )
    })
}

/// Each rank's part to the root.
fn to_root(shape: &Shape<'_>) -> impl Iterator<Item = Step> {
    let parts = shape.parts;
    let (to, from) = match shape.is_root() {
        true => (None, Some(shape.others())),
        false => (Some(Step::send(shape.root, shape.own())), None),
    };
    let take = move |from| Step::recv(from, parts.range(from), Then::Replace);
    to.into_iter().chain(from.into_iter().flatten().map(take))
}

/// A step of a gather in which the root, which has all, receives nothing.
fn past_root(shape: &Shape<'_>, step: Step) -> Option<Step> {
    let step = Step {
        send: step.send.filter(|send| send.to != shape.root),
        recv: step.recv.filter(|_| !shape.is_root()),
        fold: None,
    };
    (step != Step::default()).then_some(step)
}
