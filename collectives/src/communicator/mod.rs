//! The public face: blocking collectives among the ranks of one world.
//!
//! Here is what every call has in common: its number, fingerprint, deadline,
//! statistics and blame. The calls themselves are in the files beside this one.
mod exchanges;
mod groups;
mod objects;
mod planned;

use std::{
    fmt,
    ops::{Deref, DerefMut, Range},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use crate::{
    Board, Call, CommunicatorConfig, Error, Fingerprint, Partition, Place, Plan, Result, Route,
    Stats, Traffic,
    board::Fate,
    error::{At, Late},
    executor::Aside,
    launch::panic_message,
    stats::Key,
    trace,
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
    group: Option<Arc<[usize]>>,
    plan: Plan,
    scratch: Scratch,
    stats: Stats,
    last_route: Option<Route>,
    poison: Option<Error>,
}

/// Room that calls need, kept from one to the next.
#[derive(Default)]
struct Scratch {
    aside: Aside,
    /// A buffer of 16-bit floats while it is summed.
    wide: Vec<u64>,
    /// Buffers that travel together.
    together: Vec<u64>,
}

type Outcome = std::result::Result<(), Trouble>;

/// What it takes to carry out a call.
struct Tools<'a> {
    plan: &'a Plan,
    ticket: &'a Ticket,
    link: &'a mut dyn Transport,
    scratch: &'a mut Scratch,
}

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
            group: None,
            plan: Plan::default(),
            scratch: Scratch::default(),
            stats: Stats::new(world),
            last_route: None,
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

    /// How the last collective was carried out; none before the first, and for single messages.
    pub fn last_route(&self) -> Option<Route> {
        self.last_route
    }

    /// The same communicator with another deadline, for the calls made through it.
    pub fn within(&mut self, timeout: Duration) -> Within<'_> {
        let usual = std::mem::replace(&mut self.timeout, timeout);
        Within {
            communicator: self,
            usual,
        }
    }

    /// Gives up: every rank's next or current call fails and names this rank and
    /// `reason`. Returns the error that this rank's own calls fail with from now on.
    pub fn abort(&mut self, reason: impl Into<String>) -> Error {
        let error = Error::GaveUp {
            place: self.place(),
            group: self.group.clone(),
            reason: reason.into(),
        };
        self.stop(error)
    }

    pub(crate) fn board(&self) -> &Arc<Board> {
        self.link.board()
    }

    /// Begins a collective: every rank numbers it alike.
    fn begin(&mut self, call: Call, algorithm: Route) -> Result<Ticket> {
        self.issued += 1;
        self.enter()?;
        let fingerprint = Fingerprint {
            history: self.history,
            ..self.fingerprint(call, self.issued, Some(algorithm))
        };
        self.history = fingerprint.digest();
        let (rank, digest) = (self.rank(), self.history);
        if let Some((peer, theirs)) = self.board().enter(rank, fingerprint, digest) {
            let error = mismatch(self.at(fingerprint), peer, fingerprint, theirs);
            return Err(self.stop(error));
        }
        self.plan.clear();
        Ok(self.ticket(fingerprint))
    }

    /// The ticket of a call that begins now.
    fn ticket(&self, fingerprint: Fingerprint) -> Ticket {
        Ticket {
            fingerprint,
            expected: fingerprint,
            deadline: after(Instant::now(), self.timeout),
        }
    }

    /// Carries out a call that has begun.
    fn run(
        &mut self,
        ticket: Ticket,
        predicted: Traffic,
        carry_out: impl FnOnce(Tools<'_>) -> Outcome,
    ) -> Result<()> {
        let fingerprint = ticket.fingerprint;
        let _call = trace::call(self.rank(), &fingerprint, predicted).entered();
        let start = Instant::now();
        let tools = Tools {
            plan: &self.plan,
            ticket: &ticket,
            link: &mut self.link,
            scratch: &mut self.scratch,
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| carry_out(tools)));
        let outcome = outcome.unwrap_or_else(|panic| {
            self.panicked(panic_message(panic.as_ref()));
            resume_unwind(panic)
        });
        outcome.map_err(|trouble| {
            let error = self.explain(trouble, ticket.expected);
            self.stop(error)
        })?;
        let key = Key {
            collective: fingerprint.call.collective,
            algorithm: fingerprint.algorithm,
        };
        self.last_route = key.algorithm;
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

    fn fingerprint(&self, call: Call, seq: u64, algorithm: Option<Route>) -> Fingerprint {
        Fingerprint {
            seq,
            history: 0,
            call,
            algorithm,
            segment: self.segment(call),
            message: 0,
        }
    }

    /// The most elements in one message.
    fn segment(&self, call: Call) -> usize {
        let size = match call.widens() {
            true => call.dtype.wide_size(),
            false => call.dtype.size(),
        };
        (self.config.segment_kb << 10) / size
    }

    fn at(&self, fingerprint: Fingerprint) -> At {
        At {
            place: self.place(),
            group: self.group.clone(),
            fingerprint: Box::new(fingerprint),
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
        let at = self.at(fingerprint);
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
    fn refuse(&mut self, call: Call, what: String) -> Error {
        let at = self.at(self.fingerprint(call, self.issued + 1, None));
        self.stop(Error::Argument { at, what })
    }

    /// Refuses a root that is no rank.
    fn check_root(&mut self, call: Call) -> Result<()> {
        let world = self.world_size();
        match call.root {
            Some(root) if root >= world => {
                let what = format!(
                    "no rank {root} to be the root: ranks are 0 to {}",
                    world - 1
                );
                Err(self.refuse(call, what))
            }
            _ => Ok(()),
        }
    }

    /// Refuses a length other than the one that is due.
    fn check_len(&mut self, call: Call, what: &str, got: usize, due: usize) -> Result<()> {
        if got == due {
            return Ok(());
        }
        Err(self.refuse(
            call,
            format!("{what} is {got} elements long; {due} are due"),
        ))
    }

    /// The caller's operator has panicked in a call. The others wake now, and not when
    /// this communicator is dropped or the deadline has passed: the caller may catch it.
    fn panicked(&mut self, message: String) {
        let error = Error::GaveUp {
            place: self.place(),
            group: self.group.clone(),
            reason: format!("its operator panicked: {message}"),
        };
        self.poison.get_or_insert(error);
        let rank = self.rank();
        self.board().end(rank, Fate::Panicked);
        self.link.close();
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
}

fn mismatch(at: At, peer: usize, mine: Fingerprint, theirs: Fingerprint) -> Error {
    // Of two calls only one may have come with a message.
    let alike = Fingerprint {
        message: theirs.message,
        ..mine
    };
    Error::Mismatch {
        at,
        peer,
        field: alike.difference(&theirs).unwrap_or("what came between"),
        mine: Box::new(mine),
        theirs: Box::new(theirs),
    }
}

/// `start + timeout`, or a time that does not come where that overflows.
pub(crate) fn after(start: Instant, timeout: Duration) -> Instant {
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
