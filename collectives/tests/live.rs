//! The same, live: every algorithm, call, element type and operation on threads.
use collectives::{
    Algorithm, Choice, Collective, Communicator, CommunicatorConfig, Error, ReduceOp, Result, Rule,
    bf16, f16,
};

use crate::world::{Number, bits, by, each_rank, everywhere, soak};

const WORLDS: [usize; 8] = [1, 2, 3, 4, 5, 6, 7, 8];
const LENGTHS: [usize; 8] = [0, 1, 2, 3, 5, 7, 8, 73];

#[test]
fn every_call_gives_exact_results_on_every_rank() {
    for (algorithm, world) in everywhere(&WORLDS) {
        for deterministic in [false, true] {
            let config = by(algorithm).with_deterministic(deterministic);
            each_rank(world, &config, |mut communicator| {
                for len in LENGTHS {
                    every_type(&mut communicator, len);
                }
            });
        }
    }
}

#[test]
fn more_messages_than_fit_under_way_give_the_same() {
    for (algorithm, world) in everywhere(&[2, 3, 4]) {
        let config = by(algorithm).with_segment_kb(1);
        each_rank(world, &config, |mut communicator| {
            every_type(&mut communicator, 9001);
        });
    }
}

/// Each call, operation and element type at one length, against sums done here.
fn every_type(communicator: &mut Communicator, len: usize) {
    every_op::<f32>(communicator, len);
    every_op::<f64>(communicator, len);
    every_op::<f16>(communicator, len);
    every_op::<bf16>(communicator, len);
    every_op::<i32>(communicator, len);
    every_op::<i64>(communicator, len);
    every_op::<u8>(communicator, len);
    every_op::<u32>(communicator, len);
    every_op::<u64>(communicator, len);
}

fn every_op<T: Number>(communicator: &mut Communicator, len: usize) {
    for op in ReduceOp::ALL {
        if op.suits(T::DTYPE) {
            reductions::<T>(communicator, len, op);
        }
    }
    movements::<T>(communicator, len);
}

fn reductions<T: Number>(communicator: &mut Communicator, len: usize, op: ReduceOp) {
    let (rank, world) = (communicator.rank(), communicator.world_size());
    let mine: Vec<T> = (0..len)
        .map(|index| T::of(whole::<T>(rank, index)))
        .collect();
    let expected: Vec<T> = (0..len).map(|index| reduced(world, index, op)).collect();
    let what = format!("{op} of {len} x {} on rank {rank} of {world}", T::DTYPE);

    let mut buffer = mine.clone();
    communicator.all_reduce(&mut buffer, op).unwrap();
    assert_eq!(bits(&buffer), bits(&expected), "all_reduce: {what}");

    let root = len % world;
    let mut buffer = mine.clone();
    communicator.reduce(&mut buffer, op, root).unwrap();
    if rank == root {
        assert_eq!(bits(&buffer), bits(&expected), "reduce: {what}");
    }

    let mut buffer = mine;
    let own = communicator.part(len);
    let part = communicator.reduce_scatter(&mut buffer, op).unwrap();
    assert_eq!(bits(part), bits(&expected[own]), "reduce_scatter: {what}");
    let part = part.to_vec();
    let mut whole = vec![T::of(0); len];
    communicator.all_gather(&part, &mut whole).unwrap();
    assert_eq!(bits(&whole), bits(&expected), "all_gather: {what}");
}

fn movements<T: Number>(communicator: &mut Communicator, len: usize) {
    let (rank, world) = (communicator.rank(), communicator.world_size());
    let row = |rank| -> Vec<T> {
        (0..len)
            .map(|index| T::of(whole::<T>(rank, index)))
            .collect()
    };
    for root in 0..world {
        let mut buffer = row(rank);
        communicator.broadcast(&mut buffer, root).unwrap();
        assert_eq!(
            bits(&buffer),
            bits(&row(root)),
            "broadcast from {root} to {rank}"
        );
    }
    let mut buffer = vec![T::of(0); len];
    let own = communicator.part(len);
    buffer[own.clone()].copy_from_slice(&row(rank)[own]);
    communicator.all_gather_in_place(&mut buffer).unwrap();
    let cut = communicator.partition(len);
    for other in 0..world {
        let part = cut.range(other);
        assert_eq!(
            bits(&buffer[part.clone()]),
            bits(&row(other)[part]),
            "part of rank {other}"
        );
    }
}

/// Small numbers whose products over eight ranks are still exact in f32.
fn whole<T: Number>(rank: usize, index: usize) -> i64 {
    let table = match T::SIGNED {
        true => [-3, 1, 2, -5, 4, -1, 3],
        false => [3, 1, 2, 5, 4, 6, 7],
    };
    table[(rank * 3 + index * 5) % table.len()]
}

fn reduced<T: Number>(world: usize, index: usize, op: ReduceOp) -> T {
    let all = || (0..world).map(|rank| whole::<T>(rank, index));
    match op {
        ReduceOp::Sum => T::of(all().sum()),
        ReduceOp::Mean => T::ratio(all().sum(), world),
        ReduceOp::Min => T::of(all().min().unwrap()),
        ReduceOp::Max => T::of(all().max().unwrap()),
        ReduceOp::Product => T::of(all().product()),
        ReduceOp::And => T::of(all().reduce(|a, b| a & b).unwrap()),
        ReduceOp::Or => T::of(all().reduce(|a, b| a | b).unwrap()),
        ReduceOp::Xor => T::of(all().reduce(|a, b| a ^ b).unwrap()),
        _ => unreachable!("no other operation"),
    }
}

#[test]
fn all_ranks_hold_the_same_bits() {
    for (algorithm, world) in everywhere(&WORLDS) {
        for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Product] {
            let ends = each_rank(world, &by(algorithm), |mut communicator| {
                let rank = communicator.rank();
                // Reciprocals have no exact sums, so the order of additions shows.
                let mut buffer: Vec<f32> = (0..777)
                    .map(|index| 1.0 / (3 + 7 * rank + 5 * index) as f32)
                    .collect();
                communicator.all_reduce(&mut buffer, op).unwrap();
                bits(&buffer)
            });
            assert!(
                ends.iter().all(|end| end == &ends[0]),
                "{algorithm} {op}, {world} ranks"
            );
        }
    }
}

#[test]
fn a_mean_is_divided_once_and_by_the_ranks() {
    for &algorithm in Algorithm::ALL {
        for len in [1, 4, 6] {
            each_rank(4, &by(algorithm), |mut communicator| {
                let mine = vec![communicator.rank() as f32 + 1.0; len];
                let mut buffer = mine.clone();
                communicator
                    .all_reduce(&mut buffer, ReduceOp::Mean)
                    .unwrap();
                assert_eq!(buffer, vec![2.5; len]);
                let mut buffer = mine.clone();
                communicator.reduce(&mut buffer, ReduceOp::Mean, 2).unwrap();
                assert!(communicator.rank() != 2 || buffer == vec![2.5; len]);
                let mut buffer = mine;
                let part = communicator
                    .reduce_scatter(&mut buffer, ReduceOp::Mean)
                    .unwrap();
                assert!(part.iter().all(|&mean| mean == 2.5));
            });
        }
    }
}

#[test]
fn what_follows_a_sum_is_done_once_to_each_element_and_reaches_every_rank() {
    for (algorithm, world) in everywhere(&WORLDS) {
        for deterministic in [false, true] {
            let config = by(algorithm).with_deterministic(deterministic);
            for len in LENGTHS {
                let touched = each_rank(world, &config, |mut communicator| {
                    let rank = communicator.rank() as i64;
                    let mut buffer: Vec<i64> = (0..len as i64).map(|at| at + rank).collect();
                    let touched = std::cell::Cell::new(0);
                    let then = |start: usize, sums: &mut [i64]| {
                        touched.set(touched.get() + sums.len());
                        let places = start as i64..;
                        sums.iter_mut()
                            .zip(places)
                            .for_each(|(sum, at)| *sum = 2 * *sum + at);
                    };
                    communicator
                        .all_reduce_then(&mut buffer, ReduceOp::Sum, then)
                        .unwrap();
                    let (world, ranks) = (world as i64, (0..world as i64).sum::<i64>());
                    let expected = (0..len as i64).map(|at| 2 * (at * world + ranks) + at);
                    assert_eq!(buffer, expected.collect::<Vec<_>>(), "{algorithm}, {world}");
                    touched.get()
                });
                assert_eq!(
                    touched.iter().sum::<usize>(),
                    len,
                    "{algorithm}, {world} ranks"
                );
            }
        }
    }
}

#[test]
fn integers_have_sums_and_no_mean() {
    for (algorithm, world) in everywhere(&[1, 2]) {
        each_rank(world, &by(algorithm), |mut communicator| {
            let sign = communicator.rank() as i32;
            let mut buffer = [3 + sign, -3 - sign];
            communicator.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            assert_eq!(buffer, if world == 2 { [7, -7] } else { [3, -3] });
        });
    }
}

/// A call with an operation, to stand in tables.
type Reduction<T> = fn(&mut Communicator, &mut [T], ReduceOp) -> Result<()>;

#[test]
fn what_a_type_cannot_do_is_refused_before_anything_moves() {
    fn refused<T: Number>(op: ReduceOp) {
        let said = match op {
            ReduceOp::Mean => format!("no mean of {}", T::DTYPE),
            _ => format!("no {op} of {}: only integers have bits", T::DTYPE),
        };
        for (algorithm, world) in everywhere(&[1, 3]) {
            let calls: [Reduction<T>; 5] = [
                |it, buffer, op| it.all_reduce(buffer, op),
                |it, buffer, op| it.reduce(buffer, op, 0),
                |it, buffer, op| it.reduce_scatter(buffer, op).map(drop),
                |it, buffer, op| {
                    let counts = vec![buffer.len(); it.world_size()];
                    let mut all = buffer.repeat(it.world_size());
                    it.reduce_scatter_v(&mut all, &counts, op).map(drop)
                },
                |it, buffer, op| it.all_reduce_coalesced(&mut [buffer], op),
            ];
            for call in calls {
                each_rank(world, &by(algorithm), |mut communicator| {
                    let mut buffer = [T::of(3), T::of(1)];
                    let error = call(&mut communicator, &mut buffer, op).unwrap_err();
                    assert!(
                        matches!(error, Error::Argument { .. } | Error::Aborted { .. }),
                        "{error}"
                    );
                    assert!(error.to_string().contains(&said), "{error}");
                    assert_eq!(bits(&buffer), bits(&[T::of(3), T::of(1)]));
                    assert_eq!(communicator.stats().total().calls, 0);
                    let sent = (0..world).map(|rank| communicator.stats().sent_to(rank).messages);
                    assert_eq!(sent.sum::<u64>(), 0, "nothing has moved");
                });
            }
        }
    }
    refused::<u8>(ReduceOp::Mean);
    refused::<i32>(ReduceOp::Mean);
    refused::<u32>(ReduceOp::Mean);
    refused::<i64>(ReduceOp::Mean);
    refused::<u64>(ReduceOp::Mean);
    for op in [ReduceOp::And, ReduceOp::Or, ReduceOp::Xor] {
        refused::<f16>(op);
        refused::<bf16>(op);
        refused::<f32>(op);
        refused::<f64>(op);
    }
}

#[test]
fn a_caller_s_own_operator_folds_what_all_ranks_have() {
    fn greatest_divisor(a: u64, b: u64) -> u64 {
        if b == 0 {
            a
        } else {
            greatest_divisor(b, a % b)
        }
    }
    for (algorithm, world) in everywhere(&WORLDS) {
        for deterministic in [false, true] {
            let config = by(algorithm).with_deterministic(deterministic);
            each_rank(world, &config, |mut communicator| {
                let rank = communicator.rank();
                for len in LENGTHS {
                    // Every rank has 6, and a factor that others have not.
                    let mut buffer = vec![6 * [5, 7, 11][rank % 3]; len];
                    communicator
                        .all_reduce_with(&mut buffer, greatest_divisor)
                        .unwrap();
                    assert_eq!(buffer, vec![if world == 1 { 30 } else { 6 }; len]);

                    // Which rank is furthest from 2, on both sides of it, in 16 bits.
                    let furthest = |a: f16, b: f16| {
                        let far = |x: f16| ((x.to_f32() - 2.0).abs(), x.to_f32());
                        if far(a) > far(b) { a } else { b }
                    };
                    let mut buffer = vec![f16::of(rank as i64); len];
                    communicator.all_reduce_with(&mut buffer, furthest).unwrap();
                    let due = if world < 5 { 0 } else { world as i64 - 1 };
                    assert_eq!(buffer, vec![f16::of(due); len], "{algorithm}");

                    // What one rank captures, all must.
                    let offset = 3i64;
                    let mut buffer = vec![rank as i64 + offset; len];
                    communicator
                        .all_reduce_with(&mut buffer, |a, b| a + b - offset)
                        .unwrap();
                    let sum = (world * (world - 1) / 2) as i64 + offset;
                    assert_eq!(buffer, vec![sum; len], "{algorithm}");
                }
            });
        }
    }
}

#[test]
fn a_sum_and_its_count_give_the_mean_over_uneven_ranks() {
    for &algorithm in Algorithm::ALL {
        // Gradients 1, 2, 3 on rank 0, 10 on rank 1, none on rank 2.
        let gradients: [&[f32]; 3] = [&[1.0, 2.0, 3.0], &[10.0], &[]];
        let means = each_rank(3, &by(algorithm), |mut communicator| {
            let mine = gradients[communicator.rank()];
            let mut sums = [mine.iter().sum(), mine.len() as f32];
            communicator.all_reduce(&mut sums, ReduceOp::Sum).unwrap();
            sums[0] / sums[1]
        });
        assert_eq!(means, [4.0; 3]);
    }
}

#[test]
fn a_reduce_scatter_as_gloo_was_asked_gives_the_parts_it_owed() {
    let all = || -> Vec<f32> { (1..=6).chain(11..=16).map(|x| x as f32).collect() };
    let due = |range: std::ops::Range<usize>| -> Vec<f32> {
        all()[range].iter().map(|x| 2.0 * x).collect()
    };
    for &algorithm in Algorithm::ALL {
        each_rank(2, &by(algorithm), |mut communicator| {
            let rank = communicator.rank();
            let mut buffer = all();
            let part = communicator.reduce_scatter(&mut buffer, ReduceOp::Sum);
            assert_eq!(part.unwrap(), due([0..6, 6..12][rank].clone()));
            for counts in [[6, 6], [5, 7], [7, 5], [0, 12], [12, 0]] {
                let mut buffer = all();
                let part = communicator.reduce_scatter_v(&mut buffer, &counts, ReduceOp::Sum);
                let own = [0..counts[0], counts[0]..12][rank].clone();
                assert_eq!(part.unwrap(), due(own), "{algorithm} {counts:?}");
            }
        });
    }
}

#[test]
fn a_reduce_may_have_any_root() {
    for (algorithm, world) in everywhere(&WORLDS) {
        for deterministic in [false, true] {
            let config = by(algorithm).with_deterministic(deterministic);
            each_rank(world, &config, |mut communicator| {
                let rank = communicator.rank();
                for root in 0..world {
                    let mut sums = [rank as i64 + 1, 10 * (rank as i64 + 1), 7];
                    communicator.reduce(&mut sums, ReduceOp::Sum, root).unwrap();
                    let once = (world * (world + 1) / 2) as i64;
                    assert!(rank != root || sums == [once, 10 * once, 7 * world as i64]);
                    let mut means = [f16::of(rank as i64), f16::of(4)];
                    communicator
                        .reduce(&mut means, ReduceOp::Mean, root)
                        .unwrap();
                    let sum = (world * (world - 1) / 2) as i64;
                    assert!(rank != root || means == [f16::ratio(sum, world), f16::of(4)]);
                }
            });
        }
    }
}

#[test]
fn smallest_and_largest_do_not_depend_on_who_is_folded_first() {
    fn holds<T: Number>(specials: &[T], smallest: impl Fn(&[T]) -> T, largest: impl Fn(&[T]) -> T) {
        for (algorithm, world) in everywhere(&[2, 3, 4, 5]) {
            // Every combination that a rotation of the list gives.
            let at = |rank: usize, index: usize| {
                let stride = 1 + index / specials.len();
                specials[(index + rank * stride) % specials.len()]
            };
            let len = specials.len() * specials.len();
            let column = |index| -> Vec<T> { (0..world).map(|rank| at(rank, index)).collect() };
            let least: Vec<T> = (0..len).map(|index| smallest(&column(index))).collect();
            let most: Vec<T> = (0..len).map(|index| largest(&column(index))).collect();
            each_rank(world, &by(algorithm), |mut communicator| {
                let rank = communicator.rank();
                for (op, expected) in [(ReduceOp::Min, &least), (ReduceOp::Max, &most)] {
                    let mut buffer: Vec<T> = (0..len).map(|index| at(rank, index)).collect();
                    communicator.all_reduce(&mut buffer, op).unwrap();
                    assert_eq!(bits(&buffer), bits(expected), "{algorithm} {op}");
                }
            });
        }
    }
    macro_rules! holds {
        ($t:ident) => {{
            let odd_nan = $t::from_bits($t::NAN.to_bits() | 0x23);
            let specials = [
                $t::NAN,
                $t::INFINITY,
                $t::NEG_INFINITY,
                $t::of(0),
                -$t::of(0),
                $t::of(1),
                $t::of(-1),
                odd_nan,
                $t::of(0),
                -$t::of(0),
                $t::of(2),
            ];
            let unless_nan =
                |all: &[$t], pick: fn($t, $t) -> $t| match all.iter().any(|x| x.is_nan()) {
                    true => $t::NAN,
                    false => all.iter().copied().reduce(pick).unwrap(),
                };
            holds(
                &specials,
                |all| unless_nan(all, |a, b| if a.total_cmp(&b).is_lt() { a } else { b }),
                |all| unless_nan(all, |a, b| if a.total_cmp(&b).is_gt() { a } else { b }),
            );
        }};
    }
    holds!(f32);
    holds!(f64);
    holds!(f16);
    holds!(bf16);
}

#[test]
fn one_rank_s_infinity_or_nan_reaches_every_sum() {
    macro_rules! reaches {
        ($t:ident) => {
            for (algorithm, world) in everywhere(&[2, 3, 4, 5, 8]) {
                for (odd, deterministic) in (0..world).zip([false, true].into_iter().cycle()) {
                    let config = by(algorithm).with_deterministic(deterministic);
                    each_rank(world, &config, |mut communicator| {
                        let one = $t::of(1);
                        let (up, down, most) = ($t::INFINITY, $t::NEG_INFINITY, $t::MAX);
                        let mut buffer = match communicator.rank() == odd {
                            true => [up, down, $t::NAN, most, one, up],
                            false => [one, one, one, most, one, down],
                        };
                        communicator.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
                        assert_eq!(buffer[..2], [up, down]);
                        assert!(buffer[2].is_nan());
                        assert_eq!(buffer[3..5], [up, $t::of(world as i64)]);
                        assert!(buffer[5].is_nan(), "infinities of both signs have no sum");
                    });
                }
            }
        };
    }
    reaches!(f32);
    reaches!(f64);
    reaches!(f16);
    reaches!(bf16);
}

#[test]
fn negative_zeros_sum_to_negative_zero_only_if_all_are() {
    for (algorithm, world) in everywhere(&[2, 3, 4, 5]) {
        for odd in 0..world {
            each_rank(world, &by(algorithm), |mut communicator| {
                let zero = if communicator.rank() == odd {
                    0.0
                } else {
                    -0.0
                };
                let mut buffer = [-0.0, zero, 0.0f32];
                communicator.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
                assert_eq!(bits(&buffer), bits(&[-0.0, 0.0, 0.0f32]), "{algorithm}");
            });
        }
    }
}

#[test]
fn integers_wrap_around() {
    for &algorithm in Algorithm::ALL {
        each_rank(3, &by(algorithm), |mut communicator| {
            let mut buffer = [200u8];
            communicator.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            assert_eq!(buffer, [200u8.wrapping_mul(3)]);
            let mut buffer = [i32::MAX];
            communicator
                .all_reduce(&mut buffer, ReduceOp::Product)
                .unwrap();
            assert_eq!(
                buffer,
                [i32::MAX.wrapping_mul(i32::MAX).wrapping_mul(i32::MAX)]
            );
        });
    }
}

#[test]
fn everybody_sends_more_than_fits_and_nobody_hangs() {
    // 8 MiB, or 64, where 1 MiB is under way at most.
    let len = if soak() { 16 << 20 } else { 2 << 20 };
    for (algorithm, world) in everywhere(&[2, 3, 5]) {
        each_rank(world, &by(algorithm), |mut communicator| {
            let sum = (world * (world + 1) / 2) as f32;
            let mut buffer = vec![communicator.rank() as f32 + 1.0; len];
            communicator.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            assert!(buffer.iter().all(|&x| x == sum));
            let part = communicator
                .reduce_scatter(&mut buffer, ReduceOp::Sum)
                .unwrap();
            assert!(part.iter().all(|&x| x == sum * world as f32));
            communicator.all_gather_in_place(&mut buffer).unwrap();
            assert!(buffer.iter().all(|&x| x == sum * world as f32));
            communicator.broadcast(&mut buffer, world - 1).unwrap();
            assert!(buffer.iter().all(|&x| x == sum * world as f32));
        });
    }
}

#[test]
fn messages_reach_the_rank_they_are_for_in_order() {
    each_rank(4, &by(Algorithm::Ring), |mut communicator| {
        let place = communicator.place();
        for len in [0, 1, 5, 300] {
            for turn in 0..10u64 {
                communicator
                    .send(place.up(1), &vec![turn * 10 + place.rank as u64; len])
                    .unwrap();
                let mut got = vec![0u64; len];
                communicator.recv(place.down(1), &mut got).unwrap();
                assert_eq!(got, vec![turn * 10 + place.down(1) as u64; len]);
            }
        }
        // Collectives in between do not disturb the numbering of messages.
        let mut buffer = [1i64];
        communicator.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
        assert_eq!(buffer, [4]);
        communicator
            .send(place.down(2), &[place.rank as i32])
            .unwrap();
        let mut got = [0i32];
        communicator.recv(place.up(2), &mut got).unwrap();
        assert_eq!(got, [place.up(2) as i32]);
    });
}

#[test]
fn a_message_larger_than_the_channel_arrives_whole() {
    let config = by(Algorithm::Ring).with_segment_kb(1);
    each_rank(2, &config, |mut communicator| {
        let message: Vec<f64> = (0..50_000).map(f64::from).collect();
        let mut got = vec![0.0; message.len()];
        if communicator.rank() == 0 {
            communicator.send(1, &message).unwrap();
            communicator.recv(1, &mut got).unwrap();
        } else {
            communicator.recv(0, &mut got).unwrap();
            communicator.send(0, &message).unwrap();
        }
        assert_eq!(got, message);
    });
}

#[test]
fn crossing_messages_pass_while_the_channel_holds_them() {
    each_rank(2, &by(Algorithm::Ring), |mut communicator| {
        let other = 1 - communicator.rank();
        // Four segments of 128 KiB each way.
        communicator
            .send(other, &vec![other as u32; 4 << 15])
            .unwrap();
        let mut got = vec![9u32; 4 << 15];
        communicator.recv(other, &mut got).unwrap();
        assert!(got.iter().all(|&x| x as usize == 1 - other));
    });
}

#[test]
fn a_message_to_nobody_or_oneself_is_refused() {
    for peer in [0, 2, 17] {
        each_rank(1, &by(Algorithm::Tree), |mut communicator| {
            let error = communicator.send(peer, &[1u8]).unwrap_err();
            assert!(matches!(error, Error::Argument { .. }), "{error}");
            assert!(
                error.to_string().contains(&format!("no rank {peer}")),
                "{error}"
            );
        });
    }
}

#[test]
fn what_ran_is_what_was_asked() {
    for (algorithm, world) in everywhere(&[1, 2, 3]) {
        each_rank(world, &by(algorithm), |mut communicator| {
            all_planned(&mut communicator, 10);
            for collective in Collective::PLANNED {
                let ran: Vec<_> = communicator.stats().algorithms(collective).collect();
                assert_eq!(ran, [algorithm], "{collective}");
            }
        });
    }
}

#[test]
fn each_operation_may_have_its_own_algorithm() {
    let own = [
        (Collective::AllReduce, Algorithm::Naive),
        (Collective::Reduce, Algorithm::Ring),
        (Collective::Broadcast, Algorithm::Naive),
        (Collective::AllGather, Algorithm::Tree),
    ];
    let config = own
        .iter()
        .fold(by(Algorithm::Ring), |config, &(collective, algorithm)| {
            config.with_algorithm_for(collective, algorithm)
        });
    each_rank(3, &config, |mut communicator| {
        all_planned(&mut communicator, 10);
        for (collective, algorithm) in own
            .into_iter()
            .chain([(Collective::ReduceScatter, Algorithm::Ring)])
        {
            let ran: Vec<_> = communicator.stats().algorithms(collective).collect();
            assert_eq!(ran, [algorithm], "{collective}");
        }
    });
}

#[test]
fn the_size_of_the_buffer_picks_the_rule() {
    let rule = |up_to_kb, algorithm| Rule {
        up_to_kb,
        algorithm,
    };
    let sizes = Choice::Sized(vec![
        rule(Some(1), Algorithm::Naive),
        rule(Some(3), Algorithm::Tree),
        rule(None, Algorithm::Ring),
    ]);
    each_rank(
        3,
        &CommunicatorConfig::new().with_algorithm(sizes),
        |mut communicator| {
            let mut calls = |len: usize| {
                communicator
                    .all_reduce(&mut vec![1.0f32; len], ReduceOp::Sum)
                    .unwrap();
                let rows = communicator.stats().rows();
                rows.map(|(key, row)| (key.algorithm.unwrap().reduce, row.calls))
                    .collect::<Vec<_>>()
            };
            use Algorithm::{Naive, Ring, Tree};
            // Bytes decide, a bound included: 1024 and 1028, 3072 and 3076.
            assert_eq!(calls(0), [(Naive, 1)]);
            assert_eq!(calls(256), [(Naive, 2)]);
            assert_eq!(calls(257), [(Naive, 2), (Tree, 1)]);
            assert_eq!(calls(768), [(Naive, 2), (Tree, 2)]);
            assert_eq!(calls(769), [(Naive, 2), (Tree, 2), (Ring, 1)]);
        },
    );
}

fn all_planned(communicator: &mut Communicator, len: usize) {
    let mut buffer = vec![1.0f32; len];
    communicator.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
    communicator.reduce(&mut buffer, ReduceOp::Sum, 0).unwrap();
    communicator.broadcast(&mut buffer, 0).unwrap();
    communicator.all_gather_in_place(&mut buffer).unwrap();
    communicator
        .reduce_scatter(&mut buffer, ReduceOp::Sum)
        .unwrap();
}
