//! Plans: the steps one rank takes to carry out one collective.
use std::ops::Range;

/// One rank's part in a collective, in two passes.
///
/// The first brings the addends of each range to the rank that finishes it, the
/// second hands the finished ranges on. Between the two a mean is divided and a
/// 16-bit result rounded, once, by the rank that owns it. A collective that
/// reduces nothing has only the second pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The way in, first step first.
    pub reduce: Vec<Step>,
    /// What this rank holds finished after it.
    pub owned: Range<usize>,
    /// The way out.
    pub spread: Vec<Step>,
}

impl Plan {
    /// Empties the plan and keeps its room.
    pub fn clear(&mut self) {
        self.reduce.clear();
        self.owned = 0..0;
        self.spread.clear();
    }

    /// Whether what this rank owns is completed where it is folded, out of what was
    /// set aside, and not where it lies.
    pub(crate) fn folds_aside(&self) -> bool {
        self.reduce.iter().any(|step| step.fold.is_some())
    }

    /// The steps of both passes.
    pub fn steps(&self) -> impl Iterator<Item = &Step> {
        self.reduce.iter().chain(&self.spread)
    }
}

/// A send and a receive that happen at the same time; either may be absent.
///
/// The two ranges never overlap. A range may be empty: the message still goes,
/// since it carries the fingerprint and keeps the ranks in step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// What leaves.
    pub send: Option<Departure>,
    /// What arrives.
    pub recv: Option<Arrival>,
    /// Then: the range in which this rank's own elements and those
    /// [set aside](Then::SetAside) for it are folded, in the order of the tree
    /// T(n) = T(p) + T(n - p) over ranks, p the largest power of two below n.
    pub fold: Option<Range<usize>>,
}

/// Elements that leave this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Departure {
    /// The rank they go to.
    pub to: usize,
    /// Where they lie in the buffer.
    pub range: Range<usize>,
}

/// Elements that reach this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// The rank they come from.
    pub from: usize,
    /// Where they land in the buffer.
    pub range: Range<usize>,
    /// What becomes of what lay there.
    pub then: Then,
}

/// What happens to the old elements when new ones land on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// They are folded together.
    Reduce,
    /// The new ones take their place.
    Replace,
    /// The new ones wait, by rank, until all have come and a step folds them.
    SetAside,
}

impl Step {
    /// A step that only sends.
    pub fn send(to: usize, range: Range<usize>) -> Self {
        Self {
            send: Some(Departure { to, range }),
            ..Self::default()
        }
    }

    /// A step that only receives.
    pub fn recv(from: usize, range: Range<usize>, then: Then) -> Self {
        Self {
            recv: Some(Arrival { from, range, then }),
            ..Self::default()
        }
    }

    /// This step, receiving as well.
    pub fn and_recv(self, from: usize, range: Range<usize>, then: Then) -> Self {
        Self {
            recv: Some(Arrival { from, range, then }),
            ..self
        }
    }

    /// A step that moves nothing, and folds what was set aside for `range`.
    pub fn fold(range: Range<usize>) -> Self {
        Self {
            fold: Some(range),
            ..Self::default()
        }
    }

    /// The same step the other way round: what was sent arrives, and `then`.
    pub(crate) fn mirrored(self, then: Then) -> Self {
        Self {
            send: self
                .recv
                .map(|Arrival { from, range, .. }| Departure { to: from, range }),
            recv: self.send.map(|Departure { to, range }| Arrival {
                from: to,
                range,
                then,
            }),
            fold: None,
        }
    }

    /// This step cut into messages of at most `segment` elements, so that large
    /// messages are copied, moved and folded while they are still in the cache.
    ///
    /// Both ends cut a message alike, since only its length decides.
    pub fn segments(&self, segment: usize) -> impl Iterator<Item = Step> + '_ {
        let count = |range: &Range<usize>| range.len().div_ceil(segment).max(1);
        let sends = self.send.as_ref().map_or(0, |send| count(&send.range));
        let recvs = self.recv.as_ref().map_or(0, |recv| count(&recv.range));
        let cut = move |range: &Range<usize>, index: usize| {
            let start = range.start + index * segment;
            start..start.saturating_add(segment).min(range.end)
        };
        let last = sends.max(recvs).max(1) - 1;
        (0..=last).map(move |index| Step {
            send: (self.send.as_ref().filter(|_| index < sends)).map(|send| Departure {
                to: send.to,
                range: cut(&send.range, index),
            }),
            recv: (self.recv.as_ref().filter(|_| index < recvs)).map(|recv| Arrival {
                from: recv.from,
                range: cut(&recv.range, index),
                then: recv.then,
            }),
            fold: self.fold.clone().filter(|_| index == last),
        })
    }
}
