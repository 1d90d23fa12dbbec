//! Parts between two buffers, and single messages: each byte where it belongs.
use std::{
    sync::{Mutex, mpsc::channel},
    time::Duration,
};

use collectives::{
    Algorithm, Collective, Communicator, Error, Place, ReduceOp, bf16, f16, transport::Counts,
};

use crate::{
    calls::CALLS,
    world::{Number, bits, by, each_rank, everywhere},
};

const WORLDS: [usize; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

#[test]
fn every_call_is_right_at_every_size() {
    for (algorithm, world) in everywhere(&WORLDS) {
        for segment_kb in [1, 128] {
            let config = by(algorithm).with_segment_kb(segment_kb);
            each_rank(world, &config, |mut communicator| {
                for (name, call) in CALLS {
                    // A single rank has nobody to speak to.
                    let alone = world == 1 && name == "sendrecv";
                    for len in [0, 1, 7, 600].into_iter().filter(|_| !alone) {
                        let right = call(&mut communicator, len).unwrap();
                        assert!(right, "{algorithm} {name} of {len} among {world}");
                    }
                }
            });
        }
    }
}

/// Ways to share out `len` elements: all to one, none to some, as it comes.
fn shares(world: usize) -> Vec<Vec<usize>> {
    let share = |of: fn(usize, usize) -> usize| (0..world).map(|rank| of(rank, world)).collect();
    vec![
        share(|_, _| 0),
        share(|_, _| 3),
        share(|rank, _| rank),
        share(|rank, world| world - rank),
        share(|rank, _| if rank == 0 { 11 } else { 0 }),
        share(|rank, world| if rank + 1 == world { 700 } else { 0 }),
        share(|rank, _| [5, 7][rank % 2]),
    ]
}

/// Element `index` of what rank `rank` has.
fn element<T: Number>(rank: usize, index: usize) -> T {
    T::of(((rank * 31 + index * 7) % 100) as i64)
}

fn part<T: Number>(rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|index| element(rank, index)).collect()
}

#[test]
fn parts_of_any_counts_are_gathered_and_scattered() {
    fn check<T: Number>(communicator: &mut Communicator, counts: &[usize]) {
        let Place { rank, world } = communicator.place();
        let whole: Vec<T> = (0..world)
            .flat_map(|rank| part(rank, counts[rank]))
            .collect();
        let own = part::<T>(rank, counts[rank]);
        let what = format!("{counts:?} x {} on rank {rank}", T::DTYPE);

        let mut all = vec![T::of(1); whole.len()];
        communicator.all_gather_v(&own, counts, &mut all).unwrap();
        assert_eq!(bits(&all), bits(&whole), "all_gather_v of {what}");

        for root in 0..world {
            let len = if rank == root { whole.len() } else { 0 };
            let mut got = vec![T::of(1); len];
            communicator.gather_v(&own, counts, &mut got, root).unwrap();
            assert_eq!(bits(&got), bits(&whole[..len]), "gather_v of {what}");

            let mut back = vec![T::of(1); own.len()];
            communicator
                .scatter_v(&whole[..len], counts, &mut back, root)
                .unwrap();
            assert_eq!(bits(&back), bits(&own), "scatter_v of {what}");
        }
    }
    for (algorithm, world) in everywhere(&WORLDS) {
        let config = by(algorithm).with_segment_kb(1);
        each_rank(world, &config, |mut communicator| {
            for counts in shares(world) {
                check::<f64>(&mut communicator, &counts);
                check::<u8>(&mut communicator, &counts);
                check::<bf16>(&mut communicator, &counts);
            }
        });
    }
}

#[test]
fn sums_are_scattered_by_any_counts() {
    fn check<T: Number>(communicator: &mut Communicator, counts: &[usize]) {
        let Place { rank, world } = communicator.place();
        let len = counts.iter().sum();
        let start: usize = counts[..rank].iter().sum();
        let sum = |index| {
            let whole = |rank: usize| ((rank * 31 + index * 7) % 100) as i64;
            T::of((0..world).map(whole).sum())
        };
        let due: Vec<T> = (start..start + counts[rank]).map(sum).collect();
        let mut buffer = part::<T>(rank, len);
        let own = communicator.reduce_scatter_v(&mut buffer, counts, ReduceOp::Sum);
        assert_eq!(
            bits(own.unwrap()),
            bits(&due),
            "{counts:?} x {} on rank {rank}",
            T::DTYPE
        );
    }
    for (algorithm, world) in everywhere(&WORLDS) {
        for deterministic in [false, true] {
            let config = by(algorithm)
                .with_segment_kb(1)
                .with_deterministic(deterministic);
            each_rank(world, &config, |mut communicator| {
                for counts in shares(world) {
                    check::<f32>(&mut communicator, &counts);
                    check::<i64>(&mut communicator, &counts);
                    check::<f16>(&mut communicator, &counts);
                }
            });
        }
    }
}

#[test]
fn every_rank_s_gift_reaches_every_rank() {
    for world in WORLDS {
        // Message sizes from none to several segments, another for each pair and direction.
        let count = |from: usize, to: usize| match (3 * from + 5 * to) % 4 {
            0 => 0,
            1 => 1,
            2 => 40 + to,
            _ => 900 + from,
        };
        let gift = |from: usize, to: usize| -> Vec<f32> {
            let first = 1000 * (10 * from + to);
            (first..first + count(from, to)).map(|x| x as f32).collect()
        };
        each_rank(
            world,
            &by(Algorithm::Ring).with_segment_kb(1),
            |mut communicator| {
                let rank = communicator.rank();
                let ranks = || 0..world;
                let gives: Vec<_> = ranks().map(|to| count(rank, to)).collect();
                let takes: Vec<_> = ranks().map(|from| count(from, rank)).collect();
                let give: Vec<_> = ranks().flat_map(|to| gift(rank, to)).collect();
                let due: Vec<_> = ranks().flat_map(|from| gift(from, rank)).collect();
                let mut take = vec![-1.0; due.len()];
                communicator
                    .all_to_all_v(&give, &gives, &mut take, &takes)
                    .unwrap();
                assert_eq!(take, due);
                let row = communicator.stats().of(Collective::AllToAll);
                assert_eq!(row.bytes_sent, row.predicted_sent);
                assert_eq!(row.bytes_received, row.predicted_received);
                for peer in ranks().filter(|&peer| peer != rank) {
                    let bytes = (4 * count(rank, peer)) as u64;
                    assert_eq!(communicator.stats().sent_to(peer).bytes, bytes);
                }
            },
        );
    }
}

#[test]
fn what_is_shared_out_and_gathered_again_is_whole() {
    each_rank(4, &by(Algorithm::Tree), |mut communicator| {
        let rank = communicator.rank();
        let whole: Vec<u32> = if rank == 2 {
            (0..4000).collect()
        } else {
            vec![]
        };
        let mut part = vec![0; 1000];
        communicator.scatter(&whole, &mut part, 2).unwrap();
        assert!(
            (1000 * rank as u32..)
                .zip(&part)
                .all(|(due, &got)| due == got)
        );
        let mut again = if rank == 1 { vec![0; 4000] } else { vec![] };
        communicator.gather(&part, &mut again, 1).unwrap();
        assert!(rank != 1 || again.into_iter().eq(0..4000));
        let row = communicator.stats().of(Collective::Gather);
        assert_eq!(row.bytes_sent, if rank == 1 { 0 } else { 4000 });
        assert_eq!(row.bytes_received, if rank == 1 { 12_000 } else { 0 });
    });
}

#[test]
fn two_that_send_much_to_each_other_do_not_wait_for_each_other() {
    // Ten times what is under way, both ways, and not the same amount.
    let config = by(Algorithm::Ring).with_segment_kb(1);
    each_rank(2, &config, |mut communicator| {
        let rank = communicator.rank();
        let len = |rank: usize| 10_000 + 5_000 * rank;
        for turn in 0..5 {
            let value = |rank: usize| (10 * turn + rank) as u64;
            let give = vec![value(rank); len(rank)];
            let mut take = vec![u64::MAX; len(1 - rank)];
            communicator
                .sendrecv(1 - rank, &give, 1 - rank, &mut take)
                .unwrap();
            assert!(take.iter().all(|&x| x == value(1 - rank)));
        }
        let row = communicator.stats().of(Collective::SendRecv);
        assert_eq!(row.calls, 5);
        assert_eq!(row.bytes_sent, 5 * 8 * len(rank) as u64);
        assert_eq!(row.bytes_sent, row.predicted_sent);
        assert_eq!(row.bytes_received, row.predicted_received);
    });
}

#[test]
fn a_ring_of_large_messages_goes_round_at_any_size() {
    for world in [2, 3, 5, 8] {
        each_rank(world, &by(Algorithm::Tree), |mut communicator| {
            let place = communicator.place();
            let mut held = vec![place.rank as f32; 200_000];
            let mut next = vec![-1.0; held.len()];
            for turn in 1..=world {
                communicator
                    .sendrecv(place.up(1), &held, place.down(1), &mut next)
                    .unwrap();
                std::mem::swap(&mut held, &mut next);
                let due = place.down(turn) as f32;
                assert!(held.iter().all(|&x| x == due));
            }
        });
    }
}

#[test]
fn messages_with_others_in_between_keep_their_numbers_apart() {
    // Ranks 0 and 1 exchange; each has exchanged another number of messages with rank 2.
    each_rank(3, &by(Algorithm::Ring), |mut communicator| {
        let rank = communicator.rank() as u8;
        let mut take = [9u8];
        match rank {
            0 => {
                communicator.send(2, &[10u8]).unwrap();
                communicator.send(2, &[11u8]).unwrap();
                communicator.recv(2, &mut take).unwrap();
                assert_eq!(take, [20]);
                communicator.sendrecv(1, &[12u8], 1, &mut take).unwrap();
                assert_eq!(take, [13]);
                // To one rank, from another.
                communicator.sendrecv(2, &[14u8], 1, &mut take).unwrap();
                assert_eq!(take, [15]);
            }
            1 => {
                communicator.sendrecv(0, &[13u8], 0, &mut take).unwrap();
                assert_eq!(take, [12]);
                communicator.sendrecv(0, &[15u8], 2, &mut take).unwrap();
                assert_eq!(take, [21]);
            }
            _ => {
                for due in [10, 11] {
                    communicator.recv(0, &mut take).unwrap();
                    assert_eq!(take, [due]);
                }
                communicator.send(0, &[20u8]).unwrap();
                communicator.sendrecv(1, &[21u8], 0, &mut take).unwrap();
                assert_eq!(take, [14]);
            }
        }
        communicator.barrier().unwrap();
    });
}

#[test]
fn a_send_and_a_recv_meet_a_sendrecv() {
    each_rank(2, &by(Algorithm::Ring), |mut communicator| {
        let mut take = [0i32; 3];
        match communicator.rank() {
            0 => communicator.sendrecv(1, &[1, 2, 3], 1, &mut take).unwrap(),
            _ => {
                communicator.recv(0, &mut take).unwrap();
                assert_eq!(take, [1, 2, 3]);
                communicator.send(0, &[4, 5, 6]).unwrap();
            }
        }
        assert!(communicator.rank() == 1 || take == [4, 5, 6]);
    });
}

#[test]
fn one_way_is_shown_and_no_more_is_sent_than_asked() {
    each_rank(3, &by(Algorithm::Naive), |mut communicator| {
        for (_, call) in CALLS {
            call(&mut communicator, 5).unwrap();
        }
        for collective in [
            Collective::Gather,
            Collective::Scatter,
            Collective::AllToAll,
        ] {
            let ran: Vec<_> = communicator.stats().algorithms(collective).collect();
            assert_eq!(ran, [Algorithm::Direct], "{collective}");
        }
        let rank = communicator.rank();
        assert_eq!(communicator.stats().sent_to(rank), Counts::default());
    });
}

#[test]
fn two_ranks_whose_counts_differ_are_told() {
    for (given, taken) in [(3, 2), (2, 3), (0, 1), (600, 300), (512, 256)] {
        let config = by(Algorithm::Ring)
            .with_segment_kb(1)
            .with_timeout(Duration::from_secs(1));
        let errors = each_rank(2, &config, |mut communicator| {
            let mut take = vec![0f32; taken];
            let outcome = match communicator.rank() {
                0 => communicator.all_to_all_v(&vec![1f32; given], &[0, given], &mut [], &[0, 0]),
                _ => communicator.all_to_all_v(&[], &[0, 0], &mut take, &[taken, 0]),
            };
            // What is given beyond what is taken may lie there until the next call, and
            // whoever gave it hears of that in the one after.
            let barriers = outcome
                .and_then(|()| communicator.barrier())
                .and_then(|()| communicator.barrier());
            barriers.unwrap_err()
        });
        for error in errors {
            assert!(
                !error.ranks().is_empty(),
                "{given} given, {taken} taken: {error}"
            );
        }
    }
}

#[test]
fn a_message_to_a_rank_that_has_left_fails_at_once() {
    let (left, gone) = channel::<()>();
    let gone = Mutex::new(gone);
    let ends = each_rank(2, &by(Algorithm::Ring), |mut communicator| {
        if communicator.rank() == 0 {
            drop(communicator);
            left.send(()).unwrap();
            return None;
        }
        gone.lock().unwrap().recv().unwrap();
        let outcome = communicator.sendrecv(0, &[1u8], 0, &mut [0u8]);
        Some(outcome.unwrap_err())
    });
    let error = ends.into_iter().flatten().next().unwrap();
    assert!(
        matches!(error, Error::PeerFailed { peer: 0, .. }),
        "{error}"
    );
}
