//! Memory and threads: what a call takes it gives back.
use std::{
    fs, thread,
    time::{Duration, Instant},
};

use collectives::{Algorithm, CommStream, Communicator, Element, ReduceOp};

use crate::world::{alone, by, each_rank, everywhere, soak};

/// What the trial allows a process to grow by.
const ALLOWED: usize = 5 << 20;

#[test]
fn calls_of_changing_size_keep_nothing() {
    alone("memory::calls_of_changing_size_keep_nothing", || {
        let rounds = if soak() { 10_000 } else { 2_000 };
        for &algorithm in Algorithm::ALL {
            let grown = each_rank(2, &by(algorithm), |mut communicator| {
                let mut buffer = vec![1.0f32; 30_000];
                let mut start = 0;
                for round in 0..rounds {
                    if round == rounds / 10 {
                        start = resident();
                    }
                    communicator
                        .all_reduce(&mut buffer[round..], ReduceOp::Max)
                        .unwrap();
                }
                resident().saturating_sub(start)
            });
            assert!(grown[0] < ALLOWED, "{algorithm}: {} bytes", grown[0]);
        }
    });
}

#[test]
fn work_that_was_waited_for_keeps_nothing() {
    alone("memory::work_that_was_waited_for_keeps_nothing", || {
        let rounds = if soak() { 10_000 } else { 2_000 };
        for &algorithm in Algorithm::ALL {
            let grown = each_rank(2, &by(algorithm), |communicator| {
                let stream = CommStream::new(communicator).unwrap();
                let mut buffer = vec![1.0f32; 30_000];
                let mut start = 0;
                for round in 0..rounds {
                    if round == rounds / 10 {
                        start = resident();
                    }
                    buffer = stream.all_reduce(buffer, ReduceOp::Max).wait().unwrap();
                }
                resident().saturating_sub(start)
            });
            assert!(grown[0] < ALLOWED, "{algorithm}: {} bytes", grown[0]);
        }
    });
}

#[test]
fn worlds_made_and_dropped_leave_no_thread_and_no_memory() {
    alone(
        "memory::worlds_made_and_dropped_leave_no_thread_and_no_memory",
        || {
            let before = (threads(), descriptors());
            let mut start = 0;
            for round in 0..1_000 {
                if round == 100 {
                    start = resident();
                }
                each_rank(2, &by(Algorithm::Ring), |mut communicator| {
                    communicator
                        .all_reduce(&mut [1.0f32; 100], ReduceOp::Sum)
                        .unwrap();
                    if communicator.rank() == 0 {
                        // With a thread of its own, in every second rank.
                        CommStream::new(communicator).unwrap();
                    }
                });
            }
            let grown = resident().saturating_sub(start);
            assert!(grown < ALLOWED, "{grown} bytes");
            // The system takes a moment to clear away a thread that has been joined.
            let start = Instant::now();
            while (threads(), descriptors()) != before {
                assert!(
                    start.elapsed() < Duration::from_secs(5),
                    "{} threads",
                    threads()
                );
                thread::yield_now();
            }
        },
    );
}

#[test]
fn nothing_is_allocated_once_warm() {
    for (algorithm, world) in everywhere(&[1, 2, 3, 4]) {
        each_rank(
            world,
            &by(algorithm).with_segment_kb(1),
            |mut communicator| {
                // One message; as many as may be under way; more than that.
                for len in [0, 100, 1_000, 20_000] {
                    no_allocations::<f32>(&mut communicator, len);
                    no_allocations::<i64>(&mut communicator, len);
                }
            },
        );
    }
}

#[test]
fn buffers_find_their_way_back_when_all_traffic_goes_one_way() {
    each_rank(
        2,
        &by(Algorithm::Tree).with_segment_kb(1),
        |mut communicator| {
            let mut buffer = vec![1.0f64; 10_000];
            let mut one_way = |rounds| {
                for _ in 0..rounds {
                    match communicator.rank() {
                        0 => communicator.send(1, &buffer).unwrap(),
                        _ => communicator.recv(0, &mut buffer).unwrap(),
                    }
                    communicator.broadcast(&mut buffer, 0).unwrap();
                    communicator.barrier().unwrap();
                }
            };
            assert_eq!(least_allocations(|| one_way(20)), 0);
        },
    );
}

fn no_allocations<T: Element + From<u8>>(communicator: &mut Communicator, len: usize) {
    let mut buffer = vec![T::from(1); len];
    let root = len % communicator.world_size();
    let mut calls = |rounds| {
        for _ in 0..rounds {
            communicator.all_reduce(&mut buffer, ReduceOp::Max).unwrap();
            communicator
                .reduce(&mut buffer, ReduceOp::Max, root)
                .unwrap();
            communicator.broadcast(&mut buffer, root).unwrap();
            communicator.all_gather_in_place(&mut buffer).unwrap();
            communicator
                .reduce_scatter(&mut buffer, ReduceOp::Max)
                .unwrap();
            communicator.barrier().unwrap();
        }
    };
    let least = least_allocations(|| calls(10));
    assert_eq!(least, 0, "{len} x {}", T::DTYPE);
}

/// The fewest allocations of this thread in one of ten rounds: a channel allocates
/// when it is first waited for, a buffer when it is first needed, whenever that is.
fn least_allocations(mut round: impl FnMut()) -> u64 {
    let counts = [(); 10].map(|()| allocation_counter::measure(&mut round).count_total);
    counts.into_iter().min().unwrap()
}

/// Bytes of this process that are in memory.
fn resident() -> usize {
    const PAGE: usize = 4096;
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * PAGE
}

fn threads() -> usize {
    fs::read_dir("/proc/self/task").unwrap().count()
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}
