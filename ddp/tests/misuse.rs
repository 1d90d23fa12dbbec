//! What goes wrong in a loop that is a little off: it must not pass for right.
use std::sync::Arc;

use burn::module::{Module, Param, ParamId, RunningState};
use burn::nn::activation::{RRelu, RReluConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear};
use burn::optim::{AdamConfig, SgdConfig};
use burn::tensor::{DType, Int, Tensor};
use collectives::{Communicator, CommunicatorConfig, Place, ReduceOp, launch};
use ddp::{BucketSums, CommHook, DdpConfig, DistributedSampler, Error, Hook, Shards, Values};

use crate::support::{Mlp, device, from_vec, noise, ranks, values, vector, weights};

type Weight = Param<Tensor<1>>;

fn weight(values: &[f32]) -> Weight {
    Param::from_tensor(vector(values))
}

/// What `f` comes to on each rank of a deterministic world.
fn exactly<R: Send>(
    world: usize,
    f: impl Fn(Communicator) -> ddp::Result<R> + Sync,
) -> Vec<ddp::Result<R>> {
    let settings = CommunicatorConfig::new().with_deterministic(true);
    launch::spawn(world, &settings, |communicator| {
        Ok::<_, Error>(f(communicator))
    })
    .unwrap()
}

#[test]
fn a_rank_without_any_of_its_micro_shards_is_named() {
    for shards in [2, 4] {
        let outcomes = exactly(2, |communicator| {
            let rank = communicator.rank();
            let config = DdpConfig::new().with_micro_shards(shards);
            let mut weight = config.init(weight(&[0.0]), communicator)?;
            let micro_batches = 0..(1 - rank) * shards / 2;
            weight.accumulate(micro_batches, |weight, _| (weight.val() * 2.0, 1))
        });
        let missing = Error::MicroShards {
            call: "accumulate",
            rank: 1,
            due: shards / 2,
            got: 0,
            shards,
        };
        assert_eq!(outcomes[1].as_ref().unwrap_err(), &missing);
        assert_eq!(outcomes[0].as_ref().unwrap_err().ranks(), [1]);
    }
}

#[test]
fn a_weighted_mean_with_another_number_of_parts_names_itself() {
    let outcomes = exactly(2, |communicator| {
        let config = DdpConfig::new().with_micro_shards(4);
        let mut weight = config.init(weight(&[0.0]), communicator)?;
        weight.weighted_mean([([0.5], 10)])
    });
    for outcome in outcomes {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("weighted_mean got 1"), "{text}");
    }
}

#[derive(Module, Debug)]
struct Drawing {
    first: Linear,
    activation: RRelu,
}

#[test]
fn a_layer_that_is_otherwise_in_training_is_refused_whatever_it_is() {
    let drawing = Drawing {
        first: Mlp::new(&[2, 2], DType::F32).layers.remove(0),
        activation: RReluConfig::new().init(),
    };
    let outcomes = exactly(1, |communicator| {
        let config = DdpConfig::new().with_micro_shards(2);
        config.init(drawing.clone(), communicator).map(drop)
    });
    let text = outcomes[0].as_ref().unwrap_err().to_string();
    assert!(text.contains("RRelu at activation"), "{text}");
}

/// Reduces gradients and forgets the counts.
#[derive(Debug)]
struct GradientsOnly;

impl CommHook for GradientsOnly {
    fn name(&self) -> &'static str {
        "gradients_only"
    }

    fn reduce(
        &self,
        bucket: &mut BucketSums<'_>,
        communicator: &mut Communicator,
    ) -> collectives::Result<()> {
        match bucket.gradients() {
            Values::F32(values) => communicator.all_reduce(values, ReduceOp::Sum),
            Values::F64(values) => communicator.all_reduce(values, ReduceOp::Sum),
        }
    }
}

#[test]
fn a_hook_that_leaves_the_tail_alone_is_an_error_on_every_rank() {
    for gradient in [3.0, f32::NAN] {
        let errors = ranks(2, |communicator| {
            let rank = communicator.rank();
            let mut weight = DdpConfig::new().init(weight(&[0.0]), communicator)?;
            weight.register_comm_hook(Arc::new(GradientsOnly))?;
            let slope = if rank == 1 { gradient } else { 3.0 };
            Ok(weight.backward(weight.val() * slope, 1 + rank).unwrap_err())
        });
        let hook = "gradients_only";
        assert!(
            errors.iter().all(|e| *e == Error::HookLeftTail { hook }),
            "{errors:?}"
        );
    }
}

#[test]
fn ranks_that_register_other_hooks_are_told() {
    let errors = ranks(2, |communicator| {
        let hook = [Hook::AllReduce, Hook::Noop][communicator.rank()].make();
        let mut weight = DdpConfig::new().init(weight(&[0.0]), communicator)?;
        Ok(weight.register_comm_hook(hook).unwrap_err())
    });
    assert_eq!(errors[0], errors[1]);
    assert!(
        errors[0].to_string().contains("comm_hook: noop"),
        "{}",
        errors[0]
    );
}

#[test]
fn the_noop_hook_says_why_it_needs_a_sample_on_every_rank() {
    let outcomes = ranks(2, |communicator| {
        let rank = communicator.rank();
        let config = DdpConfig::new().with_comm_hook(Hook::Noop);
        let mut weight = config.init(weight(&[0.0]), communicator)?;
        let outcome = weight.backward(weight.val() * 3.0, 1 - rank);
        Ok(outcome.map(drop).map_err(|error| error.to_string()))
    });
    let text = outcomes[1].as_ref().unwrap_err();
    assert!(text.contains("takes no mean over ranks"), "{text}");
}

#[test]
fn a_norm_that_overflows_leaves_the_step_out() {
    let records = ranks(2, |communicator| {
        let weight = Param::from_tensor(from_vec::<1>(vec![0.0, 0.0], [2], DType::F64));
        let config = DdpConfig::new().with_max_grad_norm(1.0);
        let mut weight = config.init(weight, communicator)?;
        let slope = from_vec::<1>(vec![1e200, 1.0], [2], DType::F64);
        let gradients = weight.backward((weight.val() * slope).sum(), 1)?;
        assert!(gradients.is_empty());
        Ok((weight.last_step().skipped, weight.last_step().grad_norm))
    });
    assert_eq!(records, [(true, Some(f64::INFINITY)); 2]);
}

#[test]
fn a_product_with_the_sample_count_that_overflows_blames_nobody() {
    let records = ranks(2, |communicator| {
        let mut weight = DdpConfig::new().init(weight(&[0.0]), communicator)?;
        weight.backward(weight.val() * 1e37, 64)?;
        let record = weight.last_step();
        Ok((record.skipped, record.non_finite.clone()))
    });
    assert_eq!(records, [(true, vec![]), (true, vec![])]);
}

#[derive(Module, Debug)]
struct Normed {
    first: Linear,
    norm: BatchNorm,
}

#[test]
fn a_step_left_out_leaves_the_running_state_as_it_was() {
    let states = ranks(2, |communicator| {
        let rank = communicator.rank();
        let model = Normed {
            first: Mlp::new(&[4, 3], DType::F32).layers.remove(0),
            norm: BatchNormConfig::new(3).init(&device()),
        };
        let mut model = DdpConfig::new().init(model, communicator)?;
        let mut optimizer = SgdConfig::new().init();
        let mut states = Vec::new();
        for step in 0..3 {
            let mut rows: Vec<f64> = (0..16).map(|at| noise(step, at)).collect();
            if (step, rank) == (1, 0) {
                rows[0] = f64::NAN;
            }
            let input = from_vec::<2>(rows, [4, 4], DType::F32);
            let output = model.norm.forward(model.first.forward(input));
            let gradients = model.backward((output.clone() * output).mean(), 4)?;
            model.step(0.1, &mut optimizer, gradients)?;
            states.push(values(model.norm.running_mean.value()));
        }
        Ok(states)
    });
    assert_eq!(states[0], states[1]);
    assert_eq!(states[0][0], states[0][1]);
    assert!(states[0][2].iter().all(|mean| mean.is_finite()));
}

#[test]
fn a_running_state_that_is_set_or_sent_by_hand_outlives_a_step_left_out() {
    let set = |mut model: Normed, mean: f32| {
        model.norm.running_mean = RunningState::new(vector(&[mean; 3]));
        model
    };
    let states = ranks(2, |communicator| {
        let rank = communicator.rank();
        let model = Normed {
            first: Mlp::new(&[4, 3], DType::F32).layers.remove(0),
            norm: BatchNormConfig::new(3).init(&device()),
        };
        let config = DdpConfig::new().with_broadcast_buffers(false);
        let mut model = config.init(model, communicator)?;
        let mut optimizer = SgdConfig::new().init();
        let mut states = Vec::new();
        for step in 0..3 {
            if step == 0 {
                model.update(|model| set(model, 7.0));
            } else if step == 2 {
                model.update(|model| set(model, rank as f32));
                model.sync_buffers()?;
            }
            let input = from_vec::<2>(vec![f64::NAN; 16], [4, 4], DType::F32);
            let output = model.norm.forward(model.first.forward(input));
            let gradients = model.backward(output.mean(), 4)?;
            if step == 1 {
                model.update(|model| set(model, 8.0));
            }
            model.step(0.1, &mut optimizer, gradients)?;
            assert!(model.last_step().skipped);
            states.push(values(model.norm.running_mean.value()));
        }
        Ok(states)
    });
    assert_eq!(states, vec![[[7.0; 3], [8.0; 3], [0.0; 3]]; 2]);
}

#[derive(Module, Debug)]
struct Counted {
    weight: Weight,
    count: Param<Tensor<1, Int>>,
    frozen: Weight,
}

#[test]
fn buffers_of_every_type_are_sent_by_hand() {
    ranks(2, |communicator| {
        let rank = communicator.rank();
        let model = Counted {
            weight: weight(&[0.0]),
            count: Param::initialized(ParamId::new(), Tensor::from_ints([5], &device())),
            frozen: Param::from_tensor(vector(&[1.0]).set_require_grad(false)),
        };
        let mut model = DdpConfig::new().init(model, communicator)?;
        model.update(|mut model| {
            model.count = model.count.map(|count| count + rank as i32);
            model.frozen = model
                .frozen
                .map(|frozen| (frozen + rank as f32).set_require_grad(false));
            model
        });
        model.sync_buffers()?;
        model.check_replicas()
    });
}

#[test]
fn a_frozen_weight_of_a_norm_that_differs_is_seen() {
    let errors = ranks(2, |communicator| {
        let rank = communicator.rank();
        let norm = BatchNormConfig::new(2).init(&device());
        let frozen = |gamma: Tensor<1>| gamma.set_require_grad(false);
        let norm = BatchNorm {
            gamma: norm.gamma.map(frozen),
            ..norm
        };
        let config = DdpConfig::new().with_broadcast_buffers(false);
        let mut norm = config.init(norm, communicator)?;
        norm.update(|mut norm| {
            norm.gamma = norm.gamma.map(|gamma| frozen(gamma + rank as f32));
            norm
        });
        Ok(norm.check_replicas().unwrap_err().to_string())
    });
    assert!(errors[0].contains("in gamma"), "{}", errors[0]);
}

#[test]
fn a_module_that_is_one_parameter_has_a_name() {
    let errors = ranks(2, |communicator| {
        let rank = communicator.rank();
        let mut weight = DdpConfig::new().init(weight(&[0.0]), communicator)?;
        weight.update(|weight| {
            weight.map(|value| Tensor::from_inner(value.inner() + rank as f32).require_grad())
        });
        Ok(weight.check_replicas().unwrap_err().to_string())
    });
    assert!(errors[0].contains("in the module itself"), "{}", errors[0]);
}

#[test]
fn caps_as_large_as_can_be_are_no_panic() {
    ranks(2, |communicator| {
        let config = DdpConfig::new()
            .with_first_bucket_mb(1e14)
            .with_bucket_cap_mb(1e14);
        config.init(weight(&[0.0]), communicator).map(drop)
    });
}

#[test]
fn a_sampler_without_micro_shards_takes_the_setting_as_it_is() {
    let place = Place { rank: 1, world: 2 };
    let sampler = DistributedSampler::new(8, 8, place).unwrap();
    let batch = sampler.with_micro_shards(0).unwrap().epoch().next();
    assert_eq!(batch.unwrap().micro_shards()[0].rows, [4, 5, 6, 7]);
}

#[test]
fn other_micro_shards_are_the_same_error_on_every_rank() {
    let outcomes = exactly(2, |communicator| {
        let shards = 2 * communicator.rank();
        let config = DdpConfig::new().with_micro_shards(shards);
        config.init(weight(&[0.0]), communicator).map(drop)
    });
    let mismatch = Error::ModelMismatch {
        ranks: vec![1],
        line: 1,
        zero: "micro_shards: 0".into(),
        other: "micro_shards: 2".into(),
    };
    assert!(
        outcomes
            .iter()
            .all(|outcome| *outcome == Err(mismatch.clone())),
        "{outcomes:?}"
    );
}

/// Trains at several world sizes; every rank must come to what one rank alone comes to.
fn same_at<R: Send + PartialEq + std::fmt::Debug>(
    worlds: &[usize],
    f: impl Fn(Communicator) -> ddp::Result<R> + Sync,
) {
    let one = exactly(1, &f).remove(0).unwrap();
    for &world in worlds {
        for outcome in exactly(world, &f) {
            assert_eq!(outcome.unwrap(), one, "{world} ranks");
        }
    }
}

#[derive(Module, Debug)]
struct Mixed {
    single: Weight,
    double: Weight,
}

#[test]
fn a_module_of_two_types_keeps_the_bits_of_its_loss() {
    same_at(&[2], |communicator| {
        let model = Mixed {
            single: weight(&[0.1]),
            double: Param::from_tensor(from_vec::<1>(vec![0.3], [1], DType::F64)),
        };
        let place = communicator.place();
        let mut sampler = DistributedSampler::new(14, 7, place)?.with_micro_shards(2)?;
        let config = DdpConfig::new().with_micro_shards(2);
        let mut model = config.init(model, communicator)?;
        let mut losses = Vec::new();
        for batch in sampler.epoch() {
            model.accumulate(batch.micro_shards(), |model, shard| {
                // Each shard uses one of them.
                let loss = match shard.rows[0] % 7 {
                    0 => model.single.val(),
                    _ => model.double.val().cast(DType::F32),
                };
                (loss, shard.samples)
            })?;
            losses.push(model.last_step().loss.to_bits());
        }
        Ok(losses)
    });
}

#[test]
fn layers_frozen_and_thawed_between_epochs_keep_the_bits() {
    same_at(&[2, 3, 5], |communicator| {
        let place = communicator.place();
        let mut sampler = DistributedSampler::new(24, 8, place)?.with_micro_shards(5)?;
        let config = DdpConfig::new()
            .with_micro_shards(5)
            .with_max_grad_norm(0.3);
        let mut model = config.init(Mlp::new(&[4, 6, 3], DType::F32), communicator)?;
        let mut optimizer = AdamConfig::new().init();
        let mut steps = Vec::new();
        for epoch in 0..3 {
            model.update(|mut model: Mlp| {
                let first = model.layers.remove(0);
                let trained = epoch != 1;
                let first = Linear {
                    weight: first.weight.set_require_grad(trained),
                    bias: first.bias.map(|bias| bias.set_require_grad(trained)),
                };
                model.layers.insert(0, first);
                model
            });
            for batch in sampler.epoch() {
                let gradients = model.accumulate(batch.micro_shards(), |model, shard| {
                    (model.loss(&shard.rows), shard.samples)
                })?;
                model.step(0.01, &mut optimizer, gradients)?;
                let record = model.last_step();
                let norm = record.grad_norm.map(f64::to_bits);
                steps.push((record.loss.to_bits(), norm, record.unused.len()));
            }
        }
        model.check_replicas()?;
        Ok((steps, weights(&model.into_module())))
    });
}

#[test]
fn stand_ins_that_are_no_numbers_keep_the_bits() {
    same_at(&[2, 3, 4, 5, 6], |communicator| {
        let own = Shards::new(6, communicator.place())?.own();
        let config = DdpConfig::new().with_micro_shards(6);
        let mut weight = config.init(weight(&[0.0, 1.0]), communicator)?;
        let gradients = weight.accumulate(own, |weight, shard| {
            let (slope, samples) = match shard {
                4 => (vector(&[0.3, 0.7]), 3),
                _ => (vector(&[f32::NAN, f32::INFINITY]), 0),
            };
            ((weight.val() * slope).sum(), samples)
        })?;
        let record = weight.last_step();
        let mean = gradients.get::<1>(weight.id).map(values);
        Ok((mean, record.loss.to_bits(), record.samples, record.skipped))
    });
}
