//! What the ranks of a world know of each other beside the data: who has come
//! how far, who is gone, and what went wrong first.
use std::{
    fmt,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::Error;

/// One world's notice board. Ranks of one process share it.
///
/// It is written before links are closed and read after they are found closed,
/// so whoever wakes because a peer's link closed finds the reason here.
#[derive(Debug)]
pub struct Board {
    seats: Vec<Seat>,
    first: OnceLock<(usize, Error)>,
}

/// Aligned so that two ranks do not write to one cache line.
#[repr(align(128))]
#[derive(Debug, Default)]
struct Seat {
    entered: AtomicU64,
    fate: OnceLock<Fate>,
}

/// How a rank's membership ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fate {
    /// It dropped its communicator.
    Left {
        /// How many collectives it had begun.
        after: u64,
    },
    /// It panicked.
    Panicked,
    /// Its link closed without a word.
    Disconnected,
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Left { after } => write!(f, "has left after {after} collectives"),
            Self::Panicked => f.write_str("panicked"),
            Self::Disconnected => f.write_str("hung up"),
        }
    }
}

impl Board {
    /// An empty board for `world` ranks.
    pub fn new(world: usize) -> Self {
        Self {
            seats: (0..world).map(|_| Seat::default()).collect(),
            first: OnceLock::new(),
        }
    }

    /// `rank` begins its collective number `seq`.
    pub(crate) fn enter(&self, rank: usize, seq: u64) {
        self.seats[rank].entered.store(seq, Ordering::Relaxed);
    }

    /// How many collectives `rank` has begun.
    pub(crate) fn entered(&self, rank: usize) -> u64 {
        self.seats[rank].entered.load(Ordering::Relaxed)
    }

    /// The ranks that have not begun collective number `seq`.
    pub(crate) fn behind(&self, seq: u64) -> impl Iterator<Item = usize> + '_ {
        (0..self.seats.len()).filter(move |&rank| self.entered(rank) < seq)
    }

    /// Says how `rank` ended; the first word stands.
    pub(crate) fn end(&self, rank: usize, fate: Fate) {
        // A second end, say of a rank that panics and then drops, adds nothing.
        let _ = self.seats[rank].fate.set(fate);
    }

    /// How `rank` ended, if it has.
    pub(crate) fn fate(&self, rank: usize) -> Option<&Fate> {
        self.seats[rank].fate.get()
    }

    /// Says what stopped the world; the first cause stands.
    pub(crate) fn stop(&self, origin: usize, cause: &Error) {
        let _ = self.first.set((origin, cause.clone()));
    }

    /// What stopped the world first, and the rank that found it.
    pub(crate) fn first(&self) -> Option<&(usize, Error)> {
        self.first.get()
    }
}
