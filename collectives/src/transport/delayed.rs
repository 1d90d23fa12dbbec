//! A slower link than the machine has: real waiting, for wall-clock experiments.
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    thread,
    time::{Duration, Instant},
};

use super::{Incoming, Link, Outgoing, Ticket, Transport, Trouble};
use crate::{Board, Place, communicator::after};

/// Any transport, over links of a given latency and bandwidth.
///
/// A message leaves when the ones before it have left this rank, takes its bytes
/// over the bandwidth to leave, and arrives the latency later. The sender does not
/// wait for it; the receiver does.
#[derive(Debug)]
pub struct Delayed<T> {
    inner: T,
    link: Link,
    leaves: Instant,
    under_way: Arc<UnderWay>,
}

/// When the messages between each two ranks arrive, oldest first.
#[derive(Debug)]
struct UnderWay {
    world: usize,
    arrivals: Vec<Mutex<VecDeque<Instant>>>,
    /// Those of groups, by number and first member, as long as a member has one.
    groups: Mutex<HashMap<(u64, usize), Weak<UnderWay>>>,
}

impl UnderWay {
    fn new(world: usize) -> Self {
        Self {
            world,
            arrivals: (0..world * world).map(|_| Mutex::default()).collect(),
            groups: Mutex::default(),
        }
    }

    fn group(&self, key: (u64, usize), world: usize) -> Arc<Self> {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|_, group| group.strong_count() > 0);
        let known = groups.get(&key).and_then(Weak::upgrade);
        known.unwrap_or_else(|| {
            let group = Arc::new(Self::new(world));
            groups.insert(key, Arc::downgrade(&group));
            group
        })
    }

    fn lane(&self, from: usize, to: usize) -> MutexGuard<'_, VecDeque<Instant>> {
        let lane = &self.arrivals[from * self.world + to];
        lane.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Transport> Delayed<T> {
    /// Slows down a whole mesh, whose ranks share this process.
    ///
    /// ```
    /// use std::time::Duration;
    /// use collectives::transport::{Delayed, Link, Local};
    /// let link = Link { latency: Duration::from_micros(50), bytes_per_second: 125e6 };
    /// assert_eq!(Delayed::mesh(Local::mesh(2), link).len(), 2);
    /// ```
    pub fn mesh(mesh: Vec<T>, link: Link) -> Vec<Self> {
        let world = mesh.len();
        let under_way = Arc::new(UnderWay::new(world));
        let slow = |inner| Self {
            inner,
            link,
            leaves: Instant::now(),
            under_way: under_way.clone(),
        };
        mesh.into_iter().map(slow).collect()
    }
}

impl<T: Transport> Transport for Delayed<T> {
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
        let rank = self.place().rank;
        if let Some(out) = &send {
            let free = self.leaves.max(Instant::now());
            self.leaves = after(free, self.link.transfer(out.bytes.len()));
            let arrives = after(self.leaves, self.link.latency);
            self.under_way.lane(rank, out.to).push_back(arrives);
        }
        let Some(Incoming { from, len, land }) = recv else {
            return self.inner.exchange(ticket, send, None);
        };
        let under_way = self.under_way.clone();
        let mut in_time = true;
        let mut land_late = |bytes: &[u8]| {
            if let Some(arrives) = under_way.lane(from, rank).pop_front() {
                in_time = arrives <= ticket.deadline;
                wait_until(arrives.min(ticket.deadline));
            }
            land(bytes);
        };
        let recv = Incoming {
            from,
            len,
            land: &mut land_late,
        };
        self.inner.exchange(ticket, send, Some(recv))?;
        match in_time {
            true => Ok(()),
            false => Err(Trouble::Silent { peer: from }),
        }
    }

    /// The group's links are as slow, and its own: it does not share a rank's bandwidth
    /// with the world that it was made from.
    fn split(&mut self, id: u64, members: &[usize]) -> Result<Box<dyn Transport>, Trouble> {
        let first = members.first().copied().unwrap_or_default();
        let under_way = self.under_way.group((id, first), members.len());
        Ok(Box::new(Delayed {
            inner: self.inner.split(id, members)?,
            link: self.link,
            leaves: Instant::now(),
            under_way,
        }))
    }

    fn close(&mut self) {
        self.inner.close();
    }
}

/// Sleeps while there is time to sleep, and yields the rest.
fn wait_until(time: Instant) {
    /// A sleep takes about 60 µs longer than asked for here; twice that is safe.
    const OVERSLEEP: Duration = Duration::from_micros(120);
    loop {
        let left = time.saturating_duration_since(Instant::now());
        match left.checked_sub(OVERSLEEP) {
            _ if left.is_zero() => return,
            Some(sleep) if !sleep.is_zero() => thread::sleep(sleep),
            _ => thread::yield_now(),
        }
    }
}
