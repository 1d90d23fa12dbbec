//! What is recorded: events with their fields, on the lanes of threads.

use std::fmt;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};

/// A span that is over, or a mark without a duration.
#[derive(Debug)]
pub(crate) struct TraceEvent {
    name: String,
    /// Since the recording began, as is `end`.
    pub(crate) start: Duration,
    /// None for a mark.
    pub(crate) end: Option<Duration>,
    pub(crate) arguments: Arguments,
}

impl TraceEvent {
    pub(super) fn new(
        name: &str,
        start: Duration,
        end: Option<Duration>,
        mut arguments: Arguments,
    ) -> Self {
        // An event of `tracing` is named by its place in the source, unless it has words.
        let words = arguments.0.remove("message");
        let words = words.and_then(|words| words.as_str().map(str::to_owned));
        Self {
            name: words.unwrap_or_else(|| name.to_owned()),
            start,
            end,
            arguments,
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

/// The fields of a span or event.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(transparent)]
pub(crate) struct Arguments(Map<String, Value>);

impl Arguments {
    pub(super) fn set(&mut self, key: &str, value: Value) {
        self.0.insert(key.to_owned(), value);
    }

    pub(crate) fn number(&self, key: &str) -> Option<u64> {
        self.0.get(key)?.as_u64()
    }

    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.as_str()
    }
}

impl Visit for Arguments {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.set(field.name(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.set(field.name(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.set(field.name(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.set(field.name(), value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.set(field.name(), value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.set(field.name(), format!("{value:?}").into());
    }
}

/// Where a thread's events are drawn.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Lane {
    /// Lanes lie in this order.
    pub(crate) number: u64,
    /// The thread's name.
    pub(crate) name: String,
    /// The rank whose thread it is, if it is one's.
    pub(crate) rank: Option<u64>,
}

impl Lane {
    /// The lane of a thread of that name. Ranks come first, each followed by its communication;
    /// other threads, and further ones of the same name, take the next number that is free.
    pub(super) fn of(name: &str, is_taken: impl Fn(u64) -> bool) -> Self {
        let rest = name.strip_prefix("rank ");
        let place = rest.and_then(|rest| match rest.strip_suffix(" comm") {
            Some(rank) => Some((rank.parse::<u64>().ok()?, 1)),
            None => Some((rest.parse().ok()?, 0)),
        });
        let own = place.map(|(rank, comm)| 1 + 2 * rank + comm);
        let number = own.filter(|&number| !is_taken(number));
        let others = || (OTHERS..).find(|&number| !is_taken(number));
        Self {
            number: number.or_else(others).expect("a number is free"),
            name: name.to_owned(),
            rank: place.map(|(rank, _)| rank),
        }
    }

    /// Whether it is the lane of a rank's communication.
    pub(crate) fn is_comm(&self) -> bool {
        self.name.ends_with(" comm")
    }
}

/// The first lane of a thread that is no rank's: behind those of all ranks.
const OTHERS: u64 = 1_000_000;
