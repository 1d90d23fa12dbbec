//! A second backend: nothing leans on the first. With the feature `ndarray` alone.
#![allow(deprecated, reason = "Burn 0.22 is to be the last with this backend")]
use burn::module::Module;
use burn::optim::AdamConfig;
use burn::tensor::{DType, Device, Tensor};
use collectives::{CommunicatorConfig, launch};
use ddp::DdpConfig;

use crate::overlap::{GATES, PATIENT, gates_opened};
use crate::support::{Mlp, caps, from_vec, noise, ranks, weights};

fn device() -> Device {
    Device::ndarray().autodiff()
}

fn model() -> Mlp {
    Mlp::new(&[4, 8, 3], DType::F32).fork(&device())
}

/// Of whole rows: the mean over 8 of them, or half of that on each of 2 ranks.
fn loss(model: &Mlp, rows: std::ops::Range<usize>) -> Tensor<1> {
    let inputs = rows
        .clone()
        .flat_map(|row| (0..4).map(move |at| noise(row, at)));
    let input = from_vec(inputs.collect(), [rows.len(), 4], DType::F32).to_device(&device());
    let output = model.forward(input);
    (output.clone() * output).sum_dim(1).mean()
}

#[test]
fn one_and_two_ranks_on_ndarray_train_to_the_same_bits() {
    let train = |world| {
        let settings = CommunicatorConfig::new().with_deterministic(true);
        let trained = launch::spawn(world, &settings, |communicator| {
            let mut optimizer = AdamConfig::new().init();
            let config = caps(100, 200).with_micro_shards(2);
            let mut model = config.init(model(), communicator)?;
            let shards = model.shards().expect("they are asked for").own();
            for _ in 0..4 {
                let gradients = model.accumulate(shards.clone(), |model, shard| {
                    (loss(model, 4 * shard..4 * shard + 4), 4)
                })?;
                model.step(0.01, &mut optimizer, gradients)?;
            }
            Ok::<_, ddp::Error>((
                model.last_step().loss.to_bits(),
                weights(&model.into_module()),
            ))
        });
        trained.unwrap()
    };
    let one = train(1);
    assert!(train(2).iter().all(|rank| *rank == one[0]));
}

#[test]
fn two_ranks_on_ndarray_equal_the_oracle_to_the_bit() {
    const ROWS: usize = 8;
    let oracle = ranks(2, |mut communicator| {
        let part = communicator.part(ROWS);
        let (mut model, mut optimizer) = (model(), AdamConfig::new().init());
        for _ in 0..4 {
            let loss = loss(&model, part.clone());
            let (gradients, _) = ddp::naive::backward(&model, loss, part.len(), &mut communicator)?;
            model = optimizer.step(0.01, model, gradients);
        }
        Ok(weights(&model))
    });
    for config in [
        DdpConfig::new(),
        caps(0, 0),
        caps(100, 200).with_overlap(false),
    ] {
        let trained = ranks(2, |communicator| {
            let part = communicator.part(ROWS);
            let mut optimizer = AdamConfig::new().init();
            let mut model = config.init(model(), communicator)?;
            for _ in 0..4 {
                let gradients = model.backward(loss(&model, part.clone()), part.len())?;
                model.step(0.01, &mut optimizer, gradients)?;
            }
            assert_eq!(model.devices(), [device()]);
            Ok(weights(&model.into_module()))
        });
        assert_eq!(trained, oracle, "{config:?}");
    }
}

#[test]
fn buckets_are_reduced_while_backward_runs_on_ndarray_too() {
    assert_eq!(
        gates_opened(2, DdpConfig::new(), PATIENT, &device()),
        [GATES; 2]
    );
}
