//! Ranks as threads of this process.
use std::{
    any::Any,
    error::Error as StdError,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc,
    thread,
};

use crate::{
    Board, Communicator, CommunicatorConfig, Error, trace,
    transport::{Local, Transport},
};

type Cause = Box<dyn StdError + Send + Sync>;

/// Why a launch failed: the first cause, not its echoes on other ranks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The settings cannot be, or the system gave no thread.
    #[error(transparent)]
    Start(#[from] Error),
    /// A rank returned an error.
    #[error("rank {rank}: {source}")]
    Failed {
        /// The rank.
        rank: usize,
        /// Its error.
        source: Cause,
    },
    /// A rank panicked.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// The rank.
        rank: usize,
        /// What it said.
        message: String,
    },
}

impl LaunchError {
    /// The rank that failed first, if it was one.
    pub fn rank(&self) -> Option<usize> {
        match self {
            Self::Start(_) => None,
            Self::Failed { rank, .. } | Self::Panicked { rank, .. } => Some(*rank),
        }
    }

    /// How far from the cause, nearest first; of equals the earlier one counts.
    fn distance(&self) -> u8 {
        match self {
            Self::Panicked { .. } => 0,
            Self::Start(_) => 1,
            Self::Failed { source, .. } => match collective_error(source.as_ref()) {
                None => 1,
                Some(error) if !error.is_secondary() => 1,
                Some(Error::Timeout { .. }) => 2,
                Some(Error::PeerFailed { .. }) => 3,
                Some(_) => 4,
            },
        }
    }
}

/// The error of this crate that lies at the bottom of `error`, if one does.
fn collective_error<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a Error> {
    match error.downcast_ref() {
        Some(found) => Some(found),
        None => collective_error(error.source()?),
    }
}

/// Runs `rank` on `world` threads, each with its communicator, and waits for all.
///
/// Gives what the ranks returned, by rank. The threads are scoped: `rank` may
/// borrow from the caller.
///
/// ```
/// use collectives::{CommunicatorConfig, ReduceOp, launch};
/// let sums = launch::spawn(4, &CommunicatorConfig::new(), |mut communicator| {
///     let mut mine = [communicator.rank() as f64];
///     communicator.all_reduce(&mut mine, ReduceOp::Sum)?;
///     Ok::<_, collectives::Error>(mine[0])
/// }).unwrap();
/// assert_eq!(sums, [6.0; 4]);
/// ```
///
/// # Errors
///
/// When ranks fail, the failure nearest to the cause: a panic before an error of
/// the caller's own before one that only reports another rank; of equals that of
/// the rank whose communicator was dropped first.
pub fn spawn<R, E>(
    world: usize,
    config: &CommunicatorConfig,
    rank: impl Fn(Communicator) -> Result<R, E> + Sync,
) -> Result<Vec<R>, LaunchError>
where
    R: Send,
    E: Into<Cause>,
{
    config.validate()?;
    if world == 0 {
        return Err(LaunchError::Start(Error::Config {
            key: "world_size".to_owned(),
            value: world.to_string(),
            what: "at least one rank is needed".to_owned(),
        }));
    }
    let (report, reports) = mpsc::channel();
    let mesh = Local::mesh(world);
    let board = mesh[0].board().clone();
    let started = thread::scope(|scope| {
        for (number, link) in mesh.into_iter().enumerate() {
            let (report, body) = (report.clone(), &rank);
            let run = move || {
                let outcome = run(number, link, config, body);
                // The receiver outlives the scope.
                drop(report.send((number, outcome)));
            };
            thread::Builder::new()
                .name(format!("rank {number}"))
                .spawn_scoped(scope, trace::inherit(run))
                // The links that are dropped here end the ranks that have started.
                .map_err(|error| Error::Thread {
                    rank: number,
                    what: error.to_string(),
                })?;
        }
        Ok(())
    });
    drop(report);
    gather(&board, world, started, reports)
}

fn run<R, E: Into<Cause>>(
    rank: usize,
    link: Local,
    config: &CommunicatorConfig,
    body: impl Fn(Communicator) -> Result<R, E>,
) -> Result<R, LaunchError> {
    let communicator = Communicator::new(link, config)?;
    match catch_unwind(AssertUnwindSafe(|| body(communicator))) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(LaunchError::Failed {
            rank,
            source: error.into(),
        }),
        Err(panic) => Err(LaunchError::Panicked {
            rank,
            message: panic_message(panic.as_ref()),
        }),
    }
}

/// Puts results in rank order, or picks the failure nearest to the cause.
fn gather<R>(
    board: &Board,
    world: usize,
    started: Result<(), Error>,
    reports: mpsc::Receiver<(usize, Result<R, LaunchError>)>,
) -> Result<Vec<R>, LaunchError> {
    started?;
    let mut results: Vec<Option<R>> = (0..world).map(|_| None).collect();
    let mut failures = vec![];
    for (rank, outcome) in reports {
        match outcome {
            Ok(value) => results[rank] = Some(value),
            Err(failure) => failures.push(failure),
        }
    }
    let nearness = |failure: &LaunchError| {
        let end = failure.rank().and_then(|rank| board.end_of(rank));
        (failure.distance(), end.unwrap_or(u64::MAX))
    };
    match failures.into_iter().min_by_key(nearness) {
        Some(failure) => Err(failure),
        None => Ok(results.into_iter().flatten().collect()),
    }
}

/// What a panic said.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}
