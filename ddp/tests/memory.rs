//! Buckets do not double the gradients (trial BR-21).
use allocation_counter::measure;
use burn::backend::{BackendTensor, DispatchTensorKind};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::DType;

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

/// Peak of the first step of one rank with that many micro-shards, all of one row.
fn first_step_of(shards: usize) -> u64 {
    let peaks = ranks(1, |communicator| {
        let config = caps(CAP, CAP).with_micro_shards(shards);
        let mut model = config.init(Mlp::new(&[256; 9], DType::F32), communicator)?;
        let mut gradients = Ok(GradientsParams::new());
        let peak = measure(|| {
            gradients = model.accumulate(0..shards, |model, row| (model.loss(&[row]), 1));
        });
        gradients?;
        let plan = model.plan();
        let buckets: usize = (0..plan.len()).map(|bucket| plan.bytes(bucket)).sum();
        let waiting = model.shards().unwrap().partial_sums(0);
        assert_eq!(model.last_step().partial_bytes, waiting * buckets);
        Ok(peak.bytes_max)
    });
    peaks[0]
}

#[test]
fn micro_shards_cost_the_partial_sums_that_are_predicted_and_nothing_else() {
    // With one shard the first forward pass, which builds the rungs, falls into the peak.
    let [one, two, four, eight] = [1, 2, 4, 8].map(first_step_of);
    // Tails, and what Burn keeps of a pass of one row, are far below an eighth of the gradients.
    let most = |sums: u64| sums * GRADIENTS + GRADIENTS / 8;
    assert!(two - one <= most(1), "{one} {two}");
    for (more, sums) in [(four - two, 1), (eight - two, 2)] {
        let predicted = sums * GRADIENTS..=most(sums);
        assert!(
            predicted.contains(&more),
            "{more} bytes, {sums} x {GRADIENTS} predicted"
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
