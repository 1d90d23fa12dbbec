//! What the ranks of a step decide together: clipping, leaving it out, when it is taken.
use burn::module::{Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear};
use burn::optim::{AdamConfig, SgdConfig};
use burn::tensor::{DType, Tensor};
use ddp::DdpConfig;
use zero::{Error, Stage, ZeroConfig};

use crate::run::{Task, agree, seen};
use crate::support::{Mlp, caps, device, from_vec, noise, values, vector, weights};

#[test]
fn the_norm_over_parts_and_what_is_clipped_by_it_have_the_bits_of_ddp() {
    // Parameters of several blocks of 1,024 elements, which the cuts go through.
    let task = Task {
        model: || Mlp::new(&[40, 90, 30, 3], DType::F32),
        loss: Mlp::loss,
        optimizer: || AdamConfig::new().init(),
        rate: 0.01,
        rows: 12,
        global_batch: 6,
        epochs: 2,
    };
    for config in [caps(100, 300), caps(1 << 20, 1 << 20)] {
        let config = config.with_max_grad_norm(0.1);
        for world in 1..=5 {
            let norms = task.ddp(world, config).norms;
            assert!(
                norms.iter().all(|norm| norm.unwrap() > 0.1),
                "all are clipped"
            );
        }
        task.check("norm", 1..=5, config);
    }
}

/// Weights whose gradients are what the test says.
#[derive(Module, Debug)]
struct Free {
    weight: Param<Tensor<1>>,
}

fn free() -> Free {
    Free {
        weight: Param::from_tensor(vector(&[1.0, 2.0, 3.0, 4.0]).require_grad()),
    }
}

#[test]
fn a_gradient_that_is_no_number_leaves_the_step_out_on_every_rank() {
    for stage in Stage::ALL {
        // On rank 1 alone, in what belongs to rank 0.
        let (records, end) = agree(3, |communicator| {
            let rank = communicator.rank();
            let optimizer = AdamConfig::new().init();
            let mut model = ZeroConfig::new(stage).init(free(), optimizer, communicator)?;
            let mut records = Vec::new();
            for bad in [false, true, false] {
                let first = if bad && rank == 1 { f32::NAN } else { 1.0 };
                let factor = vector(&[first, 1.0, 1.0, 1.0]);
                let loss = (model.weight.val() * factor).sum();
                model.backward(loss, 1)?;
                let record = model.last_step();
                records.push((record.skipped, record.non_finite.clone()));
                let before = seen(model.module());
                model.step(0.1)?;
                assert_eq!(seen(model.module()) == before, bad);
            }
            Ok((records, values(model.weight.val())))
        });
        let fine = || (false, vec![]);
        assert_eq!(records, [fine(), (true, vec![1]), fine()]);
        assert!(end.iter().all(|value| value.is_finite()));
    }
}

#[test]
fn a_sum_that_overflows_in_one_part_leaves_the_step_out_on_every_rank() {
    for stage in Stage::ALL {
        // Each rank's gradient is a number; their sum is not, in the last element, of the last rank.
        let skipped = agree(3, |communicator| {
            let optimizer = SgdConfig::new().init();
            let mut model = ZeroConfig::new(stage).init(free(), optimizer, communicator)?;
            let factor = vector(&[0.0, 0.0, 0.0, 2e38]);
            let weight = model.weight.val();
            let loss = ((weight.clone() - weight.detach()) * factor).sum();
            model.backward(loss, 1)?;
            let before = seen(model.module());
            model.step(0.1)?;
            assert_eq!(seen(model.module()), before);
            let record = model.last_step();
            Ok((record.skipped, record.non_finite.clone()))
        });
        assert_eq!(skipped, (true, vec![]));
    }
}

#[test]
fn a_norm_that_overflows_leaves_the_step_out_on_every_rank() {
    for stage in Stage::ALL {
        let record = agree(2, |communicator| {
            let weight = Param::from_tensor(from_vec::<1>(vec![0.5; 3], [3], DType::F64));
            let config = DdpConfig::new().with_max_grad_norm(1.0);
            let config = ZeroConfig::new(stage).with_ddp(config);
            let mut model = config.init(weight, SgdConfig::new().init(), communicator)?;
            // Each is a number, and the square of the last is not, on the last rank.
            let slope = from_vec::<1>(vec![1.0, 1.0, 1e200], [3], DType::F64);
            model.backward((model.module().val() * slope).sum(), 1)?;
            let before = seen(model.module());
            model.step(0.1)?;
            assert_eq!(seen(model.module()), before, "{stage:?}");
            let record = model.last_step();
            Ok((
                record.skipped,
                record.non_finite.clone(),
                record.grad_norm.map(f64::to_bits),
            ))
        });
        let infinite = Some(f64::INFINITY.to_bits());
        assert_eq!(record, (true, vec![], infinite), "{stage:?}");
    }
}

#[derive(Module, Debug)]
struct Normed {
    first: Linear,
    norm: BatchNorm,
}

#[test]
fn a_step_left_out_leaves_the_running_state_as_it_was_on_every_rank() {
    for stage in Stage::ALL {
        let states = agree(2, |communicator| {
            let rank = communicator.rank();
            let model = Normed {
                first: Mlp::new(&[4, 3], DType::F32).layers.remove(0),
                norm: BatchNormConfig::new(3).init(&device()),
            };
            let optimizer = SgdConfig::new().init();
            let mut model = ZeroConfig::new(stage).init(model, optimizer, communicator)?;
            let mut states = Vec::new();
            for step in 0..3 {
                let mut rows: Vec<f64> = (0..16).map(|at| noise(10 * step + rank, at)).collect();
                if (step, rank) == (1, 0) {
                    rows[0] = f64::NAN;
                }
                let input = from_vec::<2>(rows, [4, 4], DType::F32);
                let output = model.norm.forward(model.first.forward(input));
                model.backward((output.clone() * output).mean(), 4)?;
                model.step(0.1)?;
                states.push(values(model.norm.running_mean.value()));
            }
            Ok(states)
        });
        assert_eq!(states[0], states[1], "{stage:?}");
        assert_ne!(states[1], states[2], "{stage:?}");
        assert!(states[2].iter().all(|mean| mean.is_finite()), "{stage:?}");
    }
}

#[test]
fn micro_batches_are_reduced_once_and_uneven_ones_weigh_by_samples() {
    // At stage 3 every rank runs as many.
    for stage in [Stage::One, Stage::Two] {
        // Gradients 1, 2 on rank 0 over 1 and 3 rows, none on rank 1, 5 on rank 2 over 2.
        let end = agree(3, |communicator| {
            let rank = communicator.rank();
            let optimizer = SgdConfig::new().init();
            let mut model = ZeroConfig::new(stage).init(free(), optimizer, communicator)?;
            let batches = [vec![(1.0, 1), (2.0, 3)], vec![], vec![(5.0, 2)]];
            model.accumulate(batches[rank].iter().copied(), |model, (slope, samples)| {
                (model.weight.val().sum() * slope, samples)
            })?;
            assert_eq!(model.last_step().samples, 6);
            model.step(1.0)?;
            Ok(values(model.weight.val()))
        });
        // (1 + 6 + 10) / 6, once.
        let mean = 17.0f32 / 6.0;
        assert_eq!(end, [1.0, 2.0, 3.0, 4.0].map(|value| value - mean));
    }
}

#[test]
fn a_step_needs_gradients_and_uses_them_once() {
    for stage in Stage::ALL {
        agree(2, |communicator| {
            let optimizer = SgdConfig::new().init();
            let mut model = ZeroConfig::new(stage).init(free(), optimizer, communicator)?;
            let loss = |model: &Free| model.weight.val().sum();
            let state = |error: Error| matches!(error, Error::Ddp(ddp::Error::State(_)));
            assert!(state(model.step(0.1).unwrap_err()));
            model.backward(loss(&model), 1)?;
            assert!(state(model.backward(loss(&model), 1).unwrap_err()));
            model.step(0.1)?;
            assert!(state(model.step(0.1).unwrap_err()));
            // Nothing of that was final.
            model.backward(loss(&model), 1)?;
            model.step(0.1)?;
            assert_eq!(values(model.weight.val())[0], 1.0 - 0.1 - 0.1);
            Ok(())
        });
    }
}

#[test]
fn frozen_by_update_a_layer_keeps_its_values_and_the_rest_goes_on() {
    let config = DdpConfig::new().with_check_replicas_every(1);
    for stage in [Stage::One, Stage::Two] {
        agree(2, |communicator| {
            let zero = ZeroConfig::new(stage).with_ddp(config);
            let optimizer = AdamConfig::new().init();
            let model = Mlp::new(&[4, 8, 2], DType::F32);
            let mut model = zero.init(model, optimizer, communicator)?;
            for step in 0..4 {
                if step == 2 {
                    model.update(|mut module| {
                        let layer = module.layers.remove(0);
                        module.layers.insert(0, layer.freeze());
                        module
                    })?;
                }
                let before = weights(model.module());
                model.backward(model.loss(&[0, 1, 2]), 3)?;
                model.step(0.1)?;
                let after = weights(model.module());
                assert_eq!(before[0] == after[0], step >= 2);
                assert_ne!(before[2], after[2]);
                assert_eq!(model.layers[0].weight.is_require_grad(), step < 2);
            }
            Ok(())
        });
    }
}
