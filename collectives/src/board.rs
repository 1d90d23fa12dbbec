//! What the ranks of a world know of each other beside the data: who has come
//! how far, who is gone, and what went wrong first.
use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{Error, Fingerprint};

/// One world's notice board. Ranks of one process share it.
///
/// It is written before links are closed and read after they are found closed,
/// so whoever wakes because a peer's link closed finds the reason here.
#[derive(Debug)]
pub struct Board {
    seats: Vec<Seat>,
    ended: AtomicU64,
    first: OnceLock<(usize, Error)>,
}

/// Collectives of which the board remembers what each rank called, to explain a
/// wait that ends badly. A rank is seldom further ahead of another than this.
const REMEMBERED: usize = 64;

/// Aligned so that two ranks do not write to one cache line.
#[repr(align(128))]
#[derive(Debug)]
struct Seat {
    /// The number of the last collective begun; written after `digest`.
    entered: AtomicU64,
    /// Its digest.
    digest: AtomicU64,
    recent: Mutex<VecDeque<Fingerprint>>,
    /// With its place in the order of all ends.
    fate: OnceLock<(u64, Fate)>,
}

impl Seat {
    fn new() -> Self {
        Self {
            entered: AtomicU64::new(0),
            digest: AtomicU64::new(0),
            recent: Mutex::new(VecDeque::with_capacity(REMEMBERED)),
            fate: OnceLock::new(),
        }
    }

    fn recent(&self) -> MutexGuard<'_, VecDeque<Fingerprint>> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
            seats: (0..world).map(|_| Seat::new()).collect(),
            ended: AtomicU64::new(0),
            first: OnceLock::new(),
        }
    }

    /// `rank` begins a collective. Gives a rank that has begun it too, as another call,
    /// and what it called: of two that differ, the later one finds out.
    ///
    /// `digest` is the call's. Where all agree this reads a word of each rank and takes
    /// no lock but this rank's own.
    pub(crate) fn enter(
        &self,
        rank: usize,
        call: Fingerprint,
        digest: u64,
    ) -> Option<(usize, Fingerprint)> {
        let seat = &self.seats[rank];
        let mut recent = seat.recent();
        if recent.len() == REMEMBERED {
            recent.pop_front();
        }
        recent.push_back(call);
        drop(recent);
        seat.digest.store(digest, Ordering::Relaxed);
        // Sequentially consistent, so that of two ranks one sees the other.
        seat.entered.store(call.seq, Ordering::SeqCst);
        let in_doubt = |peer: &usize| {
            let Seat {
                entered,
                digest: theirs,
                ..
            } = &self.seats[*peer];
            // A peer that goes on meanwhile shows another digest, and is looked up.
            *peer != rank
                && entered.load(Ordering::SeqCst) >= call.seq
                && theirs.load(Ordering::Relaxed) != digest
        };
        (0..self.seats.len())
            .filter(in_doubt)
            .filter_map(|peer| Some((peer, self.call(peer, call.seq)?)))
            .find(|(_, theirs)| *theirs != call)
    }

    /// What `rank` called as its collective number `seq`, as far as is remembered.
    pub(crate) fn call(&self, rank: usize, seq: u64) -> Option<Fingerprint> {
        let recent = self.seats[rank].recent();
        // Numbers follow each other.
        let index = seq.checked_sub(recent.front()?.seq)?;
        recent.get(usize::try_from(index).ok()?).copied()
    }

    /// The first collective in which another rank differs from `rank`: that other
    /// rank, what `rank` called, and what the other did.
    pub(crate) fn disagreement(&self, rank: usize) -> Option<(usize, Fingerprint, Fingerprint)> {
        let mine = self.seats[rank].recent().clone();
        mine.into_iter().find_map(|mine| {
            let differs = |peer| Some((peer, mine, self.call(peer, mine.seq)?));
            (0..self.seats.len())
                .filter_map(differs)
                .find(|(_, mine, theirs)| mine != theirs)
        })
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
        let turn = self.ended.fetch_add(1, Ordering::Relaxed);
        // A second end, say of a rank that panics and then drops, adds nothing.
        let _ = self.seats[rank].fate.set((turn, fate));
    }

    /// How `rank` ended, if it has.
    pub(crate) fn fate(&self, rank: usize) -> Option<&Fate> {
        self.seats[rank].fate.get().map(|(_, fate)| fate)
    }

    /// Whose turn it was when `rank` ended: who ends because of another ends later.
    pub(crate) fn end_of(&self, rank: usize) -> Option<u64> {
        self.seats[rank].fate.get().map(|(turn, _)| *turn)
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
