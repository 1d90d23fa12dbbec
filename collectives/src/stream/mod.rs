//! Collectives as work: on a thread of their own, first in, first out; or at once.
mod calls;

use std::{
    fmt, mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, PoisonError},
    thread::{self, JoinHandle},
};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};

use crate::{
    Board, Communicator, Error, Place, Result, Stats, board::Fate, launch::panic_message, trace,
};

type Job = Box<dyn FnOnce(&mut Communicator) + Send>;

/// A communicator whose calls are work: on a thread of its own ([`new`](Self::new)),
/// or on the caller's ([`inline`](Self::inline)).
///
/// Work that is issued runs in the order in which it was issued, each call under
/// the communicator's deadline. Dropping the stream lets the issued work finish
/// first; dropping it while this thread panics tells the other ranks.
///
/// ```
/// use collectives::{CommStream, CommunicatorConfig, ReduceOp, launch};
/// let sums = launch::spawn(2, &CommunicatorConfig::new(), |communicator| {
///     let stream = CommStream::new(communicator)?;
///     let work = stream.all_reduce(vec![1.0f32; 3], ReduceOp::Sum);
///     // … compute …
///     work.wait()
/// }).unwrap();
/// assert_eq!(sums, [[2.0; 3]; 2]);
/// ```
pub struct CommStream {
    place: Place,
    board: Arc<Board>,
    lane: Lane,
}

/// Where jobs run.
enum Lane {
    /// On a thread, which ends when `jobs` is dropped.
    Thread {
        jobs: Sender<Job>,
        worker: JoinHandle<Communicator>,
    },
    /// On whichever thread issues them, one at a time.
    Inline(Box<Mutex<Communicator>>),
    /// Nowhere: the communicator was taken back.
    Closed,
}

/// A collective under way. What went in with it comes out of [`wait`](Self::wait).
///
/// A handle that is dropped unfinished changes nothing for the other ranks: the
/// collective still runs, and its result is thrown away.
///
/// While the buffer is away it cannot be touched:
///
/// ```compile_fail,E0382
/// # fn overlap(stream: collectives::CommStream, buffer: Vec<f32>) {
/// let work = stream.all_reduce(buffer, collectives::ReduceOp::Sum);
/// println!("{}", buffer.len());
/// # }
/// ```
#[derive(Debug)]
#[must_use = "the buffer comes back only from `wait`"]
pub struct Work<R> {
    place: Place,
    outcome: Outcome<R>,
}

#[derive(Debug)]
enum Outcome<R> {
    /// It comes from the communication thread.
    Awaited(Receiver<Result<R>>),
    Known(Result<R>),
}

impl CommStream {
    /// Moves `communicator` to a thread of its own.
    ///
    /// # Errors
    ///
    /// [`Error::Thread`] if the system gives none; the communicator is then dropped.
    pub fn new(communicator: Communicator) -> Result<Self> {
        let place = communicator.place();
        let board = communicator.board().clone();
        let (jobs, inbox) = unbounded::<Job>();
        let worker = thread::Builder::new()
            .name(format!("rank {} comm", place.rank))
            .spawn(trace::inherit(move || {
                let mut communicator = communicator;
                inbox.iter().for_each(|job| job(&mut communicator));
                communicator
            }))
            .map_err(|error| Error::Thread {
                rank: place.rank,
                what: error.to_string(),
            })?;
        Ok(Self {
            place,
            board,
            lane: Lane::Thread { jobs, worker },
        })
    }

    /// Keeps `communicator` on the threads that issue work: a call runs at once, and its
    /// work is finished when it is returned.
    ///
    /// Nothing overlaps, and nobody needs to be woken. The ranks must therefore issue
    /// their work in one order that all can follow without the others' results; a job must
    /// not issue work on the stream that it runs on, and would wait for itself if it did.
    ///
    /// ```
    /// use collectives::{CommStream, CommunicatorConfig, ReduceOp, launch};
    /// let sums = launch::spawn(2, &CommunicatorConfig::new(), |communicator| {
    ///     let stream = CommStream::inline(communicator);
    ///     let work = stream.all_reduce(vec![1.0f32; 3], ReduceOp::Sum);
    ///     assert!(work.is_finished());
    ///     work.wait()
    /// }).unwrap();
    /// assert_eq!(sums, [[2.0; 3]; 2]);
    /// ```
    pub fn inline(communicator: Communicator) -> Self {
        Self {
            place: communicator.place(),
            board: communicator.board().clone(),
            lane: Lane::Inline(Box::new(Mutex::new(communicator))),
        }
    }

    /// Whether work runs on the thread that issues it.
    pub fn is_inline(&self) -> bool {
        matches!(self.lane, Lane::Inline(_))
    }

    /// Where this rank stands.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Starts anything that is done with a communicator: what has no call of its own
    /// here, or a call with another [deadline](Communicator::within).
    ///
    /// A panic of `job` becomes an error on every rank. What is issued while this
    /// thread panics fails at once, as it would without a stream.
    pub fn run<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Communicator) -> Result<R> + Send + 'static,
    ) -> Work<R> {
        let panicking = thread::panicking();
        let run = move |communicator: &mut Communicator| {
            if panicking {
                return Err(communicator.abort("a collective was called while this rank panics"));
            }
            catch_unwind(AssertUnwindSafe(|| job(communicator))).unwrap_or_else(|panic| {
                let message = panic_message(panic.as_ref());
                Err(communicator.abort(format!("work on its stream panicked: {message}")))
            })
        };
        let outcome = match &self.lane {
            Lane::Thread { jobs, .. } => {
                let (answer, done) = bounded(1);
                // Whoever dropped the handle does not want to know.
                let job: Job = Box::new(move |communicator| drop(answer.send(run(communicator))));
                // The worker ends only when this sender is dropped.
                drop(jobs.send(job));
                Outcome::Awaited(done)
            }
            // No panic passes while the lock is held, so that nothing is half done behind it.
            Lane::Inline(communicator) => Outcome::Known(run(&mut communicator
                .lock()
                .unwrap_or_else(PoisonError::into_inner))),
            Lane::Closed => Outcome::Known(Err(lost(self.place))),
        };
        Work {
            place: self.place,
            outcome,
        }
    }

    /// What was moved by the work issued so far, once that is done.
    ///
    /// # Errors
    ///
    /// None as long as the worker lives.
    pub fn stats(&self) -> Result<Stats> {
        self.run(|communicator| Ok(communicator.stats().clone()))
            .wait()
    }

    /// Lets the issued work finish and takes the communicator back.
    ///
    /// # Errors
    ///
    /// [`Error::GaveUp`] if the worker is lost.
    pub fn into_communicator(mut self) -> Result<Communicator> {
        self.finish().ok_or_else(|| lost(self.place))
    }

    fn finish(&mut self) -> Option<Communicator> {
        match mem::replace(&mut self.lane, Lane::Closed) {
            Lane::Thread { jobs, worker } => {
                drop(jobs);
                worker.join().ok()
            }
            Lane::Inline(communicator) => {
                Some((communicator.into_inner()).unwrap_or_else(PoisonError::into_inner))
            }
            Lane::Closed => None,
        }
    }
}

impl<R> Work<R> {
    /// Waits for the collective and gives back what went in with it.
    ///
    /// Ends at the latest when the deadlines of all work issued before, and of
    /// this, have passed.
    ///
    /// # Errors
    ///
    /// What the call itself would return.
    pub fn wait(self) -> Result<R> {
        match self.outcome {
            Outcome::Awaited(done) => done.recv().unwrap_or_else(|_| Err(lost(self.place))),
            Outcome::Known(result) => result,
        }
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_finished(&self) -> bool {
        match &self.outcome {
            Outcome::Awaited(done) => !done.is_empty(),
            Outcome::Known(_) => true,
        }
    }
}

fn lost(place: Place) -> Error {
    Error::GaveUp {
        place,
        group: None,
        reason: "its communication thread is gone".to_owned(),
    }
}

impl Drop for CommStream {
    fn drop(&mut self) {
        if thread::panicking() {
            self.board.end(self.place.rank, Fate::Panicked);
        }
        drop(self.finish());
    }
}

impl fmt::Debug for CommStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CommStream")
            .field("place", &self.place)
            .finish_non_exhaustive()
    }
}
