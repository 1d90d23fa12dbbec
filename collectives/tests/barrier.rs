//! Barriers used again and again, and left too soon.
use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use collectives::{Algorithm, Error, ReduceOp};

use crate::world::{by, each_rank, everywhere, soak};

#[test]
fn no_rank_is_ever_more_than_one_barrier_ahead() {
    const WORLD: usize = 3;
    let rounds = if soak() { 100_000 } else { 20_000 };
    let come: [AtomicU64; WORLD] = Default::default();
    each_rank(WORLD, &by(Algorithm::Ring), |mut communicator| {
        let rank = communicator.rank();
        let mut random = rank as u64 + 1;
        for round in 1..=rounds {
            random = random
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            pause(Duration::from_micros((random >> 33) % 51));
            come[rank].store(round, Ordering::SeqCst);
            communicator.barrier().unwrap();
            for other in &come {
                let other = other.load(Ordering::SeqCst);
                assert!((round..=round + 1).contains(&other), "{other} at {round}");
            }
        }
        let row = communicator.stats().total();
        assert_eq!((row.calls, row.bytes_sent), (rounds, 0));
    });
}

#[test]
fn a_barrier_holds_every_world_together() {
    for world in 1..=9 {
        let come = AtomicU64::new(0);
        each_rank(world, &by(Algorithm::Naive), |mut communicator| {
            for round in 1..=20 {
                come.fetch_add(1, Ordering::SeqCst);
                communicator.barrier().unwrap();
                assert!(come.load(Ordering::SeqCst) >= round * world as u64);
                communicator.barrier().unwrap();
            }
        });
    }
}

#[test]
fn barriers_keep_other_calls_apart() {
    for (algorithm, world) in everywhere(&[2, 3, 4]) {
        each_rank(world, &by(algorithm), |mut communicator| {
            for turn in 1..=50 {
                let mut buffer = vec![turn; 17];
                communicator.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
                communicator.barrier().unwrap();
                assert_eq!(buffer, vec![turn * world as u64; 17]);
            }
        });
    }
}

#[test]
fn two_barriers_against_one_are_a_prompt_error() {
    for odd in 0..4 {
        let start = Instant::now();
        let errors = each_rank(4, &by(Algorithm::Tree), |mut communicator| {
            communicator.barrier().unwrap();
            (communicator.rank() == odd).then(|| communicator.barrier().unwrap_err())
        });
        for error in errors.into_iter().flatten() {
            assert!(matches!(error, Error::PeerFailed { .. }), "{error}");
            assert!(
                error.to_string().contains("has left after 1 collectives"),
                "{error}"
            );
            assert!(!error.ranks().contains(&odd), "{error}");
        }
        assert!(start.elapsed() < Duration::from_secs(5));
    }
}

#[test]
fn a_barrier_too_many_meets_the_next_call() {
    for odd in 0..4 {
        let errors = each_rank(4, &by(Algorithm::Ring), |mut communicator| {
            communicator.barrier().unwrap();
            let second = match communicator.rank() == odd {
                true => communicator.barrier(),
                false => communicator.all_reduce(&mut [1.0f32; 8], ReduceOp::Sum),
            };
            second.and_then(|()| communicator.barrier()).unwrap_err()
        });
        for error in errors {
            assert!(error.ranks().contains(&odd), "{error}");
            let text = error.to_string();
            assert!(
                text.contains("#2 barrier") && text.contains("#2 all_reduce"),
                "{error}"
            );
        }
    }
}

fn pause(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}
