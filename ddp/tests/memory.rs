//! Buckets do not double the gradients (trial BR-21).
use allocation_counter::measure;
use burn::backend::{BackendTensor, DispatchTensorKind};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::DType;

use collectives::CommStream;
use ddp::{BucketPlan, Caps, Float, Gradient, Reducer, Shards, SlotSpec};

use crate::support::{Mlp, caps, ranks};

/// 8 layers of 256 x 256 and a bias: 2 MiB of gradients.
const GRADIENTS: u64 = 8 * (256 * 256 + 256) * 4;

/// A quarter of the gradients.
const CAP: usize = 512 << 10;

#[test]
fn a_backward_pass_allocates_less_than_two_buckets_beyond_burns_own() {
    ranks(2, |communicator| {
        let plain = Mlp::new(&[256; 9], DType::F32);
        let mut model = caps(CAP, CAP).init(plain.clone(), communicator)?;
        let mut optimizer = SgdConfig::new().init();
        let loss = plain.loss(&[0, 1]);
        let burn = measure(|| drop(loss.backward()));
        for step in 0..6 {
            let loss = model.loss(&[0, 1]);
            let mut gradients = Ok(GradientsParams::new());
            let ours = measure(|| gradients = model.backward(loss, 2));
            model.step(0.1, &mut optimizer, gradients?).unwrap();
            // In all: from the second step on the buckets are there.
            let in_all = ours.bytes_total < burn.bytes_total + 2 * CAP as u64;
            // At any one time: the gradients go to the buckets one by one.
            let at_a_time = ours.bytes_max < 2 * CAP as u64;
            let as_promised = (step > 0, step > 0);
            assert_eq!(
                (in_all, at_a_time),
                as_promised,
                "{step}: {ours:?}, {burn:?}"
            );
        }
        assert!(burn.bytes_max > GRADIENTS);
        Ok(())
    });
}

/// Most bytes that the reducer of one rank asks for while it takes that many shards in, and what
/// its buckets are.
fn peak_of(shards: usize) -> (u64, u64) {
    let peaks = ranks(1, |communicator| {
        let slots = [SlotSpec {
            len: 10_000,
            dtype: Float::F32,
        }; 8];
        let caps = Caps {
            first_bytes: 0,
            bucket_bytes: 90_000,
        };
        let plan = BucketPlan::new(&slots, &[7, 6, 5, 4, 3, 2, 1, 0], caps);
        let buckets: usize = (0..plan.len()).map(|bucket| plan.bytes(bucket)).sum();
        let tree = Shards::new(shards, communicator.place())?;
        let names = vec![String::new(); 8];
        let stream = CommStream::new(communicator)?;
        let mut reducer = Reducer::new(plan, names, stream, true).with_shards(tree);
        let gradient = vec![1.0; 10_000];
        let mut result = Ok(());
        let peak = measure(|| {
            result = (0..shards).try_for_each(|shard| {
                reducer.begin_micro_batch(1, 0.0, shard + 1 == shards)?;
                (0..8).try_for_each(|slot| reducer.ready(slot, Gradient::F32(&gradient)))
            });
        });
        result?;
        let reduced = reducer.finish()?;
        assert_eq!(reduced.samples, shards as u64);
        assert_eq!(reduced.partial_bytes, tree.partial_sums(0) * buckets);
        Ok((peak.bytes_max, buckets as u64))
    });
    peaks[0]
}

#[test]
fn micro_shards_cost_the_partial_sums_that_are_predicted_and_nothing_else() {
    for (shards, sums) in [(1, 0), (2, 1), (4, 2), (6, 2), (8, 3), (16, 4)] {
        let (peak, buckets) = peak_of(shards);
        // The buckets, the partial sums, and a few lists of buckets and slots.
        let predicted = (1 + sums) * buckets;
        let listed = predicted + 8 * 1024;
        assert!(
            (predicted..=listed).contains(&peak),
            "{shards} shards: {peak} bytes, {predicted} predicted"
        );
    }
}

#[test]
fn a_forward_pass_without_backward_keeps_nothing_alive_beyond_the_model() {
    ranks(1, |communicator| {
        let model = caps(0, 0).init(Mlp::new(&[4, 4], DType::F32), communicator)?;
        let weight = model.layers[0].weight.base().inner().into_dispatch();
        let DispatchTensorKind::Flex(BackendTensor::Float(weight)) = weight.kind else {
            panic!("the tests run on flex");
        };
        drop(model.loss(&[0]));
        assert!(!weight.is_unique());
        drop(model);
        // Burn reclaims abandoned graphs in the next backward pass.
        Mlp::new(&[2, 2], DType::F32).loss(&[0]).backward();
        assert!(weight.is_unique());
        Ok(())
    });
}
