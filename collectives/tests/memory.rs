//! Memory and threads: what a call takes it gives back.
use std::{
    fs, thread,
    time::{Duration, Instant},
};

use collectives::{Algorithm, CommStream, Communicator, ReduceOp, bf16, f16};

use crate::{
    calls::CALLS,
    world::{Number, alone, by, each_rank, everywhere, resident, soak, threads},
};

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
fn calls_of_every_kind_keep_nothing() {
    alone("memory::calls_of_every_kind_keep_nothing", || {
        // Of 25 kinds: 10,000 calls in the end.
        let rounds = if soak() { 400 } else { 60 };
        for &algorithm in Algorithm::ALL {
            let config = by(algorithm).with_segment_kb(1);
            let grown = each_rank(3, &config, |mut communicator| {
                let mut start = 0;
                for round in 0..rounds {
                    if round == rounds / 4 {
                        start = resident();
                    }
                    for (name, call) in CALLS {
                        assert!(call(&mut communicator, 1000 - round).unwrap(), "{name}");
                    }
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
        // These two then go another way.
        let swaps = matches!(algorithm, Algorithm::Ring | Algorithm::Halving);
        for deterministic in [false, true].into_iter().filter(|&it| swaps || !it) {
            let config = by(algorithm)
                .with_segment_kb(1)
                .with_deterministic(deterministic);
            each_rank(world, &config, |mut communicator| {
                // One message; as many as may be under way; more than that.
                for len in [0, 1_000, 8_000] {
                    no_allocations::<f32>(&mut communicator, len);
                    no_allocations::<f16>(&mut communicator, len);
                }
            });
        }
    }
}

#[test]
fn what_moves_parts_allocates_nothing_once_warm() {
    for world in [1, 2, 3, 4] {
        let config = by(Algorithm::Direct).with_segment_kb(1);
        each_rank(world, &config, |mut communicator| {
            for len in [0, 100, 5_000] {
                no_allocations_apart::<f64>(&mut communicator, len);
                no_allocations_apart::<bf16>(&mut communicator, len);
            }
        });
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

fn no_allocations<T: Number>(communicator: &mut Communicator, len: usize) {
    let mut buffer = vec![T::of(1); len];
    let (world, root) = (communicator.world_size(), len % communicator.world_size());
    let mut counts = vec![0; world];
    counts[root] = len;
    let mut calls = || {
        // A sum is wide where a largest is not.
        for op in [ReduceOp::Sum, ReduceOp::Max] {
            communicator.all_reduce(&mut buffer, op).unwrap();
            communicator.reduce(&mut buffer, op, root).unwrap();
            communicator.reduce_scatter(&mut buffer, op).unwrap();
            let (left, right) = buffer.split_at_mut(len / 3);
            communicator
                .all_reduce_coalesced(&mut [left, right], op)
                .unwrap();
            communicator
                .reduce_scatter_v(&mut buffer, &counts, op)
                .unwrap();
        }
        communicator.all_reduce_with(&mut buffer, |a, _| a).unwrap();
        communicator.broadcast(&mut buffer, root).unwrap();
        communicator.all_gather_in_place(&mut buffer).unwrap();
        communicator.barrier().unwrap();
    };
    let least = least_allocations(&mut calls);
    assert_eq!(least, 0, "{len} x {}", T::DTYPE);
}

fn no_allocations_apart<T: Number>(communicator: &mut Communicator, len: usize) {
    let (place, root) = (communicator.place(), len % communicator.world_size());
    let world = place.world;
    let (part, mut back) = (vec![T::of(1); len], vec![T::of(0); len]);
    let (give, mut whole) = (vec![T::of(1); len * world], vec![T::of(0); len * world]);
    let counts = vec![len; world];
    let at_root = if place.rank == root { len * world } else { 0 };
    let mut calls = || {
        let whole = &mut whole;
        let it = &mut *communicator;
        it.all_gather(&part, whole).unwrap();
        it.all_gather_v(&part, &counts, whole).unwrap();
        it.gather(&part, &mut whole[..at_root], root).unwrap();
        it.gather_v(&part, &counts, &mut whole[..at_root], root)
            .unwrap();
        it.scatter(&give[..at_root], &mut back, root).unwrap();
        it.scatter_v(&give[..at_root], &counts, &mut back, root)
            .unwrap();
        it.all_to_all(&give, whole).unwrap();
        it.all_to_all_v(&give, &counts, whole, &counts).unwrap();
        if world > 1 {
            it.sendrecv(place.up(1), &part, place.down(1), &mut back)
                .unwrap();
        }
    };
    let least = least_allocations(&mut calls);
    assert_eq!(least, 0, "{len} x {}", T::DTYPE);
}

/// The fewest allocations of this thread in one of ten rounds: a channel allocates
/// when it is first waited for, a buffer when it is first needed, whenever that is.
fn least_allocations(mut round: impl FnMut()) -> u64 {
    let counts = [(); 10].map(|()| allocation_counter::measure(&mut round).count_total);
    counts.into_iter().min().unwrap()
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}
