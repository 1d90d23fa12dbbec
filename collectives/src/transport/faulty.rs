//! Faults on purpose: what a network does on a bad day, from a seed.
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::{Incoming, Outgoing, Ticket, Transport, Trouble};
use crate::{Board, Place};

/// Any transport, with faults put in. The same seed gives the same faults.
///
/// Groups made from it have none.
#[derive(Debug)]
pub struct Faulty<T> {
    inner: T,
    faults: Faults,
    random: SplitMix,
    exchanges: u64,
}

/// How often which fault strikes an exchange. Probabilities from 0 to 1.
///
/// ```
/// use collectives::transport::{Faults, Faulty, Local};
/// let mesh = Local::mesh(2).into_iter().map(|link| {
///     Faulty::new(link, Faults { cut: 1.0, after: 10, ..Faults::none(7) })
/// });
/// assert_eq!(mesh.count(), 2);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Faults {
    /// Where the random numbers begin; each rank draws its own.
    pub seed: u64,
    /// Exchanges that pass before the first fault.
    pub after: u64,
    /// How often an exchange begins late.
    pub delay: f64,
    /// How late at most; never past the deadline of the call.
    pub longest: Duration,
    /// How often what is sent is lost.
    pub drop: f64,
    /// How often a bit of what is sent is flipped.
    pub corrupt: f64,
    /// How often this rank's links are cut, all of them.
    pub cut: f64,
}

impl Faults {
    /// No faults.
    pub fn none(seed: u64) -> Self {
        Self {
            seed,
            after: 0,
            delay: 0.0,
            longest: Duration::ZERO,
            drop: 0.0,
            corrupt: 0.0,
            cut: 0.0,
        }
    }
}

impl<T: Transport> Faulty<T> {
    /// Puts `faults` into `inner`.
    pub fn new(inner: T, faults: Faults) -> Self {
        let random = SplitMix(faults.seed ^ (inner.place().rank as u64) << 32);
        Self {
            inner,
            faults,
            random,
            exchanges: 0,
        }
    }
}

impl<T: Transport> Transport for Faulty<T> {
    fn place(&self) -> Place {
        self.inner.place()
    }

    fn board(&self) -> &Arc<Board> {
        self.inner.board()
    }

    fn exchange(
        &mut self,
        ticket: &Ticket,
        send: Option<Outgoing<'_>>,
        recv: Option<Incoming<'_>>,
    ) -> Result<(), Trouble> {
        let faults = self.faults;
        // Every number is drawn every time, so that one fault does not move the others.
        let [delay, share, drop, corrupt, place, cut] = [(); 6].map(|()| self.random.unit());
        self.exchanges += 1;
        if self.exchanges <= faults.after {
            return self.inner.exchange(ticket, send, recv);
        }
        if delay < faults.delay {
            // No longer than the call may take: a fault must not outlast the deadline.
            let left = ticket.deadline.saturating_duration_since(Instant::now());
            thread::sleep(faults.longest.mul_f64(share).min(left));
        }
        if cut < faults.cut {
            self.inner.close();
        }
        let mut flipped = vec![];
        let send = match send.filter(|_| drop >= faults.drop) {
            Some(Outgoing { to, bytes }) if corrupt < faults.corrupt && !bytes.is_empty() => {
                flipped.extend_from_slice(bytes);
                let bit = (place * (8 * flipped.len()) as f64) as usize;
                flipped[bit / 8] ^= 1 << (bit % 8);
                let bytes = &flipped;
                Some(Outgoing { to, bytes })
            }
            send => send,
        };
        self.inner.exchange(ticket, send, recv)
    }

    fn split(&mut self, id: u64, members: &[usize]) -> Result<Box<dyn Transport>, Trouble> {
        self.inner.split(id, members)
    }

    fn close(&mut self) {
        self.inner.close();
    }
}

/// SplitMix64. Source: Steele, Lea and Flood, "Fast splittable pseudorandom number
/// generators", 2014.
#[derive(Debug)]
struct SplitMix(u64);

impl SplitMix {
    /// The next number, from 0 up to 1.
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        (z >> 11) as f64 / (1u64 << 53) as f64
    }
}
