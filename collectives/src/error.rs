//! The one error type of the crate. Whatever stops a collective names ranks.
use std::{fmt, sync::Arc, time::Duration};

use crate::{Fingerprint, Place, board::Fate};

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call failed. After the first error a communicator is poisoned: every
/// later call returns the same one.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A peer is gone, and this rank still needed it.
    #[error("{at}: rank {peer} {fate}")]
    PeerFailed {
        /// Where this rank was.
        at: At,
        /// The rank that is gone.
        peer: usize,
        /// How it ended.
        fate: Fate,
    },
    /// The deadline passed.
    #[error("{at}: nothing came within {after:?}; {}", list(late))]
    Timeout {
        /// Where this rank was.
        at: At,
        /// The time that was allowed.
        after: Duration,
        /// The ranks that held it up.
        late: Vec<Late>,
    },
    /// Two ranks are in different calls.
    #[error("{at}: ranks differ in {field}: rank {peer} is in {theirs}, rank {} in {mine}", at.place.rank)]
    Mismatch {
        /// Where this rank was.
        at: At,
        /// The rank that disagrees.
        peer: usize,
        /// The first field that differs.
        field: &'static str,
        /// What this rank had called.
        mine: Box<Fingerprint>,
        /// What the peer had called.
        theirs: Box<Fingerprint>,
    },
    /// Another rank found the cause first.
    #[error("rank {origin} stopped the world: {cause}")]
    Aborted {
        /// The rank that found it.
        origin: usize,
        /// What it found.
        cause: Box<Error>,
    },
    /// A rank gave up of its own will.
    #[error("{} gave up: {reason}", Seat(place, group))]
    GaveUp {
        /// The rank.
        place: Place,
        /// Where it was one of a group: the members, as in [`At`].
        group: Option<Arc<[usize]>>,
        /// Why, in its own words.
        reason: String,
    },
    /// This rank asked for what cannot be.
    #[error("{at}: {what}")]
    Argument {
        /// Where this rank was.
        at: At,
        /// What was wrong, and what would be right.
        what: String,
    },
    /// A transport delivered what no plan asks for.
    #[error("{at}: rank {peer} sent {got} bytes where {expected} were due")]
    Protocol {
        /// Where this rank was.
        at: At,
        /// The rank that sent it.
        peer: usize,
        /// Bytes due.
        expected: usize,
        /// Bytes that came.
        got: usize,
    },
    /// The bytes of an object are not what they should be.
    #[error("{at}: the object of rank {peer} cannot be read: {what}")]
    Object {
        /// Where this rank was.
        at: At,
        /// The rank whose object it is.
        peer: usize,
        /// What was wrong.
        what: String,
    },
    /// A setting that cannot be.
    #[error("{key} = {value}: {what}")]
    Config {
        /// The setting.
        key: String,
        /// Its value.
        value: String,
        /// What is allowed.
        what: String,
    },
    /// The operating system gave no thread.
    #[error("no thread for rank {rank}: {what}")]
    Thread {
        /// The rank that was to have it.
        rank: usize,
        /// What the system said.
        what: String,
    },
}

/// Where a rank was when a call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct At {
    /// The rank and its world: in a group, those of the group.
    pub place: Place,
    /// The group's members, by their rank in the world that it was made from.
    pub group: Option<Arc<[usize]>>,
    /// The call it was in.
    pub fingerprint: Box<Fingerprint>,
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} in {}",
            Seat(&self.place, &self.group),
            self.fingerprint
        )
    }
}

/// A place, with its group where there is one.
struct Seat<'a>(&'a Place, &'a Option<Arc<[usize]>>);

impl fmt::Display for Seat<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.1 {
            Some(members) => write!(f, "{} of the group {members:?}", self.0),
            None => write!(f, "{}", self.0),
        }
    }
}

/// A rank that others waited for, and how far it had come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Late {
    /// The rank.
    pub rank: usize,
    /// How many collectives it had begun.
    pub entered: u64,
}

impl fmt::Display for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "rank {} has begun {} collectives",
            self.rank, self.entered
        )
    }
}

fn list(late: &[Late]) -> String {
    late.iter()
        .map(Late::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}

impl Error {
    /// The ranks at fault, as far as is known; for a disagreement, both sides. In a
    /// group they are numbered as the group numbers them.
    pub fn ranks(&self) -> Vec<usize> {
        match self {
            Self::PeerFailed { peer, .. }
            | Self::Protocol { peer, .. }
            | Self::Object { peer, .. } => {
                vec![*peer]
            }
            Self::Timeout { late, .. } => late.iter().map(|late| late.rank).collect(),
            Self::Mismatch { at, peer, .. } => {
                let mut both = vec![at.place.rank, *peer];
                both.sort_unstable();
                both
            }
            Self::Aborted { cause, .. } => cause.ranks(),
            Self::GaveUp { place, .. } => vec![place.rank],
            Self::Argument { at, .. } => vec![at.place.rank],
            Self::Thread { rank, .. } => vec![*rank],
            Self::Config { .. } => vec![],
        }
    }

    /// Whether this only reports another rank's trouble. Of several ranks'
    /// errors, one that is not secondary is closer to the cause.
    pub fn is_secondary(&self) -> bool {
        matches!(
            self,
            Self::PeerFailed { .. } | Self::Aborted { .. } | Self::Timeout { .. }
        )
    }
}
