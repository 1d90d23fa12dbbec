//! What the threads of this program cost the machine's cores: a figure that other programs
//! disturb far less than the time on the clock.
use std::{fs, ops::Sub};

/// Seconds of all threads of this program, since each began.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Spent {
    /// On a core.
    pub(super) ran: f64,
    /// Ready to run, without a core.
    pub(super) queued: f64,
}

impl Spent {
    /// Up to now; none where the system does not tell (it does on Linux).
    pub(super) fn now() -> Option<Self> {
        let mut spent = Self::default();
        for thread in fs::read_dir("/proc/self/task").ok()?.flatten() {
            // A thread that has just ended has no part in what is measured.
            let Ok(text) = fs::read_to_string(thread.path().join("schedstat")) else {
                continue;
            };
            let mut nanoseconds = text.split_whitespace().map(str::parse::<f64>);
            let mut next = || nanoseconds.next()?.ok();
            spent.ran += next()? * 1e-9;
            spent.queued += next()? * 1e-9;
        }
        Some(spent)
    }
}

impl Sub for Spent {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            ran: self.ran - before.ran,
            queued: self.queued - before.queued,
        }
    }
}
