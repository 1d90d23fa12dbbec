//! What was moved, by whom, how, and how long it took.
use std::{collections::BTreeMap, fmt, time::Duration};

use crate::{Collective, Route, Traffic, transport::Counts};

/// Counters of one communicator. Always on: they cost two additions a message.
///
/// Bytes are payload, counted where they pass the transport; the predictions are
/// each algorithm's closed form. The two columns are equal.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    rows: BTreeMap<Key, Row>,
    sent: Vec<Counts>,
    received: Vec<Counts>,
}

/// What a row of [`Stats`] is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// The operation.
    pub collective: Collective,
    /// The algorithm that ran; none for single messages.
    pub algorithm: Option<Route>,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.algorithm {
            Some(algorithm) => write!(f, "{}:{algorithm}", self.collective),
            None => write!(f, "{}", self.collective),
        }
    }
}

/// The calls of one kind. Calls that failed are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Row {
    /// How many calls.
    pub calls: u64,
    /// Elements in their buffers.
    pub elements: u64,
    /// Bytes that left this rank.
    pub bytes_sent: u64,
    /// Bytes that reached it.
    pub bytes_received: u64,
    /// Bytes that should have left it, by formula.
    pub predicted_sent: u64,
    /// Bytes that should have reached it, by formula.
    pub predicted_received: u64,
    /// Messages that left this rank.
    pub messages_sent: u64,
    /// Messages that reached it.
    pub messages_received: u64,
    /// Time inside the calls, waiting included.
    pub time: Duration,
}

impl Stats {
    pub(crate) fn new(world: usize) -> Self {
        Self {
            sent: vec![Counts::default(); world],
            received: vec![Counts::default(); world],
            ..Self::default()
        }
    }

    /// Adds one call, given the transport's counters after it.
    pub(crate) fn record(
        &mut self,
        key: Key,
        elements: usize,
        predicted: Traffic,
        time: Duration,
        sent: &[Counts],
        received: &[Counts],
    ) {
        let out = advance(&mut self.sent, sent);
        let back = advance(&mut self.received, received);
        let row = self.rows.entry(key).or_default();
        row.calls += 1;
        row.elements += elements as u64;
        row.bytes_sent += out.bytes;
        row.bytes_received += back.bytes;
        row.predicted_sent += predicted.sent as u64;
        row.predicted_received += predicted.received as u64;
        row.messages_sent += out.messages;
        row.messages_received += back.messages;
        row.time += time;
    }

    /// A row for each operation and algorithm that ran.
    pub fn rows(&self) -> impl Iterator<Item = (&Key, &Row)> {
        self.rows.iter()
    }

    /// The rows of one operation, added up over algorithms.
    pub fn of(&self, collective: Collective) -> Row {
        self.rows
            .iter()
            .filter(|(key, _)| key.collective == collective)
            .fold(Row::default(), |sum, (_, row)| sum + *row)
    }

    /// All rows added up.
    pub fn total(&self) -> Row {
        self.rows
            .values()
            .fold(Row::default(), |sum, row| sum + *row)
    }

    /// The algorithms that ran for `collective`, simplest first.
    pub fn algorithms(&self, collective: Collective) -> impl Iterator<Item = Route> {
        self.rows
            .keys()
            .filter(move |key| key.collective == collective)
            .filter_map(|key| key.algorithm)
    }

    /// What went to `rank`.
    pub fn sent_to(&self, rank: usize) -> Counts {
        self.sent[rank]
    }

    /// What came from `rank`.
    pub fn received_from(&self, rank: usize) -> Counts {
        self.received[rank]
    }
}

impl std::ops::Add for Row {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            calls: self.calls + other.calls,
            elements: self.elements + other.elements,
            bytes_sent: self.bytes_sent + other.bytes_sent,
            bytes_received: self.bytes_received + other.bytes_received,
            predicted_sent: self.predicted_sent + other.predicted_sent,
            predicted_received: self.predicted_received + other.predicted_received,
            messages_sent: self.messages_sent + other.messages_sent,
            messages_received: self.messages_received + other.messages_received,
            time: self.time + other.time,
        }
    }
}

/// Brings `known` to `now` and gives what was added, over all ranks.
fn advance(known: &mut [Counts], now: &[Counts]) -> Counts {
    known
        .iter_mut()
        .zip(now)
        .fold(Counts::default(), |sum, (known, now)| {
            let added = Counts {
                bytes: sum.bytes + now.bytes - known.bytes,
                messages: sum.messages + now.messages - known.messages,
            };
            *known = *now;
            added
        })
}
