//! Ranks as threads of one process, joined by crossbeam channels.
//!
//! A message is a buffer that travels to the receiver and back again: after the
//! first few messages of a size nothing is allocated.
use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use crossbeam_channel::{
    Receiver, RecvTimeoutError, SendTimeoutError, Sender, TrySendError, bounded, select,
};

use super::{Incoming, Outgoing, Ticket, Transport, Trouble};
use crate::{Board, Fingerprint, Place};

/// Messages under way between two ranks before the sender waits. Enough that one
/// end copies while the other folds; few enough to stay in the cache.
const UNDER_WAY: usize = 4;

/// One rank's end of an in-process mesh.
#[derive(Debug)]
pub struct Local {
    place: Place,
    board: Arc<Board>,
    /// By rank; none to itself, and none at all once closed.
    peers: Vec<Option<Peer>>,
    nursery: Arc<Nursery>,
}

/// Where worlds within this one are made.
#[derive(Debug, Default)]
struct Nursery(Mutex<Unborn>);

#[derive(Debug, Default)]
struct Unborn {
    /// Each member's end until it is taken, by number and first member.
    worlds: HashMap<(u64, usize), HashMap<usize, Local>>,
    /// Ranks that will take no more.
    gone: HashSet<usize>,
}

impl Nursery {
    fn unborn(&self) -> MutexGuard<'_, Unborn> {
        // Whoever panicked with the lock held left a whole entry behind.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `rank` takes no more: its ends close, so that who waits for it there wakes.
    fn leave(&self, rank: usize) {
        let mut unborn = self.unborn();
        unborn.gone.insert(rank);
        unborn.worlds.retain(|_, ends| {
            ends.remove(&rank);
            !ends.is_empty()
        });
    }
}

#[derive(Debug)]
struct Peer {
    out: Sender<Message>,
    inbox: Receiver<Message>,
    /// Buffers sent out that come back empty.
    returned: Receiver<Vec<u64>>,
    /// Buffers that came in and go back.
    give_back: Sender<Vec<u64>>,
}

/// Words, so that any element may be read in place.
#[derive(Debug)]
struct Message {
    fingerprint: Fingerprint,
    words: Vec<u64>,
    len: usize,
}

impl Local {
    /// Builds a mesh of `world` ranks; element `r` belongs to rank `r`.
    ///
    /// ```
    /// use collectives::transport::{Local, Transport};
    /// let mesh = Local::mesh(3);
    /// assert_eq!(mesh[2].place().rank, 2);
    /// ```
    pub fn mesh(world: usize) -> Vec<Self> {
        let board = Arc::new(Board::new(world));
        let nursery = Arc::new(Nursery::default());
        let mut ends: Vec<Vec<Option<Peer>>> = (0..world)
            .map(|_| (0..world).map(|_| None).collect())
            .collect();
        let pairs = (0..world).flat_map(|low| (low + 1..world).map(move |high| (low, high)));
        for (low, high) in pairs {
            let (up, down) = (Lane::new(), Lane::new());
            ends[low][high] = Some(Peer {
                out: up.messages.0,
                inbox: down.messages.1,
                returned: up.empties.1,
                give_back: down.empties.0,
            });
            ends[high][low] = Some(Peer {
                out: down.messages.0,
                inbox: up.messages.1,
                returned: down.empties.1,
                give_back: up.empties.0,
            });
        }
        ends.into_iter()
            .enumerate()
            .map(|(rank, peers)| Self {
                place: Place::new(rank, world),
                board: board.clone(),
                peers,
                nursery: nursery.clone(),
            })
            .collect()
    }

    fn peer(&self, rank: usize) -> Result<&Peer, Trouble> {
        self.peers[rank]
            .as_ref()
            .ok_or(Trouble::Gone { peer: rank })
    }
}

/// One direction between two ranks: full buffers go, empty ones come back.
struct Lane {
    messages: (Sender<Message>, Receiver<Message>),
    empties: (Sender<Vec<u64>>, Receiver<Vec<u64>>),
}

impl Lane {
    fn new() -> Self {
        Self {
            messages: bounded(UNDER_WAY),
            // One more is being filled, and one being read.
            empties: bounded(UNDER_WAY + 2),
        }
    }
}

impl Peer {
    fn pack(&self, fingerprint: Fingerprint, bytes: &[u8]) -> Message {
        let mut words = self.returned.try_recv().unwrap_or_default();
        let needed = bytes.len().div_ceil(size_of::<u64>());
        if words.len() < needed {
            words.resize(needed, 0);
        }
        bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
        Message {
            fingerprint,
            words,
            len: bytes.len(),
        }
    }

    fn unpack(
        &self,
        message: Message,
        expected: &Fingerprint,
        recv: Incoming<'_>,
    ) -> Result<(), Trouble> {
        let peer = recv.from;
        if message.fingerprint != *expected {
            return Err(Trouble::Mismatch {
                peer,
                theirs: Box::new(message.fingerprint),
            });
        }
        if message.len != recv.len {
            return Err(Trouble::Length {
                peer,
                expected: recv.len,
                got: message.len,
            });
        }
        (recv.land)(&bytemuck::cast_slice(&message.words)[..message.len]);
        // A lane that holds enough empties, or whose sender is gone, needs no more.
        drop(self.give_back.try_send(message.words));
        Ok(())
    }

    fn put(&self, to: usize, message: Message, deadline: Instant) -> Result<(), Trouble> {
        self.out
            .send_deadline(message, deadline)
            .map_err(|error| match error {
                SendTimeoutError::Timeout(_) => Trouble::Silent { peer: to },
                SendTimeoutError::Disconnected(_) => Trouble::Gone { peer: to },
            })
    }

    fn take(&self, from: usize, deadline: Instant) -> Result<Message, Trouble> {
        self.inbox
            .recv_deadline(deadline)
            .map_err(|error| match error {
                RecvTimeoutError::Timeout => Trouble::Silent { peer: from },
                RecvTimeoutError::Disconnected => Trouble::Gone { peer: from },
            })
    }
}

impl Transport for Local {
    fn place(&self) -> Place {
        self.place
    }

    fn board(&self) -> &Arc<Board> {
        &self.board
    }

    fn exchange(
        &mut self,
        ticket: &Ticket,
        send: Option<Outgoing<'_>>,
        recv: Option<Incoming<'_>>,
    ) -> Result<(), Trouble> {
        let mut waiting = None;
        if let Some(Outgoing { to, bytes }) = send {
            let peer = self.peer(to)?;
            match peer.out.try_send(peer.pack(ticket.fingerprint, bytes)) {
                Ok(()) => {}
                Err(TrySendError::Full(message)) => waiting = Some((to, message)),
                Err(TrySendError::Disconnected(_)) => return Err(Trouble::Gone { peer: to }),
            }
        }
        let Some(recv) = recv else {
            return match waiting {
                Some((to, message)) => self.peer(to)?.put(to, message, ticket.deadline),
                None => Ok(()),
            };
        };
        let source = self.peer(recv.from)?;
        let message = match waiting {
            None => source.take(recv.from, ticket.deadline)?,
            Some((to, message)) => both(self.peer(to)?, source, to, message, &recv, ticket)?,
        };
        source.unpack(message, &ticket.expected, recv)
    }

    fn split(&mut self, id: u64, members: &[usize]) -> Result<Box<dyn Transport>, Trouble> {
        let gone = Trouble::Gone {
            peer: self.place.rank,
        };
        let Some(&first) = members.first() else {
            return Err(gone);
        };
        let mut unborn = self.nursery.unborn();
        let Unborn { worlds, gone: left } = &mut *unborn;
        let ends = worlds.entry((id, first)).or_insert_with(|| {
            let ends = members.iter().copied().zip(Self::mesh(members.len()));
            ends.filter(|(rank, _)| !left.contains(rank)).collect()
        });
        let end = ends.remove(&self.place.rank);
        if ends.is_empty() {
            worlds.remove(&(id, first));
        }
        Ok(Box::new(end.ok_or(gone)?))
    }

    fn close(&mut self) {
        self.nursery.leave(self.place.rank);
        self.peers.iter_mut().for_each(|peer| *peer = None);
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.nursery.leave(self.place.rank);
    }
}

/// Waits for room and for a message at once, whichever comes first.
fn both(
    target: &Peer,
    source: &Peer,
    to: usize,
    message: Message,
    recv: &Incoming<'_>,
    ticket: &Ticket,
) -> Result<Message, Trouble> {
    let left = ticket.deadline.saturating_duration_since(Instant::now());
    // The macro, since a `Select` allocates.
    select! {
        send(target.out, message) -> sent => {
            sent.map_err(|_| Trouble::Gone { peer: to })?;
            source.take(recv.from, ticket.deadline)
        }
        recv(source.inbox) -> arrived => {
            let arrived = arrived.map_err(|_| Trouble::Gone { peer: recv.from })?;
            target.put(to, message, ticket.deadline)?;
            Ok(arrived)
        }
        default(left) => Err(Trouble::Silent { peer: recv.from }),
    }
}
