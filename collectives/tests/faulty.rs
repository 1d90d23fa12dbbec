//! What a network does on a bad day, done to every call, from a seed that is printed.
use std::{
    collections::hash_map::RandomState,
    hash::BuildHasher,
    time::{Duration, Instant},
};

use collectives::{
    Algorithm, Collective, CommunicatorConfig, Error, ReduceOp, Result,
    transport::{Faults, Faulty, Local},
};

use crate::{
    calls::{CALLS, Trial},
    world::{at_once, by, each_over, everywhere},
};

/// More than a deadline and what the machine adds to it, less than a hang.
const PROMPT: Duration = Duration::from_secs(15);

/// A seed from `LOCKSTEP_SEED`, or a new one; a test that fails shows it.
fn seed() -> u64 {
    let seed = match std::env::var("LOCKSTEP_SEED") {
        Ok(given) => given.parse().expect("LOCKSTEP_SEED is a number"),
        Err(_) => RandomState::new().hash_one("seed") >> 32,
    };
    println!("LOCKSTEP_SEED={seed}");
    seed
}

/// What every rank gets from `call`, and a barrier after it, over links with `faults`.
fn outcomes(
    world: usize,
    config: &CommunicatorConfig,
    faults: impl Fn(usize) -> Faults,
    call: Trial,
) -> Vec<Result<bool>> {
    let link = |(rank, link)| Faulty::new(link, faults(rank));
    let mesh = Local::mesh(world).into_iter().enumerate().map(link);
    each_over(mesh, config, |mut communicator| {
        // Its own messages may all have come: then the barrier tells it.
        let right = call(&mut communicator, 500)?;
        communicator.barrier()?;
        Ok(right)
    })
}

/// Every call, and the barrier after it, by every algorithm.
fn all_cases() -> impl Iterator<Item = (Algorithm, usize, &'static str, Trial)> {
    everywhere(&[2, 3]).flat_map(|(algorithm, world)| {
        CALLS
            .into_iter()
            .map(move |(name, call)| (algorithm, world, name, call))
    })
}

/// So that a call is several messages.
fn config(algorithm: Algorithm) -> CommunicatorConfig {
    by(algorithm).with_segment_kb(1)
}

#[test]
fn late_messages_change_no_result() {
    let seed = seed();
    at_once(all_cases(), |(algorithm, world, name, call)| {
        let faults = Faults {
            delay: 0.2,
            longest: Duration::from_millis(2),
            ..Faults::none(seed)
        };
        for outcome in outcomes(world, &config(algorithm), |_| faults, call) {
            assert_eq!(
                outcome,
                Ok(true),
                "{algorithm} {name}, {world} ranks, seed {seed}"
            );
        }
    });
}

#[test]
fn no_faults_are_no_faults() {
    for (algorithm, world, name, call) in all_cases() {
        for outcome in outcomes(world, &config(algorithm), |_| Faults::none(1), call) {
            assert_eq!(outcome, Ok(true), "{algorithm} {name}, {world} ranks");
        }
    }
}

#[test]
fn a_lost_message_is_an_error_on_every_rank() {
    let seed = seed();
    at_once(all_cases(), |(algorithm, world, name, call)| {
        // One rank loses all that it sends from some exchange on.
        let odd = seed as usize % world;
        let faults = |rank| Faults {
            drop: if rank == odd { 1.0 } else { 0.0 },
            after: seed / 7 % 2,
            ..Faults::none(seed)
        };
        let config = config(algorithm).with_timeout(Duration::from_millis(500));
        let start = Instant::now();
        for (rank, outcome) in outcomes(world, &config, faults, call)
            .into_iter()
            .enumerate()
        {
            let what = format!(
                "{algorithm} {name} on {rank} of {world}, {odd} loses messages, seed {seed}"
            );
            // Whoever loses messages may have heard from all, and be through.
            if rank == odd && outcome.is_ok() {
                continue;
            }
            let error = outcome.expect_err(&what);
            let cause = match &error {
                Error::Aborted { cause, .. } => cause,
                error => error,
            };
            let typed = matches!(
                cause,
                Error::Timeout { .. }
                    | Error::Mismatch { .. }
                    | Error::Protocol { .. }
                    | Error::PeerFailed { .. }
            );
            assert!(typed && !error.ranks().is_empty(), "{what}: {error}");
        }
        assert!(start.elapsed() < PROMPT, "{:?}", start.elapsed());
    });
}

#[test]
fn a_cut_link_is_an_error_on_every_rank() {
    let seed = seed();
    at_once(all_cases(), |(algorithm, world, name, call)| {
        let odd = seed as usize % world;
        let faults = |rank| Faults {
            cut: if rank == odd { 1.0 } else { 0.0 },
            after: seed / 7 % 2,
            ..Faults::none(seed)
        };
        let start = Instant::now();
        for (rank, outcome) in outcomes(world, &config(algorithm), faults, call)
            .into_iter()
            .enumerate()
        {
            let what =
                format!("{algorithm} {name} on {rank} of {world}, {odd} is cut, seed {seed}");
            let error = outcome.expect_err(&what);
            let typed = matches!(error, Error::PeerFailed { .. } | Error::Aborted { .. });
            assert!(typed, "{what}: {error}");
            assert!(!error.ranks().is_empty(), "{what}: {error}");
        }
        // No deadline was waited for.
        assert!(start.elapsed() < PROMPT, "{:?}", start.elapsed());
    });
}

#[test]
fn corrupt_bytes_are_seen_by_comparing() {
    // In memory nothing checks them: transports that leave the machine carry a checksum.
    let seed = seed();
    // These move no bytes, or bytes that say what comes next, or bits that are rounded away.
    let apart = [
        "barrier",
        "new_group",
        "split",
        "broadcast_object",
        "all_gather_object",
        "reduce of f16",
    ];
    let cases = all_cases().filter(|(_, _, name, _)| !apart.contains(name));
    at_once(cases, |(algorithm, world, name, call)| {
        let faults = Faults {
            corrupt: 1.0,
            ..Faults::none(seed)
        };
        let outcomes = outcomes(world, &config(algorithm), |_| faults, call);
        let what = format!("{algorithm} {name}, {world} ranks, seed {seed}: {outcomes:?}");
        assert!(outcomes.iter().all(Result::is_ok), "{what}");
        assert!(outcomes.contains(&Ok(false)), "{what}");
    });
}

#[test]
fn the_same_seed_gives_the_same_faults() {
    let seed = seed();
    let faults = Faults {
        corrupt: 0.5,
        ..Faults::none(seed)
    };
    let run = || {
        let link = |link| Faulty::new(link, faults);
        let mesh: Vec<_> = Local::mesh(3).into_iter().map(link).collect();
        each_over(mesh, &by(Algorithm::Ring), |mut communicator| {
            let mut buffer = vec![0u64; 300];
            (0..20).for_each(|_| communicator.all_gather_in_place(&mut buffer).unwrap());
            buffer
        })
    };
    let first = run();
    assert_eq!(first, run());
    assert!(
        first.iter().flatten().any(|&x| x != 0),
        "half of 120 messages were hit"
    );
}

#[test]
fn a_planned_call_has_the_algorithm_that_was_asked_for_even_here() {
    let mesh = Local::mesh(2)
        .into_iter()
        .map(|link| Faulty::new(link, Faults::none(1)));
    each_over(mesh, &by(Algorithm::Halving), |mut communicator| {
        assert!(CALLS[0].1(&mut communicator, 3).unwrap());
        let ran: Vec<_> = communicator
            .stats()
            .algorithms(Collective::AllReduce)
            .collect();
        assert_eq!(ran, [Algorithm::Halving]);
    });
}

#[test]
fn no_message_lands_in_the_place_of_a_lost_one() {
    // Before messages were numbered, seed 53 gave two of three ranks of a ring the sum 7.
    for seed in 0..60 {
        for (algorithm, world) in everywhere(&[2, 3, 4]) {
            let lossy = |link: Local| {
                let faults = Faults {
                    drop: 0.1,
                    ..Faults::none(seed)
                };
                Faulty::new(link, faults)
            };
            let mesh = Local::mesh(world).into_iter().map(lossy);
            let config = by(algorithm).with_timeout(Duration::from_millis(50));
            each_over(mesh, &config, |mut communicator| {
                for _ in 0..4 {
                    let mut buffer = vec![communicator.rank() as u32 + 1; 8];
                    if communicator.all_reduce(&mut buffer, ReduceOp::Sum).is_ok() {
                        let sum = (world * (world + 1) / 2) as u32;
                        assert_eq!(buffer, [sum; 8], "{algorithm}, {world} ranks, seed {seed}");
                    }
                }
            });
        }
    }
}

#[test]
fn a_delay_does_not_outlast_the_deadline() {
    let slow = |link| {
        let faults = Faults {
            delay: 1.0,
            longest: Duration::MAX,
            ..Faults::none(3)
        };
        Faulty::new(link, faults)
    };
    let mesh = Local::mesh(2).into_iter().map(slow);
    let config = by(Algorithm::Tree).with_timeout(Duration::from_millis(200));
    let start = Instant::now();
    each_over(mesh, &config, |mut communicator| {
        drop(communicator.all_reduce(&mut [1f32; 4], ReduceOp::Sum));
    });
    assert!(start.elapsed() < PROMPT);
}
