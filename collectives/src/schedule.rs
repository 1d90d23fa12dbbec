//! Plans: the steps one rank takes to carry out one collective.
use std::ops::Range;

/// One rank's part in a collective, first step first.
pub type Schedule = Vec<Step>;

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
}

impl Step {
    /// A step that only sends.
    pub fn send(to: usize, range: Range<usize>) -> Self {
        Self {
            send: Some(Departure { to, range }),
            recv: None,
        }
    }

    /// A step that only receives.
    pub fn recv(from: usize, range: Range<usize>, then: Then) -> Self {
        Self {
            send: None,
            recv: Some(Arrival { from, range, then }),
        }
    }

    /// This step, receiving as well.
    pub fn and_recv(self, from: usize, range: Range<usize>, then: Then) -> Self {
        Self {
            recv: Some(Arrival { from, range, then }),
            ..self
        }
    }

    /// The same step the other way round: what was sent arrives and replaces.
    pub(crate) fn mirrored(self) -> Self {
        Self {
            send: self
                .recv
                .map(|Arrival { from, range, .. }| Departure { to: from, range }),
            recv: self.send.map(|Departure { to, range }| Arrival {
                from: to,
                range,
                then: Then::Replace,
            }),
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
            start..(start + segment).min(range.end)
        };
        (0..sends.max(recvs)).map(move |index| Step {
            send: self
                .send
                .as_ref()
                .filter(|_| index < sends)
                .map(|send| Departure {
                    to: send.to,
                    range: cut(&send.range, index),
                }),
            recv: self
                .recv
                .as_ref()
                .filter(|_| index < recvs)
                .map(|recv| Arrival {
                    from: recv.from,
                    range: cut(&recv.range, index),
                    then: recv.then,
                }),
        })
    }
}
