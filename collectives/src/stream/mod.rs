//! Collectives in the background: one thread, first in, first out.
mod calls;

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread::{self, JoinHandle},
};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};

use crate::{Board, Communicator, Error, Place, Result, Stats, board::Fate, launch::panic_message};

type Job = Box<dyn FnOnce(&mut Communicator) + Send>;

/// A communicator on a thread of its own.
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
    jobs: Option<Sender<Job>>,
    worker: Option<JoinHandle<Communicator>>,
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
    done: Receiver<Result<R>>,
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
            .spawn(move || {
                let mut communicator = communicator;
                inbox.iter().for_each(|job| job(&mut communicator));
                communicator
            })
            .map_err(|error| Error::Thread {
                rank: place.rank,
                what: error.to_string(),
            })?;
        Ok(Self {
            place,
            board,
            jobs: Some(jobs),
            worker: Some(worker),
        })
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
        let (answer, done) = bounded(1);
        let panicking = thread::panicking();
        let job: Job = Box::new(move |communicator| {
            if panicking {
                let error = communicator.abort("a collective was called while this rank panics");
                return drop(answer.send(Err(error)));
            }
            let outcome =
                catch_unwind(AssertUnwindSafe(|| job(communicator))).unwrap_or_else(|panic| {
                    let message = panic_message(panic.as_ref());
                    Err(communicator.abort(format!("work on its stream panicked: {message}")))
                });
            // Whoever dropped the handle does not want to know.
            drop(answer.send(outcome));
        });
        if let Some(jobs) = &self.jobs {
            // The worker ends only when this sender is dropped.
            drop(jobs.send(job));
        }
        Work {
            place: self.place,
            done,
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
        drop(self.jobs.take());
        self.worker.take().and_then(|worker| worker.join().ok())
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
        self.done.recv().unwrap_or_else(|_| Err(lost(self.place)))
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_finished(&self) -> bool {
        !self.done.is_empty()
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
