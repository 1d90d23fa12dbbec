//! Where ranks meet before and after each timed call.
use std::{
    hint,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

/// A barrier that opens for all at nearly the same time: whoever waits spins, and at
/// last yields. A barrier that sleeps would add a wake-up to what is measured after it.
#[derive(Debug)]
pub(super) struct Gate {
    members: usize,
    waiting: AtomicUsize,
    opened: AtomicUsize,
    broken: AtomicBool,
}

/// How long a rank spins for the others before a call, where each has a core: long, since
/// it costs nobody's time, and a rank that yields may be away when the gate opens.
const SPIN: Duration = Duration::from_micros(100);

impl Gate {
    pub(super) fn new(members: usize) -> Self {
        Self {
            members,
            waiting: AtomicUsize::new(0),
            opened: AtomicUsize::new(0),
            broken: AtomicBool::new(false),
        }
    }

    /// Waits for all before a timed call; false if one of them left for good.
    pub(super) fn enter(&self) -> bool {
        let crowded = self.members > cores();
        self.pass(if crowded { Duration::ZERO } else { SPIN })
    }

    /// Waits for all after it, out of the way: a rank that is done must not keep its core
    /// from one that is not.
    pub(super) fn leave(&self) -> bool {
        self.pass(Duration::ZERO)
    }

    fn pass(&self, spin: Duration) -> bool {
        let before = self.opened.load(Ordering::Acquire);
        if self.waiting.fetch_add(1, Ordering::AcqRel) + 1 == self.members {
            self.waiting.store(0, Ordering::Relaxed);
            self.opened.store(before + 1, Ordering::Release);
            return true;
        }
        let start = Instant::now();
        while self.opened.load(Ordering::Acquire) == before {
            if self.broken.load(Ordering::Acquire) {
                // Whoever left may have opened the gate before.
                return self.opened.load(Ordering::Acquire) != before;
            }
            match start.elapsed() < spin {
                true => hint::spin_loop(),
                false => thread::yield_now(),
            }
        }
        true
    }

    /// Held by a rank as long as it takes part: its end opens the gate for good.
    pub(super) fn member(&self) -> Member<'_> {
        Member(self)
    }
}

pub(super) struct Member<'a>(&'a Gate);

impl Drop for Member<'_> {
    fn drop(&mut self) {
        self.0.broken.store(true, Ordering::Release);
    }
}

/// How many threads can run at once.
pub(super) fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}
