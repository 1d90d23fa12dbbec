//! Transports: bytes from one rank to another.
mod counted;
mod local;

pub use counted::{Counted, Counts};
pub use local::Local;

use std::{sync::Arc, time::Instant};

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

    /// Closes every link of this rank, so that whoever waits on it wakes.
    fn close(&mut self);
}

/// What every message of a call carries, and how long the call may take.
#[derive(Clone, Copy, Debug)]
pub struct Ticket {
    /// What the call is.
    pub fingerprint: Fingerprint,
    /// When it must have ended.
    pub deadline: Instant,
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
