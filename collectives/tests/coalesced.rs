//! Many small buffers: one call, one latency.
use collectives::{Algorithm, Collective, Element, ReduceOp};

use crate::world::{Number, bits, by, each_rank, everywhere};

#[test]
fn a_thousand_buffers_together_are_one_call() {
    for &algorithm in Algorithm::ALL {
        each_rank(4, &by(algorithm), |mut communicator| {
            let rank = communicator.rank();
            let fresh = || -> Vec<Vec<f32>> {
                (0..1000)
                    .map(|index| vec![(rank * 1000 + index) as f32; 16])
                    .collect()
            };
            let mut one_by_one = fresh();
            for buffer in &mut one_by_one {
                communicator.all_reduce(buffer, ReduceOp::Sum).unwrap();
            }
            let before = communicator.stats().of(Collective::AllReduce);
            assert_eq!((before.calls, before.elements), (1000, 16_000));

            let mut together = fresh();
            let mut slices: Vec<_> = together.iter_mut().map(Vec::as_mut_slice).collect();
            communicator
                .all_reduce_coalesced(&mut slices, ReduceOp::Sum)
                .unwrap();
            let after = communicator.stats().of(Collective::AllReduce);
            assert_eq!((after.calls, after.elements), (1001, 32_000));
            assert_eq!(after.bytes_sent, after.predicted_sent);
            let messages = after.messages_sent - before.messages_sent;
            assert_eq!(messages * 1000, before.messages_sent, "{algorithm}");

            assert_eq!(together, one_by_one);
            for (index, buffer) in together.iter().enumerate() {
                assert_eq!(buffer, &[(4 * index + 6000) as f32; 16]);
            }
        });
    }
}

#[test]
fn buffers_of_any_lengths_come_back_each_to_its_place() {
    fn check<T: Number>(lens: &[usize], op: ReduceOp) {
        for (algorithm, world) in everywhere(&[1, 2, 3, 5]) {
            each_rank(world, &by(algorithm), |mut communicator| {
                let rank = communicator.rank() as i64;
                let value = |rank: i64, buffer: usize| T::of(rank + buffer as i64);
                let mut buffers: Vec<_> = lens
                    .iter()
                    .enumerate()
                    .map(|(index, &len)| vec![value(rank, index); len])
                    .collect();
                let mut slices: Vec<_> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
                communicator.all_reduce_coalesced(&mut slices, op).unwrap();
                for (index, (buffer, &len)) in buffers.iter().zip(lens).enumerate() {
                    let mut due = vec![value(0, index); len];
                    for rank in 1..world as i64 {
                        T::fold(op, &mut due, &vec![value(rank, index); len]);
                    }
                    assert_eq!(bits(buffer), bits(&due), "{algorithm} {op}, buffer {index}");
                }
                let elements = communicator.stats().total().elements;
                assert_eq!(elements as usize, lens.iter().sum::<usize>());
            });
        }
    }
    for lens in [
        &[][..],
        &[0],
        &[0, 0],
        &[5],
        &[1, 0, 2, 7],
        &[3, 1, 4, 1, 5, 9, 2, 6],
    ] {
        check::<f32>(lens, ReduceOp::Sum);
        check::<u8>(lens, ReduceOp::Max);
        check::<collectives::f16>(lens, ReduceOp::Sum);
        check::<i64>(lens, ReduceOp::Xor);
    }
}

#[test]
fn the_room_for_them_is_shared_among_types() {
    each_rank(2, &by(Algorithm::Tree), |mut communicator| {
        fn once<T: Element + From<u8>>(it: &mut collectives::Communicator, len: usize) {
            let (mut left, mut right) = (vec![T::from(1); len], vec![T::from(2); len + 1]);
            it.all_reduce_coalesced(&mut [&mut left, &mut right], ReduceOp::Sum)
                .unwrap();
            assert_eq!(left, vec![T::from(2); len]);
            assert_eq!(right, vec![T::from(4); len + 1]);
        }
        once::<f64>(&mut communicator, 100);
        once::<u8>(&mut communicator, 3);
        once::<f32>(&mut communicator, 150);
    });
}
