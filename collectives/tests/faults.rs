//! Every fault provoked: each rank gets an error that names the ranks at fault.
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Barrier,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use collectives::{
    Algorithm, Board, Collective, Communicator, CommunicatorConfig, Error, Place, ReduceOp, Result,
    f16,
    transport::{Incoming, Local, Outgoing, Ticket, Transport, Trouble},
};

use crate::{
    calls::CALLS,
    world::{Deed, at_once, by, each_rank, each_with, ends, everywhere},
};

/// More than any prompt error takes, less than a deadline that counts as a hang.
const PROMPT: Duration = Duration::from_secs(8);

fn sum(communicator: &mut Communicator) -> Result<()> {
    communicator.all_reduce(&mut [1.0f32; 10], ReduceOp::Sum)
}

// ---- silence

#[test]
fn a_silent_rank_is_named() {
    at_once(everywhere(&[2, 3, 4]), |(algorithm, world)| {
        for silent in 0..world {
            let (start, end) = (Barrier::new(world), Barrier::new(world));
            let config = by(algorithm).with_timeout(Duration::from_millis(200));
            let errors = each_rank(world, &config, |mut communicator| {
                start.wait();
                let error =
                    (communicator.rank() != silent).then(|| sum(&mut communicator).unwrap_err());
                end.wait();
                error
            });
            let errors: Vec<_> = errors.into_iter().flatten().collect();
            for error in &errors {
                assert_eq!(error.ranks(), [silent], "{algorithm}: {error}");
                let text = error.to_string();
                assert!(text.contains("nothing came within 200ms"), "{text}");
                assert!(
                    text.contains(&format!("rank {silent} has begun 0 collectives")),
                    "{text}"
                );
            }
            assert!(
                errors
                    .iter()
                    .any(|error| matches!(error, Error::Timeout { .. }))
            );
        }
    });
}

#[test]
fn a_barrier_lists_every_rank_that_did_not_come() {
    let (start, end) = (Barrier::new(5), Barrier::new(5));
    let config = by(Algorithm::Tree).with_timeout(Duration::from_millis(200));
    each_rank(5, &config, |mut communicator| {
        communicator.barrier().unwrap();
        start.wait();
        if communicator.rank() % 2 == 0 {
            let error = communicator.barrier().unwrap_err();
            assert_eq!(error.ranks(), [1, 3], "{error}");
            assert!(
                error.to_string().contains("rank 3 has begun 1 collectives"),
                "{error}"
            );
        }
        end.wait();
    });
}

#[test]
fn a_late_rank_is_waited_for() {
    for (algorithm, world) in everywhere(&[2, 3]) {
        each_rank(world, &by(algorithm), |mut communicator| {
            if communicator.rank() == 1 {
                thread::sleep(Duration::from_millis(60));
            }
            sum(&mut communicator).unwrap();
        });
    }
}

#[test]
fn a_rank_that_comes_after_the_deadline_is_told_why_it_cannot_go_on() {
    let end = Barrier::new(2);
    let config = by(Algorithm::Ring).with_timeout(Duration::from_millis(50));
    each_rank(2, &config, |mut communicator| {
        if communicator.rank() == 0 {
            sum(&mut communicator).unwrap_err();
            end.wait();
        } else {
            end.wait();
            let error = sum(&mut communicator).unwrap_err();
            assert!(matches!(error, Error::Aborted { origin: 0, .. }), "{error}");
            assert_eq!(error.ranks(), [1], "{error}");
        }
    });
}

#[test]
fn a_call_may_have_a_deadline_of_its_own() {
    let end = Barrier::new(2);
    each_rank(2, &by(Algorithm::Ring), |mut communicator| {
        let start = Instant::now();
        if communicator.rank() == 0 {
            let error = sum(&mut communicator.within(Duration::from_millis(50))).unwrap_err();
            assert!(matches!(error, Error::Timeout { .. }), "{error}");
            assert!(error.to_string().contains("within 50ms"), "{error}");
            assert!(start.elapsed() >= Duration::from_millis(50));
            assert!(start.elapsed() < PROMPT);
        }
        end.wait();
    });
}

#[test]
fn a_deadline_of_its_own_may_be_longer_and_ends_with_the_call() {
    let end = Barrier::new(2);
    let config = by(Algorithm::Tree).with_timeout(Duration::from_millis(80));
    each_rank(2, &config, |mut communicator| {
        if communicator.rank() == 0 {
            sum(&mut communicator.within(PROMPT)).unwrap();
            let error = sum(&mut communicator).unwrap_err();
            assert!(error.to_string().contains("within 80ms"), "{error}");
        } else {
            thread::sleep(Duration::from_millis(200));
            sum(&mut communicator.within(PROMPT)).unwrap();
        }
        end.wait();
    });
}

#[test]
fn crossing_messages_that_do_not_fit_end_at_the_deadline() {
    let config = by(Algorithm::Ring)
        .with_segment_kb(1)
        .with_timeout(Duration::from_millis(200));
    let errors = each_rank(2, &config, |mut communicator| {
        let other = 1 - communicator.rank();
        communicator.send(other, &[0u8; 10 << 10]).unwrap_err()
    });
    assert!(
        errors
            .iter()
            .any(|error| matches!(error, Error::Timeout { .. })),
        "{errors:?}"
    );
    assert!(
        errors
            .iter()
            .all(|error| error.to_string().contains("send/recv of 10240 x u8"))
    );
}

#[test]
fn a_message_that_nobody_sends_names_the_sender() {
    let end = Barrier::new(3);
    let config = by(Algorithm::Ring).with_timeout(Duration::from_millis(50));
    each_rank(3, &config, |mut communicator| {
        if communicator.rank() == 0 {
            let error = communicator.recv(2, &mut [0u8; 3]).unwrap_err();
            assert!(matches!(error, Error::Timeout { .. }), "{error}");
            assert_eq!(error.ranks(), [2], "{error}");
        }
        end.wait();
    });
}

#[test]
fn every_call_has_a_deadline_and_names_who_is_late() {
    let cases = everywhere(&[2, 3]).flat_map(|(algorithm, world)| {
        CALLS
            .into_iter()
            .map(move |(name, call)| (algorithm, world, name, call))
    });
    at_once(cases, |(algorithm, world, name, call)| {
        // Every call needs all ranks, or the barrier after it does.
        let silent = name.len() % world;
        let end = Barrier::new(world);
        let config = by(algorithm).with_timeout(Duration::from_millis(300));
        let start = Instant::now();
        let errors = each_rank(world, &config, |mut communicator| {
            let outcome = (communicator.rank() != silent)
                .then(|| call(&mut communicator, 6).and_then(|_| communicator.barrier()));
            end.wait();
            outcome.map(Result::unwrap_err)
        });
        let errors: Vec<_> = errors.into_iter().flatten().collect();
        let what = format!("{algorithm} {name}, rank {silent} of {world} is silent: {errors:?}");
        assert!(
            errors.iter().all(|error| error.ranks().contains(&silent)),
            "{what}"
        );
        let timeout = |error: &&Error| matches!(error, Error::Timeout { .. });
        assert!(errors.iter().any(|error| timeout(&error)), "{what}");
        assert!(start.elapsed() < 2 * PROMPT, "{what}");
    });
}

// ---- disagreement

/// What the others call, what the odd rank calls, and what an error says of both.
type Disagreement = (Deed, Deed, [&'static str; 2]);

/// One rank out of step, in every position, by every algorithm: each rank gets an
/// error, at this call or its next, that names the odd one and says both calls.
fn everyone_is_told(cases: &[Disagreement]) {
    let combinations = everywhere(&[2, 4]).flat_map(|(algorithm, world)| {
        cases
            .iter()
            .flat_map(move |case| (0..world).map(move |odd| (algorithm, world, odd, case)))
    });
    at_once(
        combinations,
        |(algorithm, world, odd, (usual, unusual, both))| {
            let config = by(algorithm).with_timeout(Duration::from_secs(1));
            let start = Instant::now();
            let outcomes = each_rank(world, &config, |mut communicator| {
                let deed = if communicator.rank() == odd {
                    unusual
                } else {
                    usual
                };
                deed(&mut communicator).and_then(|()| communicator.barrier())
            });
            assert!(start.elapsed() < PROMPT, "{:?}", start.elapsed());
            for (rank, outcome) in outcomes.into_iter().enumerate() {
                let what =
                    format!("{algorithm}, {both:?}, rank {rank} of {world}, rank {odd} is odd");
                let error = outcome.expect_err(&what);
                let text = error.to_string();
                assert!(
                    both.iter().all(|call| text.contains(call)),
                    "{what}: {text}"
                );
                assert!(error.ranks().contains(&odd), "{what}: {text}");
            }
        },
    );
}

#[test]
fn different_element_types_are_told_to_every_rank() {
    everyone_is_told(&[
        (
            |it| it.broadcast(&mut [0.0f32, 1.0, 2.0, 3.0, 4.0, 5.0], 0),
            |it| it.broadcast(&mut [0i64; 14], 0),
            ["6 x f32", "14 x i64"],
        ),
        (
            |it| it.all_reduce(&mut [1.0f32; 6], ReduceOp::Sum),
            |it| it.all_reduce(&mut [1i32; 6], ReduceOp::Sum),
            ["6 x f32", "6 x i32"],
        ),
    ]);
}

#[test]
fn different_lengths_are_told_to_every_rank() {
    everyone_is_told(&[
        (
            |it| it.all_reduce(&mut [1.0f32; 6], ReduceOp::Sum),
            |it| it.all_reduce(&mut [1.0f32; 12], ReduceOp::Sum),
            ["6 x f32", "12 x f32"],
        ),
        (
            |it| it.all_gather_in_place(&mut [1.0f32; 0]),
            |it| it.all_gather_in_place(&mut [1.0f32; 1]),
            ["0 x f32", "1 x f32"],
        ),
        (
            |it| it.reduce_scatter(&mut [1.0f32; 9], ReduceOp::Sum).map(drop),
            |it| it.reduce_scatter(&mut [1.0f32; 8], ReduceOp::Sum).map(drop),
            ["9 x f32", "8 x f32"],
        ),
    ]);
}

#[test]
fn different_operations_are_told_to_every_rank() {
    everyone_is_told(&[
        (
            |it| it.all_reduce(&mut [1.0f32; 6], ReduceOp::Sum),
            |it| it.all_reduce(&mut [1.0f32; 6], ReduceOp::Max),
            ["6 x f32, sum", "6 x f32, max"],
        ),
        (
            |it| it.reduce(&mut [1.0f32; 6], ReduceOp::Sum, 0),
            |it| it.reduce(&mut [1.0f32; 6], ReduceOp::Mean, 0),
            ["6 x f32, sum", "6 x f32, mean"],
        ),
    ]);
}

#[test]
fn different_roots_are_told_to_every_rank() {
    everyone_is_told(&[
        (
            |it| it.broadcast(&mut [1.0f32; 6], 0),
            |it| it.broadcast(&mut [1.0f32; 6], 1),
            ["root 0", "root 1"],
        ),
        (
            |it| it.reduce(&mut [1.0f32; 6], ReduceOp::Sum, 1),
            |it| it.reduce(&mut [1.0f32; 6], ReduceOp::Sum, 0),
            ["root 0", "root 1"],
        ),
    ]);
}

#[test]
fn different_collectives_are_told_to_every_rank() {
    everyone_is_told(&[
        (
            |it| it.all_reduce(&mut [1.0f32; 6], ReduceOp::Sum),
            |it| it.broadcast(&mut [1.0f32; 6], 0),
            ["#1 all_reduce", "#1 broadcast"],
        ),
        (
            |it| it.all_gather_in_place(&mut [1.0f32; 6]),
            |it| it.reduce_scatter(&mut [1.0f32; 6], ReduceOp::Sum).map(drop),
            ["#1 all_gather", "#1 reduce_scatter"],
        ),
        (
            |it| it.reduce(&mut [1.0f32; 6], ReduceOp::Sum, 0),
            |it| it.barrier(),
            ["#1 reduce", "#1 barrier"],
        ),
    ]);
}

/// Counts that take turns: unlike at every world size, and not those of the next `turn`.
fn counts(it: &Communicator, turn: usize) -> Vec<usize> {
    (0..it.world_size())
        .map(|rank| [1, 3][(rank + turn) % 2])
        .collect()
}

#[test]
fn different_counts_are_told_to_every_rank() {
    const DIFFER: [&str; 2] = ["ranks differ in", "the counts, members or settings"];
    fn all_gather_v(it: &mut Communicator, turn: usize) -> Result<()> {
        let counts = counts(it, turn);
        let mut whole = vec![0u8; counts.iter().sum()];
        it.all_gather_v(&vec![1; counts[it.rank()]], &counts, &mut whole)
    }
    fn reduce_scatter_v(it: &mut Communicator, turn: usize) -> Result<()> {
        let counts = counts(it, turn);
        let mut whole = vec![0u8; counts.iter().sum()];
        it.reduce_scatter_v(&mut whole, &counts, ReduceOp::Sum)
            .map(drop)
    }
    fn gather_v(it: &mut Communicator, turn: usize) -> Result<()> {
        let counts = counts(it, turn);
        let len = if it.rank() == 0 {
            counts.iter().sum()
        } else {
            0
        };
        it.gather_v(&vec![1u8; counts[it.rank()]], &counts, &mut vec![0; len], 0)
    }
    fn scatter_v(it: &mut Communicator, turn: usize) -> Result<()> {
        let counts = counts(it, turn);
        let len = if it.rank() == 0 {
            counts.iter().sum()
        } else {
            0
        };
        it.scatter_v(&vec![1u8; len], &counts, &mut vec![0; counts[it.rank()]], 0)
    }
    everyone_is_told(&[
        (|it| all_gather_v(it, 0), |it| all_gather_v(it, 1), DIFFER),
        (
            |it| reduce_scatter_v(it, 0),
            |it| reduce_scatter_v(it, 1),
            DIFFER,
        ),
        (|it| gather_v(it, 0), |it| gather_v(it, 1), DIFFER),
        (|it| scatter_v(it, 0), |it| scatter_v(it, 1), DIFFER),
        (
            |it| it.all_reduce_coalesced(&mut [&mut [1u8; 3], &mut [1; 5]], ReduceOp::Sum),
            |it| it.all_reduce_coalesced(&mut [&mut [1u8; 5], &mut [1; 3]], ReduceOp::Sum),
            DIFFER,
        ),
        (
            |it| it.all_reduce_coalesced(&mut [&mut [1u8; 3], &mut [1; 5]], ReduceOp::Sum),
            |it| it.all_reduce(&mut [1u8; 8], ReduceOp::Sum),
            DIFFER,
        ),
        // The same parts, by counts and without: two ways to say it are two calls.
        (
            |it| {
                it.reduce_scatter_v(
                    &mut vec![1u8; it.world_size()],
                    &vec![1; it.world_size()],
                    ReduceOp::Sum,
                )
                .map(drop)
            },
            |it| {
                it.reduce_scatter(&mut vec![1u8; it.world_size()], ReduceOp::Sum)
                    .map(drop)
            },
            DIFFER,
        ),
    ]);
}

#[test]
fn different_exchanges_are_told_to_every_rank() {
    everyone_is_told(&[
        (
            |it| it.all_to_all(&vec![1u8; it.world_size()], &mut vec![0; it.world_size()]),
            |it| {
                it.all_to_all(
                    &vec![1u8; 2 * it.world_size()],
                    &mut vec![0; 2 * it.world_size()],
                )
            },
            ["the length", "#1 all_to_all"],
        ),
        (
            |it| it.all_to_all(&vec![1u8; it.world_size()], &mut vec![0; it.world_size()]),
            |it| it.all_to_all(&vec![1i64; it.world_size()], &mut vec![0; it.world_size()]),
            ["x u8", "x i64"],
        ),
        (
            |it| gather_to(it, 0),
            |it| gather_to(it, 1),
            ["root 0", "root 1"],
        ),
        (
            |it| it.all_reduce(&mut [1u8; 4], ReduceOp::Or),
            |it| it.all_reduce_with(&mut [1u8; 4], |a, b| a | b),
            ["4 x u8, or", "4 x u8, the caller's operator"],
        ),
        (
            |it| gather_to(it, 0),
            |it| it.barrier(),
            ["#1 gather", "#1 barrier"],
        ),
        (
            |it| it.split(None, 0).map(drop),
            |it| it.new_group(&[0]).map(drop),
            ["#1 all_gather", "#1 split"],
        ),
        (
            |it| it.broadcast_object(Some(1u8), 0).map(drop),
            |it| it.all_gather_object(&1u8).map(drop),
            ["#1 broadcast of 1 x u64", "#1 all_gather of"],
        ),
    ]);
}

fn gather_to(it: &mut Communicator, root: usize) -> Result<()> {
    let len = if it.rank() == root {
        it.world_size()
    } else {
        0
    };
    it.gather(&[1u8], &mut vec![0; len], root)
}

#[test]
fn a_message_in_place_of_a_collective_is_told_to_every_rank() {
    for &algorithm in Algorithm::ALL {
        let errors = each_rank(2, &by(algorithm), |mut communicator| {
            let outcome = match communicator.rank() {
                0 => sum(&mut communicator),
                _ => communicator.send(0, &[1.0f32; 10]),
            };
            outcome.and_then(|()| communicator.barrier()).unwrap_err()
        });
        for error in errors {
            assert_eq!(error.ranks(), [0, 1], "{error}");
            // By ring rank 1 may hear of it first, in the barrier after its message.
            let text = error.to_string();
            let theirs = ["send/recv of 10 x f32", "#1 barrier"];
            assert!(text.contains("#1 all_reduce"), "{text}");
            assert!(theirs.iter().any(|call| text.contains(call)), "{text}");
        }
    }
}

#[test]
fn messages_of_other_lengths_are_not_landed() {
    each_rank(2, &by(Algorithm::Ring), |mut communicator| {
        if communicator.rank() == 0 {
            communicator.send(1, &[7u8; 4]).unwrap();
            communicator.barrier().unwrap_err();
        } else {
            let mut buffer = [0u8; 5];
            let error = communicator.recv(0, &mut buffer).unwrap_err();
            assert!(error.to_string().contains("the length"), "{error}");
            assert_eq!(buffer, [0; 5]);
        }
    });
}

#[test]
fn ranks_with_other_settings_are_told() {
    let plain = || by(Algorithm::Ring).with_timeout(Duration::from_secs(1));
    let mut cases = vec![];
    for world in [2, 4] {
        for odd in 0..world {
            cases.push((
                world,
                odd,
                plain().with_segment_kb(64),
                "in segments of 16384",
            ));
            cases.push((
                world,
                odd,
                plain().with_algorithm(Algorithm::Tree),
                "by tree",
            ));
            cases.push((
                world,
                odd,
                plain().with_algorithm(Algorithm::Naive),
                "by naive",
            ));
        }
    }
    at_once(cases, |(world, odd, config, said)| {
        let mut configs = vec![plain(); world];
        configs[odd] = config;
        let start = Instant::now();
        let errors = each_with(&configs, |mut communicator| {
            sum(&mut communicator)
                .and_then(|()| communicator.barrier())
                .unwrap_err()
        });
        assert!(start.elapsed() < PROMPT);
        for error in errors {
            let text = error.to_string();
            assert!(
                text.contains(said) && text.contains("by ring in segments of 65536"),
                "{text}"
            );
            assert!(error.ranks().contains(&odd), "{text}");
        }
    });
}

#[test]
fn ranks_with_other_orders_of_the_sum_are_told_before_they_have_a_wrong_one() {
    const SAID: &str = "differ in the counts, members or settings";
    let cases = everywhere(&[2, 3, 4]).flat_map(|(algorithm, world)| {
        (0..world).flat_map(move |odd| {
            [
                (algorithm, world, odd, true),
                (algorithm, world, odd, false),
            ]
        })
    });
    at_once(cases, |(algorithm, world, odd, order)| {
        let plain = by(algorithm).with_timeout(Duration::from_secs(2));
        let mut configs = vec![plain.clone(); world];
        configs[odd] = match order {
            true => plain.with_deterministic(true),
            false => plain.with_direct_piece(4096),
        };
        let outcomes = each_with(&configs, |mut communicator| {
            // With this root a rank takes another's addend for the sum, or waits.
            let (rank, mut buffer) = (communicator.rank(), [1u8]);
            let outcome = communicator.reduce(&mut buffer, ReduceOp::Sum, 1);
            assert!(outcome.is_err() || rank != 1 || buffer == [world as u8]);
            outcome.and_then(|()| communicator.barrier()).unwrap_err()
        });
        for error in outcomes {
            let text = error.to_string();
            let shown = text.contains(SAID) || text.contains("differ in the algorithm");
            assert!(shown && error.ranks().contains(&odd), "{algorithm}: {text}");
        }
    });
}

#[test]
fn ranks_that_part_without_a_message_are_told_in_the_next_call() {
    // The tree's messages of a broadcast from elsewhere lie on links that the ring
    // does not read.
    let config = by(Algorithm::Ring)
        .with_algorithm_for(Collective::Broadcast, Algorithm::Tree)
        .with_timeout(Duration::from_secs(2));
    for (odd, root) in [(1, 1), (3, 3), (2, 3), (1, 2)] {
        let errors = each_rank(4, &config, |mut communicator| {
            let root = if communicator.rank() == odd { root } else { 0 };
            let outcome = communicator.broadcast(&mut [1.0f32; 6], root);
            outcome.and_then(|()| sum(&mut communicator)).unwrap_err()
        });
        for error in errors {
            let text = error.to_string();
            assert!(error.ranks().contains(&odd), "{text}");
            let both = ["root 0".to_owned(), format!("root {root}")];
            assert!(both.iter().all(|said| text.contains(said)), "{text}");
        }
    }
}

#[test]
fn the_calls_before_a_disagreement_are_not_blamed() {
    each_rank(3, &by(Algorithm::Tree), |mut communicator| {
        for _ in 0..100 {
            sum(&mut communicator).unwrap();
        }
        let len = 10 + usize::from(communicator.rank() == 2);
        let outcome = communicator.all_reduce(&mut vec![1.0f32; len], ReduceOp::Sum);
        let error = outcome.and_then(|()| communicator.barrier()).unwrap_err();
        assert!(
            error.to_string().contains("#101 all_reduce of 11 x f32"),
            "{error}"
        );
    });
}

// ---- a caller's mistake

#[test]
fn a_mistake_on_one_rank_stops_all() {
    let cases: [(Deed, &str); 38] = [
        (
            |it| it.broadcast(&mut [1.0f32; 10], 4),
            "no rank 4 to be the root",
        ),
        (
            |it| it.reduce(&mut [1.0f32; 10], ReduceOp::Sum, 9),
            "ranks are 0 to 3",
        ),
        (
            |it| it.all_gather(&[1.0f32; 9], &mut [1.0f32; 10]),
            "the part of this rank is 9 elements long; 2 are due",
        ),
        (
            |it| it.all_reduce(&mut [1u32; 10], ReduceOp::Mean),
            "no mean of u32",
        ),
        (
            |it| it.all_reduce(&mut [f16::ONE; 10], ReduceOp::Xor),
            "no xor of f16: only integers have bits",
        ),
        (
            |it| it.all_reduce_coalesced(&mut [&mut [1u8], &mut []], ReduceOp::Mean),
            "no mean of u8",
        ),
        (
            |it| it.all_gather_v(&[1u8; 2], &[2, 2, 2], &mut [0; 8]),
            "3 counts for 4 ranks",
        ),
        (
            |it| it.all_gather_v(&[1u8; 2], &[2; 4], &mut [0; 7]),
            "the whole buffer is 7 elements long; 8 are due",
        ),
        (
            |it| it.all_gather_v(&[1u8; 3], &[2; 4], &mut [0; 8]),
            "the part of this rank is 3 elements long; 2 are due",
        ),
        (
            |it| it.all_gather_v(&[1u8; 2], &[usize::MAX, 2, 2, 2], &mut [0; 5]),
            "the whole buffer is 5 elements long",
        ),
        (
            |it| {
                it.reduce_scatter_v(&mut [1u8; 8], &[8], ReduceOp::Sum)
                    .map(drop)
            },
            "1 counts for 4 ranks",
        ),
        (
            |it| {
                it.reduce_scatter_v(&mut [1u8; 9], &[2; 4], ReduceOp::Sum)
                    .map(drop)
            },
            "the whole buffer is 9 elements long; 8 are due",
        ),
        (
            |it| {
                it.reduce_scatter_v(&mut [1u8; 8], &[2; 4], ReduceOp::Mean)
                    .map(drop)
            },
            "no mean of u8",
        ),
        (
            |it| it.gather(&[1u8; 2], &mut [0; 8], 4),
            "no rank 4 to be the root",
        ),
        (
            |it| it.gather(&[1u8; 2], &mut [0; 7], 2),
            "the whole, which only the root has, is 7 elements long; 8 are due",
        ),
        (
            |it| it.gather(&[1u8; 2], &mut [0; 8], 0),
            "the whole, which only the root has, is 8 elements long; 0 are due",
        ),
        (
            |it| it.gather_v(&[1u8; 2], &[2; 5], &mut [], 0),
            "5 counts for 4 ranks",
        ),
        (
            |it| it.gather_v(&[1u8; 3], &[2; 4], &mut [], 0),
            "the part of this rank is 3 elements long; 2 are due",
        ),
        (
            |it| it.gather_v(&[1u8; 2], &[2, usize::MAX, 2, 2], &mut [0; 8], 2),
            "the part of this rank is 2 elements long; 0 are due",
        ),
        (
            |it| it.gather_v(&[1u8; 2], &[2; 4], &mut [], 17),
            "no rank 17 to be the root",
        ),
        (
            |it| it.scatter(&[0u8; 8], &mut [1; 2], 4),
            "no rank 4 to be the root",
        ),
        (
            |it| it.scatter(&[0u8; 8], &mut [1; 3], 2),
            "the whole, which only the root has, is 8 elements long; 12 are due",
        ),
        (
            |it| it.scatter(&[0u8; 8], &mut [1; 2], 1),
            "is 8 elements long; 0 are due",
        ),
        (
            |it| it.scatter_v(&[], &[2; 3], &mut [0u8; 2], 0),
            "3 counts for 4 ranks",
        ),
        (
            |it| it.scatter_v(&[], &[2; 4], &mut [0u8; 1], 0),
            "the part of this rank is 1 elements long; 2 are due",
        ),
        (
            |it| it.all_to_all(&[1u8; 8], &mut [0; 4]),
            "what is taken is 4 elements long; 8 are due",
        ),
        (
            |it| it.all_to_all(&[1u8; 7], &mut [0; 7]),
            "7 elements do not cut into 4 equal parts",
        ),
        (
            |it| it.all_to_all_v(&[1u8; 4], &[1; 3], &mut [0; 4], &[1; 4]),
            "3 counts for 4 ranks",
        ),
        (
            |it| it.all_to_all_v(&[1u8; 4], &[1; 4], &mut [0; 4], &[2; 4]),
            "is 4 elements long; 8 are due",
        ),
        (
            |it| it.all_to_all_v(&[1u8; 4], &[1; 4], &mut [0; 5], &[1, 1, 2, 1]),
            "what this rank takes from itself is 2 elements long; 1 are due",
        ),
        (|it| it.send(it.rank(), &[1u8]), "to speak to"),
        (|it| it.recv(4, &mut [1u8]), "no rank 4 to speak to"),
        (
            |it| it.sendrecv(2, &[1u8], 1, &mut [0u8]),
            "no rank 2 to speak to: ranks are 0 to 3, and this one is 2",
        ),
        (
            |it| it.sendrecv(1, &[1u8], 4, &mut [0u8]),
            "no rank 4 to speak to",
        ),
        (
            |it| it.broadcast_object::<u8>(None, 2).map(drop),
            "this rank's object cannot be sent: it gives none",
        ),
        (
            |it| it.broadcast_object(Some(1u8), 4).map(drop),
            "no rank 4 to be the root",
        ),
        (|it| it.new_group(&[]).map(drop), "at least one rank"),
        (
            |it| it.new_group(&[4]).map(drop),
            "no rank 4 to be in a group",
        ),
    ];
    for (deed, said) in cases {
        for &algorithm in Algorithm::ALL {
            let start = Instant::now();
            let errors = each_rank(4, &by(algorithm), |mut communicator| {
                match communicator.rank() {
                    2 => deed(&mut communicator).unwrap_err(),
                    _ => sum(&mut communicator).unwrap_err(),
                }
            });
            assert!(matches!(errors[2], Error::Argument { .. }), "{}", errors[2]);
            for error in errors {
                assert_eq!(error.ranks(), [2], "{error}");
                assert!(error.to_string().contains(said), "{error}");
            }
            assert!(start.elapsed() < PROMPT);
        }
    }
}

// ---- ranks that go

#[test]
fn a_rank_that_panics_is_named_by_all_that_live() {
    for &algorithm in Algorithm::ALL {
        for dead in [&[1][..], &[0], &[3], &[1, 2, 3]] {
            let start = Instant::now();
            let ends = ends(&vec![by(algorithm); 4], |mut communicator| {
                sum(&mut communicator).unwrap();
                assert!(!dead.contains(&communicator.rank()), "this rank panics");
                sum(&mut communicator).unwrap_err()
            });
            for (rank, end) in ends.into_iter().enumerate() {
                assert_eq!(end.is_err(), dead.contains(&rank));
                if let Ok(error) = end {
                    let named = error.ranks();
                    assert!(named.len() == 1 && dead.contains(&named[0]), "{error}");
                    assert!(error.to_string().contains("panicked"), "{error}");
                }
            }
            assert!(start.elapsed() < PROMPT);
        }
    }
}

#[test]
fn clean_up_during_a_panic_fails_at_once() {
    struct CleanUp(Communicator, Sender<Result<()>>);
    impl Drop for CleanUp {
        fn drop(&mut self) {
            let outcome = self.0.barrier();
            drop(self.1.send(outcome));
        }
    }
    for (algorithm, world) in everywhere(&[2, 4]) {
        let (said, outcomes) = channel();
        let start = Instant::now();
        let ends = ends(&vec![by(algorithm); world], |mut communicator| {
            sum(&mut communicator).unwrap();
            if communicator.rank() == 1 {
                let _clean_up = CleanUp(communicator, said.clone());
                panic!("the first cause");
            }
            sum(&mut communicator).unwrap_err()
        });
        let error = outcomes.recv().unwrap().unwrap_err();
        assert_eq!(error.ranks(), [1], "{error}");
        for (rank, end) in ends.into_iter().enumerate() {
            match end {
                Ok(error) => assert_eq!(error.ranks(), [1], "{error}"),
                Err(said) => assert_eq!((rank, &*said), (1, "rank 1 panicked: the first cause")),
            }
        }
        assert!(start.elapsed() < PROMPT);
    }
}

#[test]
fn a_rank_that_ends_early_is_named_with_what_it_did() {
    for (algorithm, world) in everywhere(&[2, 3, 4]) {
        for (batches, others) in [(2, 3), (0, 5), (4, 5)] {
            let start = Instant::now();
            let outcomes = each_rank(world, &by(algorithm), |mut communicator| {
                let mine = if communicator.rank() == world - 1 {
                    batches
                } else {
                    others
                };
                (0..mine).try_for_each(|_| sum(&mut communicator))
            });
            for (rank, outcome) in outcomes.into_iter().enumerate() {
                if rank == world - 1 {
                    outcome.unwrap();
                    continue;
                }
                let error = outcome.unwrap_err();
                assert_eq!(error.ranks(), [world - 1], "{algorithm}: {error}");
                let text = error.to_string();
                assert!(
                    text.contains(&format!("has left after {batches} collectives")),
                    "{text}"
                );
            }
            assert!(start.elapsed() < PROMPT);
        }
    }
}

#[test]
fn a_rank_that_leaves_when_all_is_done_disturbs_nobody() {
    for (algorithm, world) in everywhere(&[2, 4]) {
        for _ in 0..50 {
            each_rank(world, &by(algorithm), |mut communicator| {
                // The root of a broadcast is through long before the last leaf.
                communicator.broadcast(&mut [1.0f32; 1000], 0).unwrap();
            });
        }
    }
}

#[test]
fn a_rank_that_gives_up_says_why_to_all() {
    for (algorithm, world) in everywhere(&[1, 2, 4]) {
        for quitter in 0..world {
            let start = Instant::now();
            let errors = each_rank(world, &by(algorithm), |mut communicator| {
                sum(&mut communicator).unwrap();
                match communicator.rank() == quitter {
                    true => communicator.abort("the loss is not a number"),
                    false => sum(&mut communicator).unwrap_err(),
                }
            });
            for error in errors {
                assert_eq!(error.ranks(), [quitter], "{error}");
                let said = format!("rank {quitter} of {world} gave up: the loss is not a number");
                assert!(error.to_string().contains(&said), "{error}");
            }
            assert!(start.elapsed() < PROMPT);
        }
    }
}

/// A link that, once closed, holds its rank back until the other rank has seen it.
struct Lingering {
    link: Option<Local>,
    seen: Receiver<()>,
}

impl Lingering {
    /// Rank 0 lingers until rank 1, which gets its error, says that it has seen it.
    fn pair() -> (Self, Local, Sender<()>) {
        let (saw, seen) = channel();
        let mut mesh = Local::mesh(2);
        let other = mesh.pop().unwrap();
        let link = mesh.pop();
        (Self { link, seen }, other, saw)
    }

    fn linger(&self) {
        // The other rank drops its end when it needs no more of this.
        let _ = self.seen.recv_timeout(PROMPT);
    }
}

impl Transport for Lingering {
    fn place(&self) -> Place {
        self.link.as_ref().unwrap().place()
    }

    fn board(&self) -> &Arc<Board> {
        self.link.as_ref().unwrap().board()
    }

    fn exchange(
        &mut self,
        ticket: &Ticket,
        send: Option<Outgoing<'_>>,
        recv: Option<Incoming<'_>>,
    ) -> std::result::Result<(), Trouble> {
        self.link.as_mut().unwrap().exchange(ticket, send, recv)
    }

    fn split(
        &mut self,
        id: u64,
        members: &[usize],
    ) -> std::result::Result<Box<dyn Transport>, Trouble> {
        self.link.as_mut().unwrap().split(id, members)
    }

    fn close(&mut self) {
        self.link.as_mut().unwrap().close();
        self.linger();
    }
}

impl Drop for Lingering {
    fn drop(&mut self) {
        drop(self.link.take());
        self.linger();
    }
}

/// What rank 1 is told while rank 0 is still closing its links after `deed`.
fn told_while_closing(deed: impl FnOnce(Communicator) + Send) -> Error {
    let (lingering, other, saw) = Lingering::pair();
    let config = by(Algorithm::Tree);
    let first = Communicator::new(lingering, &config).unwrap();
    let mut second = Communicator::new(other, &config).unwrap();
    thread::scope(|scope| {
        scope.spawn(move || deed(first));
        // In a collective or before it: the reason must be there either way.
        let error = sum(&mut second).unwrap_err();
        drop(saw);
        error
    })
}

#[test]
fn the_reason_is_known_before_a_link_closes() {
    let error = told_while_closing(|mut first| drop(first.abort("the reason")));
    assert!(error.to_string().contains("gave up: the reason"), "{error}");
    let error = told_while_closing(drop);
    assert!(
        error
            .to_string()
            .contains("rank 0 has left after 0 collectives"),
        "{error}"
    );
}

// ---- afterwards

#[test]
fn after_an_error_every_call_returns_the_same() {
    let calls: [Deed; 20] = [
        |it| it.all_reduce_with(&mut [1u8], |a, _| a),
        |it| it.all_reduce_coalesced(&mut [&mut [1u8]], ReduceOp::Sum),
        |it| it.all_gather_v(&[1u8], &[1; 9], &mut []),
        |it| {
            it.reduce_scatter_v(&mut [1u8], &[1; 9], ReduceOp::Sum)
                .map(drop)
        },
        |it| it.gather(&[1u8], &mut [], 0),
        |it| it.scatter(&[], &mut [1u8], 0),
        |it| it.all_to_all(&[1u8; 4], &mut [0; 4]),
        |it| it.sendrecv(0, &[1u8], 0, &mut [1u8]),
        |it| it.broadcast_object(Some(1u8), 0).map(drop),
        |it| it.new_group(&[0]).map(drop),
        |it| it.split(None, 0).map(drop),
        sum,
        |it| it.reduce(&mut [1.0f32], ReduceOp::Sum, 0),
        |it| it.broadcast(&mut [1i32], 0),
        |it| it.broadcast(&mut [1i32], 99),
        |it| it.all_gather(&[0u8; 7], &mut [0u8; 3]),
        |it| it.reduce_scatter(&mut [1.0f64], ReduceOp::Mean).map(drop),
        |it| it.barrier(),
        |it| it.send(0, &[1u8]),
        |it| it.recv(1, &mut [1u8]),
    ];
    for (algorithm, world) in everywhere(&[2, 4]) {
        let config = by(algorithm).with_timeout(Duration::from_secs(2));
        each_rank(world, &config, |mut communicator| {
            let len = 10 + usize::from(communicator.rank() == 1);
            let outcome = communicator.all_reduce(&mut vec![1.0f32; len], ReduceOp::Sum);
            let first = outcome.and_then(|()| communicator.barrier()).unwrap_err();
            let before = communicator.stats().clone();
            for call in calls {
                assert_eq!(call(&mut communicator), Err(first.clone()));
            }
            assert_eq!(communicator.abort("too late"), first);
            assert_eq!(communicator.stats(), &before);
        });
    }
}

#[test]
fn errors_are_plain_values() {
    fn plain<E: std::error::Error + Clone + PartialEq + Send + Sync + 'static>(_: &E) {}
    let config = CommunicatorConfig::new();
    each_rank(1, &config, |mut communicator| {
        let error = communicator.broadcast(&mut [1u8], 1).unwrap_err();
        plain(&error);
        assert_eq!(
            error.to_string(),
            "rank 0 of 1 in #1 broadcast of 1 x u8, root 1: no rank 1 to be the root: ranks are 0 to 0"
        );
        assert!(!error.is_secondary());
    });
}

#[test]
fn an_operator_that_panics_wakes_the_others_even_if_the_panic_is_caught() {
    for (algorithm, world) in everywhere(&[2, 3, 4]) {
        let start = Instant::now();
        let errors = each_rank(world, &by(algorithm), |mut communicator| {
            let call = catch_unwind(AssertUnwindSafe(|| {
                // Every rank folds somewhere; whoever does is at fault.
                communicator.all_reduce_with(&mut [1u32; 64], |_, _| panic!("no such sum"))
            }));
            (call.is_err(), communicator.barrier().unwrap_err())
        });
        assert!(errors.iter().any(|(panicked, _)| *panicked));
        for (rank, (panicked, error)) in errors.iter().enumerate() {
            assert!(error.to_string().contains("panicked"), "{error}");
            match panicked {
                true => assert_eq!(error.ranks(), [rank], "{error}"),
                false => assert!(error.ranks().iter().all(|&rank| errors[rank].0), "{error}"),
            }
        }
        assert!(start.elapsed() < PROMPT);
    }
}
