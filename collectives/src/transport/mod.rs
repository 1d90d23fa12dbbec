//! Transports: bytes from one rank to another.
mod counted;
mod delayed;
mod faulty;
mod local;

pub use counted::{Counted, Counts};
pub use delayed::Delayed;
pub use faulty::{Faults, Faulty};
pub use local::Local;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{Board, Fingerprint, Place};

/// Moves bytes between ranks.
///
/// A transport knows nothing of elements, reductions or algorithms. To add
/// one, write one file that implements this trait.
pub trait Transport: Send {
    /// Where this rank stands.
    fn place(&self) -> Place;

    /// What this world's ranks know of each other.
    fn board(&self) -> &Arc<Board>;

    /// Sends and receives at the same time, and returns when both are done or
    /// the deadline has passed.
    ///
    /// Neither direction may wait for the other: two ranks that exchange with
    /// each other always make progress. Messages between two ranks keep their
    /// order. A message with another fingerprint than this rank's, or of another
    /// length, is not landed.
    fn exchange(
        &mut self,
        ticket: &Ticket,
        send: Option<Outgoing<'_>>,
        recv: Option<Incoming<'_>>,
    ) -> Result<(), Trouble>;

    /// This rank's end of a world of its own for `members`, numbered in that order.
    ///
    /// Every member asks for it, with the same members and an `id` that this world
    /// has not used before.
    fn split(&mut self, id: u64, members: &[usize]) -> Result<Box<dyn Transport>, Trouble>;

    /// Closes every link of this rank, so that whoever waits on it wakes.
    fn close(&mut self);
}

/// What every message of a call carries, and how long the call may take.
#[derive(Clone, Copy, Debug)]
pub struct Ticket {
    /// What goes out with this rank's messages.
    pub fingerprint: Fingerprint,
    /// What comes in with those of the others: the same, but for single messages,
    /// which two ranks number by themselves.
    pub expected: Fingerprint,
    /// When it must have ended.
    pub deadline: Instant,
}

/// What a link costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// The time of a message without bytes.
    pub latency: Duration,
    /// The bytes that can leave a rank in a second.
    pub bytes_per_second: f64,
}

impl Link {
    /// The time in which `bytes` leave; [`Duration::MAX`] if they never do.
    pub fn transfer(&self, bytes: usize) -> Duration {
        match bytes {
            0 => Duration::ZERO,
            _ => Duration::try_from_secs_f64(bytes as f64 / self.bytes_per_second)
                .unwrap_or(Duration::MAX),
        }
    }
}

/// Bytes on their way out.
#[derive(Debug)]
pub struct Outgoing<'a> {
    /// The rank they go to.
    pub to: usize,
    /// The bytes.
    pub bytes: &'a [u8],
}

/// What becomes of bytes on their way in.
pub struct Incoming<'a> {
    /// The rank they come from.
    pub from: usize,
    /// How many are due.
    pub len: usize,
    /// Takes them, once, at an address that is a multiple of eight.
    pub land: &'a mut dyn FnMut(&[u8]),
}

/// Why an exchange did not come about.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Trouble {
    /// The deadline passed while waiting for `peer`.
    Silent {
        /// The rank that was waited for.
        peer: usize,
    },
    /// The link to `peer` is closed, or this rank's own.
    Gone {
        /// The rank at the other end.
        peer: usize,
    },
    /// `peer` is in another call.
    Mismatch {
        /// The rank that disagrees.
        peer: usize,
        /// What its message carried.
        theirs: Box<Fingerprint>,
    },
    /// A message of the right call has the wrong length.
    Length {
        /// The rank that sent it.
        peer: usize,
        /// Bytes due.
        expected: usize,
        /// Bytes that came.
        got: usize,
    },
}
