//! Launching worlds: results in order, threads joined, the first cause returned.
use std::{
    error::Error as StdError,
    fmt, fs,
    sync::{Barrier, Mutex, mpsc::channel},
    thread,
    time::{Duration, Instant},
};

use collectives::{
    Algorithm, Communicator, CommunicatorConfig, Error, ReduceOp,
    launch::{self, LaunchError},
};

use crate::world::{alone, by, everywhere};

/// More than any prompt error takes, less than a deadline.
const PROMPT: Duration = Duration::from_secs(5);

/// A user's own error, which may carry one of this crate.
#[derive(Debug)]
enum TrainingError {
    NoData,
    Collective(Error),
}

impl fmt::Display for TrainingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoData => f.write_str("no data"),
            Self::Collective(_) => f.write_str("the gradients were not exchanged"),
        }
    }
}

impl StdError for TrainingError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::NoData => None,
            Self::Collective(error) => Some(error),
        }
    }
}

impl From<Error> for TrainingError {
    fn from(error: Error) -> Self {
        Self::Collective(error)
    }
}

fn sum(communicator: &mut Communicator) -> Result<(), Error> {
    communicator.all_reduce(&mut [1.0f32; 10], ReduceOp::Sum)
}

#[test]
fn results_come_in_rank_order_and_may_borrow() {
    for world in [1, 2, 5, 8] {
        let borrowed: Vec<String> = (0..world).map(|rank| format!("rank {rank}")).collect();
        let names = launch::spawn(world, &CommunicatorConfig::new(), |communicator| {
            Ok::<_, Error>(borrowed[communicator.rank()].as_str())
        });
        assert_eq!(names.unwrap(), borrowed);
    }
}

#[test]
fn a_world_of_none_is_refused() {
    let error = launch::spawn(0, &CommunicatorConfig::new(), |_| Ok::<_, Error>(())).unwrap_err();
    assert!(matches!(error, LaunchError::Start(Error::Config { .. })));
    assert_eq!(
        error.to_string(),
        "world_size = 0: at least one rank is needed"
    );
    assert_eq!(error.rank(), None);
}

#[test]
fn settings_that_cannot_be_start_nobody() {
    let config = CommunicatorConfig::new().with_segment_kb(0);
    let error =
        launch::spawn(2, &config, |_| -> Result<(), Error> { panic!("started") }).unwrap_err();
    assert!(error.to_string().starts_with("segment_kb = 0"), "{error}");
}

#[test]
fn a_panic_comes_before_the_errors_it_causes() {
    for (algorithm, world) in everywhere(&[2, 4]) {
        for odd in [0, 1, world - 1] {
            let start = Instant::now();
            let error = launch::spawn(world, &by(algorithm), |mut communicator| {
                sum(&mut communicator)?;
                assert!(communicator.rank() != odd, "batch 7 is corrupt");
                sum(&mut communicator)
            })
            .unwrap_err();
            assert_eq!(
                error.to_string(),
                format!("rank {odd} panicked: batch 7 is corrupt")
            );
            assert_eq!(error.rank(), Some(odd));
            assert!(start.elapsed() < PROMPT);
        }
    }
}

#[test]
fn the_first_of_several_panics_is_the_one_returned() {
    // Survivors that unwrap panic too, and report before the rank that began it.
    for odd in 0..4 {
        let (echo, echoes) = channel();
        let echoes = Mutex::new(echoes);
        let error = launch::spawn(4, &by(Algorithm::Ring), |communicator| {
            let rank = communicator.rank();
            let _end = AtEnd(|| match rank == odd {
                true => {
                    let echoes = echoes.lock().unwrap();
                    (0..3).for_each(|_| echoes.recv_timeout(PROMPT).unwrap());
                    // Time to report; if it is too short, the test proves less.
                    thread::sleep(Duration::from_millis(20));
                }
                false => echo.send(()).unwrap(),
            });
            // Declared later, so dropped earlier: the others see it go.
            let mut communicator = communicator;
            sum(&mut communicator).unwrap();
            assert!(rank != odd, "the cause");
            sum(&mut communicator).unwrap();
            Ok::<_, Error>(())
        })
        .unwrap_err();
        assert_eq!(error.to_string(), format!("rank {odd} panicked: the cause"));
    }
}

/// Does something when it is dropped.
struct AtEnd<F: FnMut()>(F);

impl<F: FnMut()> Drop for AtEnd<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

#[test]
fn a_user_s_error_comes_before_its_echoes() {
    for (algorithm, world) in everywhere(&[2, 4]) {
        for odd in [0, world - 1] {
            let error = launch::spawn(world, &by(algorithm), |mut communicator| {
                sum(&mut communicator)?;
                if communicator.rank() == odd {
                    return Err(TrainingError::NoData);
                }
                Ok(sum(&mut communicator)?)
            })
            .unwrap_err();
            assert_eq!(error.to_string(), format!("rank {odd}: no data"));
        }
    }
}

#[test]
fn a_panic_comes_before_a_user_s_error_that_was_there_first() {
    let (returned, panics) = channel();
    let (returned, panics) = (Mutex::new(returned), Mutex::new(panics));
    let error = launch::spawn(2, &by(Algorithm::Tree), |communicator| {
        if communicator.rank() == 0 {
            returned.lock().unwrap().send(()).unwrap();
            return Err(TrainingError::NoData);
        }
        panics.lock().unwrap().recv().unwrap();
        panic!("the cause");
    });
    assert_eq!(error.map(|_: Vec<()>| ()).unwrap_err().rank(), Some(1));
}

#[test]
fn a_cause_is_found_inside_the_user_s_own_error() {
    let last = Barrier::new(3);
    let error = launch::spawn(3, &by(Algorithm::Tree), |mut communicator| {
        let outcome = match communicator.rank() {
            2 => communicator.broadcast(&mut [1u8], 3),
            _ => communicator.broadcast(&mut [1u8], 2),
        };
        last.wait();
        Ok::<_, TrainingError>(outcome?)
    })
    .unwrap_err();
    assert_eq!(error.rank(), Some(2));
    let source = error.source().and_then(|error| error.source()).unwrap();
    let cause: &Error = source.downcast_ref().unwrap();
    assert!(matches!(cause, Error::Argument { .. }), "{cause}");
}

#[test]
fn a_rank_that_gives_up_comes_before_those_that_were_told() {
    for (algorithm, world) in everywhere(&[2, 4]) {
        let error = launch::spawn(world, &by(algorithm), |mut communicator| match communicator
            .rank()
        {
            1 => Err(communicator.abort("the loss is not a number")),
            _ => sum(&mut communicator),
        })
        .unwrap_err();
        assert_eq!(error.rank(), Some(1));
        assert!(
            error
                .to_string()
                .contains("gave up: the loss is not a number"),
            "{error}"
        );
    }
}

#[test]
fn all_ranks_are_joined_whatever_became_of_them() {
    alone(
        "launch::all_ranks_are_joined_whatever_became_of_them",
        || {
            let threads = || fs::read_dir("/proc/self/task").unwrap().count();
            let before = threads();
            for odd in 0..4 {
                let outcome = launch::spawn(6, &by(Algorithm::Ring), |mut communicator| {
                    sum(&mut communicator)?;
                    match (communicator.rank() == 3, odd) {
                        (true, 0) => panic!("odd"),
                        (true, 1) => Ok(()),
                        (true, 2) => Err(communicator.abort("odd")),
                        _ => sum(&mut communicator),
                    }
                });
                assert_eq!(outcome.is_ok(), odd == 3);
                // The system takes a moment to clear away a thread that has been joined.
                let start = Instant::now();
                while threads() != before {
                    assert!(
                        start.elapsed() < PROMPT,
                        "{} threads, {before} before",
                        threads()
                    );
                    thread::yield_now();
                }
            }
        },
    );
}

#[test]
fn a_hundred_and_twenty_eight_ranks_on_few_cores_are_right() {
    for &algorithm in Algorithm::ALL {
        let sums = launch::spawn(128, &by(algorithm), |mut communicator| {
            let mut buffer = [communicator.rank() as u64; 100];
            communicator.all_reduce(&mut buffer, ReduceOp::Sum)?;
            communicator.barrier()?;
            Ok::<_, Error>(buffer[99])
        });
        assert_eq!(sums.unwrap(), [128 * 127 / 2; 128]);
    }
}
