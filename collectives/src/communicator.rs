//! The public face: blocking collectives among the ranks of one world.
use std::{
    fmt,
    ops::{Deref, DerefMut, Range},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use crate::{
    Algorithm, Board, Call, Collective, CommunicatorConfig, DType, Element, Error, Fingerprint,
    Partition, Place, ReduceOp, Result, Schedule, Stats, Traffic,
    board::Fate,
    error::{At, Late},
    executor,
    schedule::{Step, Then},
    stats::Key,
    transport::{Counted, Ticket, Transport, Trouble},
};

/// One rank's membership in a world.
///
/// Every rank calls the same collectives, on the same lengths, in the same
/// order; `&mut self` keeps that order within a rank. Each call ends in `Ok` with
/// the right values, bit-equal on all ranks, or in an error that names ranks,
/// and then every later call returns that same error. After an error the contents
/// of the buffer are unspecified.
///
/// A rank that only sends in a call (the root of a broadcast) may learn of a
/// disagreement at its next call.
///
/// Two threads cannot use one communicator at once, which would leave the order
/// of their calls to chance:
///
/// ```compile_fail,E0499
/// # fn both(mut communicator: collectives::Communicator) {
/// std::thread::scope(|scope| {
///     scope.spawn(|| communicator.barrier());
///     scope.spawn(|| communicator.barrier());
/// });
/// # }
/// ```
///
/// ```
/// use collectives::{Communicator, CommunicatorConfig, ReduceOp, transport::Local};
/// # fn main() -> collectives::Result<()> {
/// let alone = Local::mesh(1).remove(0);
/// let mut communicator = Communicator::new(alone, &CommunicatorConfig::new())?;
/// let mut numbers = [1.0, 2.0];
/// communicator.all_reduce(&mut numbers, ReduceOp::Mean)?;
/// assert_eq!(numbers, [1.0, 2.0]);
/// # Ok(())
/// # }
/// ```
pub struct Communicator {
    link: Counted<Box<dyn Transport>>,
    config: CommunicatorConfig,
    timeout: Duration,
    issued: u64,
    history: u64,
    messages: Messages,
    plan: Schedule,
    stats: Stats,
    poison: Option<Error>,
}

type Outcome = std::result::Result<(), Trouble>;

/// Single messages so far, by the other rank: these two number them alike.
struct Messages {
    sent: Vec<u64>,
    received: Vec<u64>,
}

impl Communicator {
    /// Joins the world that `link` reaches.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if a setting cannot be.
    pub fn new(link: impl Transport + 'static, config: &CommunicatorConfig) -> Result<Self> {
        config.validate()?;
        let world = link.place().world;
        Ok(Self {
            link: Counted::new(Box::new(link)),
            config: config.clone(),
            timeout: config.timeout(),
            issued: 0,
            history: 0,
            messages: Messages {
                sent: vec![0; world],
                received: vec![0; world],
            },
            plan: Schedule::new(),
            stats: Stats::new(world),
            poison: None,
        })
    }

    /// Where this rank stands.
    pub fn place(&self) -> Place {
        self.link.place()
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.place().rank
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.place().world
    }

    /// The settings that it was made with.
    pub fn config(&self) -> &CommunicatorConfig {
        &self.config
    }

    /// How `len` elements are cut into one part per rank.
    pub fn partition(&self, len: usize) -> Partition {
        Partition::new(len, self.world_size())
    }

    /// This rank's part of `len` elements.
    pub fn part(&self, len: usize) -> Range<usize> {
        self.partition(len).range(self.rank())
    }

    /// What was moved so far.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// The same communicator with another deadline, for the calls made through it.
    pub fn within(&mut self, timeout: Duration) -> Within<'_> {
        let usual = std::mem::replace(&mut self.timeout, timeout);
        Within {
            communicator: self,
            usual,
        }
    }

    /// Replaces every rank's `buffer` by the reduction of them all.
    ///
    /// Bytes: 2(N-1)/N of the buffer each way per rank by ring; up to log2 N
    /// buffers by tree.
    ///
    /// # Errors
    ///
    /// As every call: see [`Error`].
    pub fn all_reduce<T: Element>(&mut self, buffer: &mut [T], op: ReduceOp) -> Result<()> {
        self.collective(Collective::AllReduce, Some(op), None, buffer)?;
        self.complete(op, buffer);
        Ok(())
    }

    /// Replaces the buffer of `root` by the reduction of all buffers. Afterwards
    /// the other ranks' buffers hold partial results.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if there is no rank `root`.
    pub fn reduce<T: Element>(
        &mut self,
        buffer: &mut [T],
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        self.collective(Collective::Reduce, Some(op), Some(root), buffer)?;
        if self.rank() == root {
            self.complete(op, buffer);
        }
        Ok(())
    }

    /// Copies the buffer of `root` to every rank.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if there is no rank `root`.
    pub fn broadcast<T: Element>(&mut self, buffer: &mut [T], root: usize) -> Result<()> {
        self.collective(Collective::Broadcast, None, Some(root), buffer)
    }

    /// Fills `whole`, on every rank, with the parts of all ranks in rank order.
    ///
    /// Rank `r` gives part `r` of the [partition](Self::partition) of
    /// `whole.len()`. (N-1)/N of the whole each way per rank by ring.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if `part` is not of that length.
    pub fn all_gather<T: Element>(&mut self, part: &[T], whole: &mut [T]) -> Result<()> {
        let own = self.part(whole.len());
        if part.len() != own.len() {
            let what = format!(
                "a part of {} elements; this rank's part of {} is {} long",
                part.len(),
                whole.len(),
                own.len()
            );
            return Err(self.refuse(Collective::AllGather, T::DTYPE, whole.len(), what));
        }
        whole[own].copy_from_slice(part);
        self.all_gather_in_place(whole)
    }

    /// Completes `buffer` from each rank's own part of it.
    ///
    /// # Errors
    ///
    /// As every call: see [`Error`].
    pub fn all_gather_in_place<T: Element>(&mut self, buffer: &mut [T]) -> Result<()> {
        self.collective(Collective::AllGather, None, None, buffer)
    }

    /// Reduces all buffers and returns this rank's part of the result; the rest
    /// of `buffer` holds partial results.
    ///
    /// (N-1)/N of the buffer each way per rank by ring.
    ///
    /// # Errors
    ///
    /// As every call: see [`Error`].
    pub fn reduce_scatter<'a, T: Element>(
        &mut self,
        buffer: &'a mut [T],
        op: ReduceOp,
    ) -> Result<&'a mut [T]> {
        self.collective(Collective::ReduceScatter, Some(op), None, buffer)?;
        let own = self.part(buffer.len());
        let part = &mut buffer[own];
        self.complete(op, part);
        Ok(part)
    }

    /// Returns when every rank has come here.
    ///
    /// # Errors
    ///
    /// As every call: see [`Error`]. A time-out lists the ranks that did not come.
    pub fn barrier(&mut self) -> Result<()> {
        self.collective::<u8>(Collective::Barrier, None, None, &mut [])
    }

    /// Sends `buffer` to the rank `to`, which receives it with [`recv`](Self::recv).
    ///
    /// May return before it has arrived, or wait until it is received: two ranks
    /// that both send much before either receives wait until the deadline.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if `to` is this rank or none.
    pub fn send<T: Element>(&mut self, to: usize, buffer: &[T]) -> Result<()> {
        let fingerprint = self.message::<T>(to, buffer.len(), |messages| &mut messages.sent[to])?;
        let traffic = Traffic {
            sent: size_of_val(buffer),
            received: 0,
        };
        self.run(fingerprint, traffic, |_, ticket, link| {
            executor::send(to, buffer, ticket, link)
        })
    }

    /// Receives what the rank `from` has [sent](Self::send).
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] if `from` is this rank or none.
    pub fn recv<T: Element>(&mut self, from: usize, buffer: &mut [T]) -> Result<()> {
        let fingerprint =
            self.message::<T>(from, buffer.len(), |messages| &mut messages.received[from])?;
        let traffic = Traffic {
            sent: 0,
            received: size_of_val(buffer),
        };
        let step = [Step::recv(from, 0..buffer.len(), Then::Replace)];
        self.run(fingerprint, traffic, |_, ticket, link| {
            executor::run(&step, buffer, ReduceOp::Sum, ticket, link)
        })
    }

    /// Gives up: every rank's next or current call fails and names this rank and
    /// `reason`. Returns the error that this rank's own calls fail with from now on.
    pub fn abort(&mut self, reason: impl Into<String>) -> Error {
        let error = Error::GaveUp {
            place: self.place(),
            reason: reason.into(),
        };
        self.stop(error)
    }

    pub(crate) fn board(&self) -> &Arc<Board> {
        self.link.board()
    }

    fn collective<T: Element>(
        &mut self,
        collective: Collective,
        op: Option<ReduceOp>,
        root: Option<usize>,
        buffer: &mut [T],
    ) -> Result<()> {
        let (place, len) = (self.place(), buffer.len());
        if let Some(root) = root.filter(|&root| root >= place.world) {
            let what = format!(
                "no rank {root} to be the root: ranks are 0 to {}",
                place.world - 1
            );
            return Err(self.refuse(collective, T::DTYPE, len, what));
        }
        if op == Some(ReduceOp::Mean) && !T::DTYPE.is_float() {
            let what = format!(
                "no mean of {}: take the sum, and divide as you see fit",
                T::DTYPE
            );
            return Err(self.refuse(collective, T::DTYPE, len, what));
        }
        let call = Call {
            collective,
            op,
            root,
            dtype: T::DTYPE,
            len,
        };
        let algorithm = match collective {
            Collective::Barrier => Algorithm::Tree,
            _ => self.config.pick(&call, place.world),
        };
        self.issued += 1;
        self.enter()?;
        let fingerprint = Fingerprint {
            history: self.history,
            ..self.fingerprint(call, self.issued, Some(algorithm))
        };
        self.history = fingerprint.digest();
        self.board().enter(place.rank, fingerprint);
        self.plan.clear();
        algorithm.plan(&call, place, &mut self.plan);
        let fold = op.unwrap_or(ReduceOp::Sum);
        self.run(
            fingerprint,
            algorithm.traffic(&call, place),
            |plan, ticket, link| executor::run(plan, buffer, fold, ticket, link),
        )
    }

    /// Opens a single message to or from `peer`; `count` is the number of those so far.
    fn message<T: Element>(
        &mut self,
        peer: usize,
        len: usize,
        count: impl FnOnce(&mut Messages) -> &mut u64,
    ) -> Result<Fingerprint> {
        let Place { rank, world } = self.place();
        if peer >= world || peer == rank {
            let what = format!(
                "no rank {peer} to speak to: ranks are 0 to {}, and this one is {rank}",
                world - 1
            );
            return Err(self.refuse(Collective::SendRecv, T::DTYPE, len, what));
        }
        let count = count(&mut self.messages);
        *count += 1;
        let seq = *count;
        let call = Call {
            collective: Collective::SendRecv,
            op: None,
            root: None,
            dtype: T::DTYPE,
            len,
        };
        self.enter()?;
        Ok(self.fingerprint(call, seq, None))
    }

    /// Carries out a call: deadline, statistics and blame, once, here.
    fn run(
        &mut self,
        fingerprint: Fingerprint,
        predicted: Traffic,
        carry_out: impl FnOnce(&[Step], &Ticket, &mut dyn Transport) -> Outcome,
    ) -> Result<()> {
        let start = Instant::now();
        let ticket = Ticket {
            fingerprint,
            deadline: after(start, self.timeout),
        };
        carry_out(&self.plan, &ticket, &mut self.link).map_err(|trouble| {
            let error = self.explain(trouble, fingerprint);
            self.stop(error)
        })?;
        let key = Key {
            collective: fingerprint.call.collective,
            algorithm: fingerprint.algorithm,
        };
        self.stats.record(
            key,
            fingerprint.call.len,
            predicted,
            start.elapsed(),
            self.link.sent(),
            self.link.received(),
        );
        Ok(())
    }

    fn fingerprint(&self, call: Call, seq: u64, algorithm: Option<Algorithm>) -> Fingerprint {
        Fingerprint {
            seq,
            history: 0,
            call,
            algorithm,
            segment: ((self.config.segment_kb << 10) / call.dtype.size()).max(1),
        }
    }

    /// Refuses to go on after an error, on any rank.
    fn enter(&mut self) -> Result<()> {
        if let Some(error) = &self.poison {
            return Err(error.clone());
        }
        if thread::panicking() {
            return Err(self.abort("a collective was called while this rank panics"));
        }
        if let Some(error) = self.told() {
            return Err(self.stop(error));
        }
        Ok(())
    }

    /// What another rank has put on the board.
    fn told(&self) -> Option<Error> {
        let (origin, cause) = self.board().first()?;
        Some(Error::Aborted {
            origin: *origin,
            cause: Box::new(cause.clone()),
        })
    }

    /// From what the link saw to who is at fault.
    fn explain(&self, trouble: Trouble, fingerprint: Fingerprint) -> Error {
        let at = At {
            place: self.place(),
            fingerprint: Box::new(fingerprint),
        };
        match trouble {
            Trouble::Mismatch { peer, theirs } => self.disagreement(&at).unwrap_or_else(|| {
                let mine = self.call_like(&theirs, fingerprint);
                mismatch(at, peer, mine, *theirs)
            }),
            Trouble::Length {
                peer,
                expected,
                got,
            } => Error::Protocol {
                at,
                peer,
                expected,
                got,
            },
            // Ranks in different calls may wait for each other and send nothing.
            Trouble::Gone { peer } => self
                .told()
                .or_else(|| self.disagreement(&at))
                .unwrap_or_else(|| Error::PeerFailed {
                    at,
                    peer,
                    fate: self
                        .board()
                        .fate(peer)
                        .cloned()
                        .unwrap_or(Fate::Disconnected),
                }),
            Trouble::Silent { peer } => self
                .told()
                .or_else(|| self.disagreement(&at))
                .unwrap_or_else(|| Error::Timeout {
                    at,
                    after: self.timeout,
                    late: self.late(peer, fingerprint),
                }),
        }
    }

    /// The first call in which the board has another rank differ from this one.
    fn disagreement(&self, at: &At) -> Option<Error> {
        let (peer, mine, theirs) = self.board().disagreement(self.rank())?;
        Some(mismatch(at.clone(), peer, mine, theirs))
    }

    /// The ranks that have not come to this call; if all have, the one waited for.
    fn late(&self, peer: usize, fingerprint: Fingerprint) -> Vec<Late> {
        let mut ranks: Vec<_> = match fingerprint.algorithm {
            Some(_) => self.board().behind(fingerprint.seq).collect(),
            None => vec![],
        };
        if ranks.is_empty() {
            ranks.push(peer);
        }
        ranks
            .into_iter()
            .map(|rank| Late {
                rank,
                entered: self.board().entered(rank),
            })
            .collect()
    }

    /// What this rank had called under the number of a peer's message, which may
    /// be one that this rank has passed, since whoever only sends does not wait.
    fn call_like(&self, theirs: &Fingerprint, current: Fingerprint) -> Fingerprint {
        let planned = |fingerprint: &Fingerprint| fingerprint.algorithm.is_some();
        if planned(theirs) && planned(&current) && theirs.seq < current.seq {
            let mine = self.board().call(self.rank(), theirs.seq);
            return mine.unwrap_or(current);
        }
        current
    }

    /// Refuses a call that this rank's caller got wrong. The other ranks may be
    /// waiting in it, so it stops the world like any error.
    fn refuse(&mut self, collective: Collective, dtype: DType, len: usize, what: String) -> Error {
        let call = Call {
            collective,
            op: None,
            root: None,
            dtype,
            len,
        };
        let at = At {
            place: self.place(),
            fingerprint: Box::new(self.fingerprint(call, self.issued + 1, None)),
        };
        self.stop(Error::Argument { at, what })
    }

    /// Poisons this communicator, tells the others why, and closes the links so
    /// that those who wait here wake. Returns what every call fails with.
    fn stop(&mut self, error: Error) -> Error {
        let error = self.poison.get_or_insert(error).clone();
        let rank = self.rank();
        // What this rank was only told is on the board already.
        self.board().stop(rank, &error);
        self.link.close();
        error
    }

    /// The last step of a mean, once all is summed.
    fn complete<T: Element>(&self, op: ReduceOp, buffer: &mut [T]) {
        if op == ReduceOp::Mean {
            T::divide(buffer, self.world_size());
        }
    }
}

fn mismatch(at: At, peer: usize, mine: Fingerprint, theirs: Fingerprint) -> Error {
    Error::Mismatch {
        at,
        peer,
        field: mine.difference(&theirs).unwrap_or("what came between"),
        mine: Box::new(mine),
        theirs: Box::new(theirs),
    }
}

/// `start + timeout`, or a time that does not come where that overflows.
fn after(start: Instant, timeout: Duration) -> Instant {
    const AGES: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    start.checked_add(timeout.min(AGES)).unwrap_or(start)
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let fate = match thread::panicking() {
            true => Fate::Panicked,
            false => Fate::Left { after: self.issued },
        };
        let rank = self.rank();
        self.board().end(rank, fate);
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("place", &self.place())
            .field("issued", &self.issued)
            .field("poison", &self.poison)
            .finish_non_exhaustive()
    }
}

/// A communicator with another deadline, as long as it is borrowed.
#[derive(Debug)]
pub struct Within<'a> {
    communicator: &'a mut Communicator,
    usual: Duration,
}

impl Deref for Within<'_> {
    type Target = Communicator;

    fn deref(&self) -> &Communicator {
        self.communicator
    }
}

impl DerefMut for Within<'_> {
    fn deref_mut(&mut self) -> &mut Communicator {
        self.communicator
    }
}

impl Drop for Within<'_> {
    fn drop(&mut self) {
        self.communicator.timeout = self.usual;
    }
}
