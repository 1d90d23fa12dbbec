//! Collectives that move parts between two buffers: there is one way to do them,
//! each part straight to where it belongs.
use crate::{
    Parts, Place,
    schedule::{Step, Then},
};

/// Each rank's part, sent out of a buffer that holds it alone, into the root's
/// whole. The root's own part does not travel.
pub(crate) fn gather(place: Place, root: usize, parts: Parts<'_>, steps: &mut Vec<Step>) {
    if place.rank == root {
        let others = (0..place.world).filter(|&rank| rank != root);
        steps.extend(others.map(|from| Step::recv(from, parts.range(from), Then::Replace)));
    } else {
        steps.push(Step::send(root, 0..parts.range(place.rank).len()));
    }
}

/// A gather the other way round.
pub(crate) fn scatter(place: Place, root: usize, parts: Parts<'_>, steps: &mut Vec<Step>) {
    gather(place, root, parts, steps);
    steps
        .iter_mut()
        .for_each(|step| *step = std::mem::take(step).mirrored(Then::Replace));
}

/// Part `r` of what this rank gives goes to rank `r`; what rank `r` gives it lands
/// in part `r`. In turn `t` with the ranks `t` up and `t` down.
pub(crate) fn all_to_all(place: Place, give: Parts<'_>, take: Parts<'_>, steps: &mut Vec<Step>) {
    steps.extend((1..place.world).map(|turn| {
        Step::send(place.up(turn), give.range(place.up(turn))).and_recv(
            place.down(turn),
            take.range(place.down(turn)),
            Then::Replace,
        )
    }));
}
