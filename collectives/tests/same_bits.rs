//! The same bits: one order for every sum, and one rounding for 16-bit floats.
use collectives::{
    Algorithm, Communicator, CommunicatorConfig, Element, Partition, ReduceOp, bf16, f16,
};

use crate::world::{Number, bits, by, each_rank, everywhere};

const WORLDS: [usize; 8] = [1, 2, 3, 4, 5, 6, 7, 8];
const OPS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Product];

fn ordered(algorithm: Algorithm) -> CommunicatorConfig {
    by(algorithm).with_deterministic(true)
}

/// A number that no short sum holds exactly, the same for the same rank and index.
trait Random: Number {
    fn random(rank: usize, index: usize) -> Self;
}

macro_rules! random {
    ($($t:ident $from:expr;)*) => {$(
        impl Random for $t {
            fn random(rank: usize, index: usize) -> Self {
                let from: fn(f64) -> $t = $from;
                let mut z = (rank as u64 + 1) << 32 | index as u64;
                z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                z ^= z >> 31;
                let unit = (z >> 11) as f64 / (1u64 << 53) as f64;
                // From 0.5 to 2, either sign: eight of them multiply within any range.
                from(2f64.powf(2.0 * unit - 1.0) * if z & 1 == 0 { 1.0 } else { -1.0 })
            }
        }
    )*};
}

random! {
    f32 |x| x as f32;
    f64 |x| x;
    f16 Self::from_f64;
    bf16 Self::from_f64;
}

fn mine<T: Random>(rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|index| T::random(rank, index)).collect()
}

/// T(n) = T(p) + T(n - p), p the largest power of two below n, in wide numbers, divided
/// and rounded once: as the documentation says it, and not as the crate does it.
fn one_tree<T: Random>(world: usize, len: usize, op: ReduceOp) -> Vec<T> {
    fn tree<T: Element>(rows: &[Vec<T>], op: ReduceOp) -> Vec<T> {
        match rows.len() {
            1 => rows[0].clone(),
            n => {
                let (left, right) = rows.split_at(n.next_power_of_two() / 2);
                let mut sum = tree(left, op);
                T::fold(op, &mut sum, &tree(right, op));
                sum
            }
        }
    }
    let wide = |rank| -> Vec<T::Wide> { mine::<T>(rank, len).into_iter().map(T::widen).collect() };
    let rows: Vec<_> = (0..world).map(wide).collect();
    let mut sum = tree(&rows, op);
    if op == ReduceOp::Mean {
        T::Wide::divide(&mut sum, world);
    }
    sum.into_iter().map(T::narrow).collect()
}

/// Every reduction of random numbers on this rank, by the one tree.
fn all_by_one_tree<T: Random>(communicator: &mut Communicator, len: usize) {
    let (rank, world) = (communicator.rank(), communicator.world_size());
    for op in OPS {
        let due = one_tree::<T>(world, len, op);
        let what = format!("{op} of {len} x {} on rank {rank} of {world}", T::DTYPE);

        let mut buffer = mine::<T>(rank, len);
        communicator.all_reduce(&mut buffer, op).unwrap();
        assert_eq!(bits(&buffer), bits(&due), "all_reduce: {what}");

        for root in 0..world {
            let mut buffer = mine::<T>(rank, len);
            communicator.reduce(&mut buffer, op, root).unwrap();
            assert!(
                rank != root || bits(&buffer) == bits(&due),
                "reduce: {what}"
            );
        }

        let mut buffer = mine::<T>(rank, len);
        let own = Partition::new(len, world).range(rank);
        let part = communicator.reduce_scatter(&mut buffer, op).unwrap();
        assert_eq!(bits(part), bits(&due[own]), "reduce_scatter: {what}");

        let counts: Vec<_> = (0..world)
            .map(|rank| if rank == world / 2 { len } else { 0 })
            .collect();
        let mut buffer = mine::<T>(rank, len);
        let part = communicator
            .reduce_scatter_v(&mut buffer, &counts, op)
            .unwrap();
        assert_eq!(
            bits(part),
            bits(&due[..counts[rank]]),
            "reduce_scatter_v: {what}"
        );

        let mut buffer = mine::<T>(rank, len);
        let (left, right) = buffer.split_at_mut(len / 3);
        communicator
            .all_reduce_coalesced(&mut [left, right], op)
            .unwrap();
        assert_eq!(bits(&buffer), bits(&due), "coalesced: {what}");
    }
}

#[test]
fn every_algorithm_gives_the_bits_of_the_one_tree_when_asked_to() {
    for (algorithm, world) in everywhere(&WORLDS) {
        for (segment_kb, lengths) in [(1, &[1, 700, 1500][..]), (128, &[0, 3, 8, 77])] {
            let config = ordered(algorithm).with_segment_kb(segment_kb);
            each_rank(world, &config, |mut communicator| {
                for &len in lengths {
                    all_by_one_tree::<f32>(&mut communicator, len);
                    all_by_one_tree::<f64>(&mut communicator, len);
                    all_by_one_tree::<f16>(&mut communicator, len);
                    all_by_one_tree::<bf16>(&mut communicator, len);
                }
            });
        }
    }
}

#[test]
fn pieces_of_direct_do_not_change_a_bit() {
    for world in WORLDS {
        for piece in [1, 7, 64, 4096] {
            let config = ordered(Algorithm::Direct)
                .with_direct_piece(piece)
                .with_segment_kb(1);
            each_rank(world, &config, |mut communicator| {
                all_by_one_tree::<f32>(&mut communicator, 1500);
                all_by_one_tree::<f16>(&mut communicator, 1500);
            });
        }
    }
}

#[test]
fn naive_tree_and_direct_have_the_one_order_unasked_and_halving_for_powers_of_two() {
    for (algorithm, world) in everywhere(&WORLDS) {
        let ordered = match algorithm {
            Algorithm::Ring => false,
            Algorithm::Halving => world.is_power_of_two(),
            _ => true,
        };
        if ordered {
            each_rank(world, &by(algorithm), |mut communicator| {
                let mut buffer = mine::<f32>(communicator.rank(), 100);
                communicator.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
                let due = one_tree::<f32>(world, 100, ReduceOp::Sum);
                assert_eq!(bits(&buffer), bits(&due), "{algorithm}, {world} ranks");
            });
        }
    }
}

#[test]
fn a_user_s_operator_goes_the_same_way() {
    for (algorithm, world) in everywhere(&WORLDS) {
        each_rank(world, &ordered(algorithm), |mut communicator| {
            let mut buffer = mine::<f64>(communicator.rank(), 100);
            communicator
                .all_reduce_with(&mut buffer, |a, b| a + b)
                .unwrap();
            let due = one_tree::<f64>(world, 100, ReduceOp::Sum);
            assert_eq!(bits(&buffer), bits(&due), "{algorithm}, {world} ranks");
        });
    }
}

#[test]
fn the_same_call_again_gives_the_same_bits() {
    for (algorithm, world) in everywhere(&[3, 6, 8]) {
        let run = || {
            each_rank(world, &by(algorithm), |mut communicator| {
                let mut buffer = mine::<f32>(communicator.rank(), 1000);
                communicator.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
                bits(&buffer)
            })
        };
        let first = run();
        (0..5).for_each(|_| assert_eq!(run(), first, "{algorithm}, {world} ranks"));
    }
}

// ---- 16-bit floats

/// A number so large that one more is rounded away, and ones, which together are not.
fn many_ones<T: Number>(large: i64) {
    for (algorithm, world) in everywhere(&[2, 3, 4, 5, 6, 7, 8]) {
        for deterministic in [false, true] {
            let config = by(algorithm).with_deterministic(deterministic);
            each_rank(world, &config, |mut communicator| {
                let rank = communicator.rank();
                let others = world as i64 - 1;
                // The large number on each rank in turn.
                let mine: Vec<_> = (0..world)
                    .map(|index| T::of(if index == rank { large } else { 1 }))
                    .collect();
                let what = format!("{} by {algorithm} among {world}", T::DTYPE);

                let mut buffer = mine.clone();
                communicator.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
                let sum = vec![T::of(large + others); world];
                assert_eq!(bits(&buffer), bits(&sum), "all_reduce of {what}");

                let mut buffer = mine.clone();
                communicator
                    .reduce(&mut buffer, ReduceOp::Sum, world - 1)
                    .unwrap();
                assert!(
                    rank + 1 < world || bits(&buffer) == bits(&sum),
                    "reduce of {what}"
                );

                let mut buffer = mine.clone();
                let part = communicator.reduce_scatter(&mut buffer, ReduceOp::Sum);
                assert_eq!(
                    bits(part.unwrap()),
                    bits(&sum[..1]),
                    "reduce_scatter of {what}"
                );

                let mut buffer = mine;
                communicator
                    .all_reduce(&mut buffer, ReduceOp::Mean)
                    .unwrap();
                let mean = vec![T::ratio(large + others, world); world];
                assert_eq!(bits(&buffer), bits(&mean), "mean of {what}");
            });
        }
    }
}

#[test]
fn a_16_bit_sum_is_rounded_once_and_not_at_each_hop() {
    // From there on these types hold every second whole number: a single one is lost.
    assert_eq!(f16::of(2048) + f16::of(1), f16::of(2048));
    assert_eq!(bf16::of(256) + bf16::of(1), bf16::of(256));
    many_ones::<f16>(2048);
    many_ones::<bf16>(256);
}

#[test]
fn a_16_bit_mean_is_divided_before_it_is_rounded() {
    for (algorithm, world) in everywhere(&[2, 3, 4, 8]) {
        each_rank(world, &by(algorithm), |mut communicator| {
            // The sum of these has no place in 16 bits, their mean has.
            let mut buffer = [f16::MAX; 5];
            communicator
                .all_reduce(&mut buffer, ReduceOp::Mean)
                .unwrap();
            assert_eq!(buffer, [f16::MAX; 5], "{algorithm}, {world} ranks");
        });
    }
}

#[test]
fn ordered_sums_have_one_nan() {
    for world in WORLDS {
        for op in OPS {
            let mut first = None;
            for &algorithm in Algorithm::ALL {
                let sums = each_rank(world, &ordered(algorithm), |mut communicator| {
                    let odd = [
                        f32::NAN,
                        -f32::NAN,
                        f32::from_bits(0x7fc1_2345),
                        f32::INFINITY,
                        f32::NEG_INFINITY,
                        f32::from_bits(0xffc5_4321),
                    ];
                    let rank = communicator.rank();
                    let mut buffer: Vec<_> = (0..37).map(|i| odd[(i + 3 * rank) % 6]).collect();
                    communicator.all_reduce(&mut buffer, op).unwrap();
                    bits(&buffer)
                });
                for sum in sums {
                    let first = first.get_or_insert_with(|| sum.clone());
                    assert_eq!(&sum, first, "{algorithm} {op} {world} ranks");
                }
            }
        }
    }
}
