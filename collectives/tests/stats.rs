//! What is counted is what is predicted, and what is predicted is what moves.
use std::time::Duration;

use collectives::{
    Algorithm, Collective, Communicator, CommunicatorConfig, DType, ReduceOp, Row, Stats, bf16, f16,
};

use crate::{
    calls::CALLS,
    world::{Number, by, each_rank, everywhere},
};

const WORLDS: [usize; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

#[test]
fn measured_bytes_are_predicted_bytes() {
    for (algorithm, world) in everywhere(&WORLDS) {
        for deterministic in [false, true] {
            let config = by(algorithm).with_deterministic(deterministic);
            let all = each_rank(world, &config, |mut communicator| {
                for len in [0, 1, 3, 7, 73, 1001] {
                    every_width(&mut communicator, len);
                    every_call(&mut communicator, len);
                }
                for (name, call) in CALLS {
                    if world > 1 {
                        assert!(call(&mut communicator, 19).unwrap(), "{name}");
                    }
                }
                for (key, row) in communicator.stats().rows() {
                    let what = format!("{key} on rank {} of {world}", communicator.rank());
                    assert_eq!(row.bytes_sent, row.predicted_sent, "{what}");
                    assert_eq!(row.bytes_received, row.predicted_received, "{what}");
                }
                communicator.stats().clone()
            });
            peers_agree(&all);
        }
    }
}

#[test]
fn the_bytes_of_16_bit_sums_are_those_of_the_numbers_that_travel() {
    // 100 elements each way: partial sums take four bytes, addends and results two.
    for (algorithm, due) in [
        (Algorithm::Naive, 100 * 2 + 100 * 2),
        (Algorithm::Tree, 100 * 4 + 100 * 2),
        (Algorithm::Halving, 50 * 4 + 50 * 2),
        (Algorithm::Ring, 50 * 2 + 50 * 2),
        (Algorithm::Direct, 50 * 2 + 50 * 2),
    ] {
        let totals = each_rank(2, &by(algorithm), |mut communicator| {
            let mut buffer = [f16::ONE; 100];
            communicator.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            communicator.stats().total()
        });
        let sent: u64 = totals.iter().map(|row| row.bytes_sent).sum();
        let received: u64 = totals.iter().map(|row| row.bytes_received).sum();
        let ends = if matches!(algorithm, Algorithm::Naive | Algorithm::Tree) {
            1
        } else {
            2
        };
        assert_eq!([sent, received], [ends * due; 2], "{algorithm}");
        // The largest needs no more bits than it has.
        let totals = each_rank(2, &by(algorithm), |mut communicator| {
            let mut buffer = [bf16::ONE; 100];
            communicator.all_reduce(&mut buffer, ReduceOp::Max).unwrap();
            communicator.stats().total()
        });
        let sent: u64 = totals.iter().map(|row| row.bytes_sent).sum();
        assert_eq!(sent, 400, "{algorithm}");
    }
}

#[test]
fn what_ran_is_what_is_shown() {
    for (algorithm, dtype_is_narrow, deterministic, world, due) in [
        (Algorithm::Ring, false, false, 3, "ring"),
        (Algorithm::Ring, false, true, 3, "direct+ring"),
        (Algorithm::Ring, true, false, 3, "direct+ring"),
        (Algorithm::Halving, false, true, 4, "halving"),
        (Algorithm::Halving, false, true, 3, "direct+halving"),
        (Algorithm::Halving, true, false, 3, "halving"),
        (Algorithm::Tree, true, true, 3, "tree"),
        (Algorithm::Naive, true, true, 3, "naive"),
        (Algorithm::Direct, true, true, 3, "direct"),
    ] {
        let config = by(algorithm).with_deterministic(deterministic);
        let all = each_rank(world, &config, |mut communicator| {
            match dtype_is_narrow {
                true => communicator.all_reduce(&mut [f16::ONE; 12], ReduceOp::Sum),
                false => communicator.all_reduce(&mut [1f32; 12], ReduceOp::Sum),
            }
            .unwrap();
            communicator.broadcast(&mut [1f32; 12], 0).unwrap();
            let stats = communicator.stats();
            let shown: Vec<_> = stats.rows().map(|(key, _)| key.to_string()).collect();
            let spread = format!("broadcast:{algorithm}");
            assert_eq!(shown, [format!("all_reduce:{due}"), spread]);
            let route = stats.algorithms(Collective::AllReduce).next().unwrap();
            assert_eq!(due.parse(), Ok(route));
            stats.clone()
        });
        // A direct exchange is where a rank hears from every other.
        let hears_all = |stats: &Stats, rank: usize| {
            (0..world)
                .filter(|&peer| peer != rank)
                .all(|peer| stats.received_from(peer).bytes > 0)
        };
        let everybody = all
            .iter()
            .enumerate()
            .all(|(rank, stats)| hears_all(stats, rank));
        assert_eq!(
            everybody,
            due.starts_with("direct") || due == "halving" && world == 3,
            "{due}"
        );
    }
}

#[test]
fn cutting_into_segments_changes_messages_and_not_bytes() {
    for (algorithm, world) in everywhere(&[2, 3, 5]) {
        let count = |segment_kb| {
            each_rank(
                world,
                &by(algorithm).with_segment_kb(segment_kb),
                |mut communicator| {
                    every_call(&mut communicator, 5003);
                    communicator.stats().total()
                },
            )
        };
        for (cut, whole) in count(1).into_iter().zip(count(1024)) {
            assert_eq!(cut.bytes_sent, cut.predicted_sent);
            assert_eq!(cut.bytes_sent, whole.bytes_sent);
            assert_eq!(cut.bytes_received, whole.bytes_received);
            assert!(cut.messages_sent > whole.messages_sent);
        }
    }
}

#[test]
fn a_ring_all_reduce_moves_two_buffers_less_one_rank_in_all() {
    for world in WORLDS {
        for len in [1, 5, 64, 1001] {
            let rows = each_rank(world, &by(Algorithm::Ring), |mut communicator| {
                communicator
                    .all_reduce(&mut vec![1.0f64; len], ReduceOp::Sum)
                    .unwrap();
                communicator.stats().of(Collective::AllReduce)
            });
            let sent: u64 = rows.iter().map(|row| row.bytes_sent).sum();
            assert_eq!(sent as usize, 2 * (world - 1) * len * DType::F64.size());
        }
    }
}

#[test]
fn calls_elements_and_messages_are_counted() {
    each_rank(2, &by(Algorithm::Naive), |mut communicator| {
        for len in [10, 0, 5] {
            communicator
                .all_reduce(&mut vec![1i32; len], ReduceOp::Sum)
                .unwrap();
        }
        let row = communicator.stats().of(Collective::AllReduce);
        assert_eq!((row.calls, row.elements), (3, 15));
        assert_eq!((row.messages_sent, row.messages_received), (3, 3));
        assert_eq!((row.bytes_sent, row.bytes_received), (60, 60));
        assert!(row.time > Duration::ZERO);
        assert_eq!(
            communicator.stats().of(Collective::Broadcast),
            Row::default()
        );
        assert_eq!(communicator.stats().total(), row);
    });
}

#[test]
fn single_messages_have_a_row_of_their_own() {
    each_rank(2, &by(Algorithm::Ring), |mut communicator| {
        let mut buffer = [7u64; 6];
        match communicator.rank() {
            0 => communicator.send(1, &buffer).unwrap(),
            _ => communicator.recv(0, &mut buffer).unwrap(),
        }
        let row = communicator.stats().of(Collective::SendRecv);
        let sends = u64::from(communicator.rank() == 0);
        assert_eq!(
            (row.bytes_sent, row.predicted_sent),
            (48 * sends, 48 * sends)
        );
        assert_eq!(row.bytes_received, 48 - 48 * sends);
        assert_eq!(row.bytes_received, row.predicted_received);
        assert_eq!(
            communicator
                .stats()
                .algorithms(Collective::SendRecv)
                .count(),
            0
        );
    });
}

#[test]
fn a_call_that_fails_is_not_counted() {
    let config = by(Algorithm::Ring).with_segment_kb(1);
    each_rank(2, &config, |mut communicator| {
        communicator
            .all_reduce(&mut [1.0f32; 9], ReduceOp::Sum)
            .unwrap();
        let before = communicator.stats().clone();
        if communicator.rank() == 0 {
            // Its messages do leave; the other rank is in another call.
            communicator
                .all_reduce(&mut [1.0f32; 900], ReduceOp::Sum)
                .unwrap_err();
        } else {
            communicator
                .all_reduce(&mut [1.0f32; 901], ReduceOp::Sum)
                .unwrap_err();
        }
        assert_eq!(communicator.stats(), &before);
    });
}

#[test]
fn a_fresh_communicator_has_counted_nothing() {
    each_rank(3, &CommunicatorConfig::new(), |communicator| {
        assert_eq!(communicator.stats().total(), Row::default());
        assert_eq!(communicator.stats().rows().count(), 0);
    });
}

/// What one rank sent to another is what that one received from it, and the
/// counters by peer add up to the rows.
fn peers_agree(all: &[Stats]) {
    for (rank, mine) in all.iter().enumerate() {
        for (peer, theirs) in all.iter().enumerate() {
            assert_eq!(mine.sent_to(peer), theirs.received_from(rank));
        }
        let total = mine.total();
        let peers = || 0..all.len();
        assert_eq!(
            peers().map(|peer| mine.sent_to(peer).bytes).sum::<u64>(),
            total.bytes_sent
        );
        assert_eq!(
            peers().map(|peer| mine.sent_to(peer).messages).sum::<u64>(),
            total.messages_sent
        );
        assert_eq!(
            peers()
                .map(|peer| mine.received_from(peer).bytes)
                .sum::<u64>(),
            total.bytes_received
        );
        assert_eq!(
            peers()
                .map(|peer| mine.received_from(peer).messages)
                .sum::<u64>(),
            total.messages_received
        );
        assert_eq!(
            mine.sent_to(rank).messages,
            0,
            "a rank does not speak to itself"
        );
    }
}

/// Every reduction of elements of one, two, four and eight bytes.
fn every_width(communicator: &mut Communicator, len: usize) {
    fn reductions<T: Number>(communicator: &mut Communicator, len: usize) {
        let world = communicator.world_size();
        let counts: Vec<_> = (0..world).map(|rank| (rank + len) % 5).collect();
        for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max] {
            if op.suits(T::DTYPE) {
                let mut buffer = vec![T::of(1); len];
                communicator.all_reduce(&mut buffer, op).unwrap();
                communicator.reduce(&mut buffer, op, len % world).unwrap();
                communicator.reduce_scatter(&mut buffer, op).unwrap();
                let mut buffer = vec![T::of(1); counts.iter().sum()];
                communicator
                    .reduce_scatter_v(&mut buffer, &counts, op)
                    .unwrap();
            }
        }
    }
    reductions::<u8>(communicator, len);
    reductions::<f16>(communicator, len);
    reductions::<bf16>(communicator, len);
    reductions::<f32>(communicator, len);
    reductions::<f64>(communicator, len);
}

fn every_call(communicator: &mut Communicator, len: usize) {
    let (root, place) = (len % communicator.world_size(), communicator.place());
    communicator
        .all_reduce(&mut vec![1.0f32; len], ReduceOp::Sum)
        .unwrap();
    communicator
        .all_reduce(&mut vec![1i64; len], ReduceOp::Max)
        .unwrap();
    communicator
        .reduce(&mut vec![1u8; len], ReduceOp::Sum, root)
        .unwrap();
    communicator
        .broadcast(&mut vec![1.0f64; len], root)
        .unwrap();
    communicator
        .all_gather_in_place(&mut vec![1u32; len])
        .unwrap();
    communicator
        .reduce_scatter(&mut vec![1.0f64; len], ReduceOp::Mean)
        .unwrap();
    communicator.barrier().unwrap();
    if place.world > 1 {
        communicator
            .send(place.up(1), &vec![1u8; len.min(500)])
            .unwrap();
        communicator
            .recv(place.down(1), &mut vec![1u8; len.min(500)])
            .unwrap();
    }
}
