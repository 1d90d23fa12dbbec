//! What was moved for gradients and parameters.

use std::ops::{Add, Sub};

use collectives::{Collective, Row, Stats};

/// The collectives that training consists of: all-reduces of gradients, or reduce-scatters and
/// gathers of parameters; and where micro-shards do not close the exchange of their blocks.
pub(crate) const KINDS: [Collective; 4] = [
    Collective::AllReduce,
    Collective::ReduceScatter,
    Collective::AllGather,
    Collective::AllToAll,
];

/// Elements and bytes of each of [`KINDS`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Moved(pub(crate) [Row; 4]);

impl Moved {
    /// All that has been moved so far.
    pub(crate) fn of(stats: &Stats) -> Self {
        Self(KINDS.map(|kind| stats.of(kind)))
    }

    /// Over all collectives.
    pub(crate) fn total(&self) -> Row {
        self.0.iter().fold(Row::default(), |sum, row| sum + *row)
    }
}

impl Add for Moved {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(std::array::from_fn(|kind| self.0[kind] + other.0[kind]))
    }
}

impl Sub for Moved {
    type Output = Self;

    /// What came after `before`: calls, elements, and bytes sent.
    fn sub(self, before: Self) -> Self {
        let since = |kind: usize| {
            let (row, before) = (self.0[kind], before.0[kind]);
            Row {
                calls: row.calls - before.calls,
                elements: row.elements - before.elements,
                bytes_sent: row.bytes_sent - before.bytes_sent,
                predicted_sent: row.predicted_sent - before.predicted_sent,
                ..row
            }
        };
        Self(std::array::from_fn(since))
    }
}
