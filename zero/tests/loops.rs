//! What loops do besides forward, backward, step: rates by group, layers frozen and thawed, several
//! micro-batches, ranks without rows. A plain loop of Burn's in one process is the oracle, or whole
//! numbers.
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::{ModuleLrScheduler, ModuleLrSchedulerConfig};
use burn::module::{Module, Param, ParamGroup};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{DType, Tensor};
use collectives::Collective;
use ddp::DdpConfig;
use zero::{Stage, ZeroConfig};

use crate::run::{agree, seen};
use crate::support::{Mlp, caps, values, vector, weights};

/// Worlds in which the same rows on every rank give a plain loop's gradients to the bit: the sum of
/// as many equal numbers, and its division, are exact.
const DOUBLINGS: [usize; 3] = [1, 2, 4];

fn mlp() -> Mlp {
    Mlp::new(&[4, 6, 2], DType::F32)
}

fn plain_step(
    model: Mlp,
    optimizer: &mut ModuleOptimizer,
    rate: impl Into<burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate>,
    rows: &[usize],
) -> Mlp {
    let gradients = GradientsParams::from_grads(model.loss(rows).backward(), &model);
    optimizer.step(rate, model, gradients)
}

/// A falling rate, a higher one for the last layer, and a lower one for a bias of six elements, which
/// four ranks share unevenly.
fn schedule() -> ModuleLrScheduler {
    ModuleLrSchedulerConfig::new(LinearLrSchedulerConfig::new(0.05, 0.01, 4).into())
        .with_group(ParamGroup::from_predicate("layers.1"), 0.5)
        .with_group(ParamGroup::from_path("layers.0.bias"), 0.003)
        .init()
        .unwrap()
}

#[test]
fn rates_of_groups_and_their_schedules_fall_where_a_plain_loop_has_them() {
    let optimizer = || AdamWConfig::new().with_weight_decay(0.1).init();
    let (mut plain, mut rates, mut own) = (mlp(), schedule(), optimizer());
    for step in 0..5 {
        plain = plain_step(plain, &mut own, rates.step(), &[step, step + 1]);
    }
    let plain = weights(&plain);
    for stage in Stage::ALL {
        for world in DOUBLINGS {
            let sharded = agree(world, |communicator| {
                let zero = ZeroConfig::new(stage).with_ddp(caps(20, 60));
                let mut model = zero.init(mlp(), optimizer(), communicator)?;
                let mut rates = schedule();
                for step in 0..5 {
                    model.backward(model.loss(&[step, step + 1]), 2)?;
                    model.step(rates.step())?;
                }
                Ok(weights(&model.into_module()?))
            });
            assert_eq!(sharded, plain, "{stage:?}, {world} ranks");
        }
    }
}

fn first_layer_trains(mut model: Mlp, trained: bool) -> Mlp {
    let first = model.layers.remove(0);
    let first = burn::nn::Linear {
        weight: first.weight.set_require_grad(trained),
        bias: first.bias.map(|bias| bias.set_require_grad(trained)),
    };
    model.layers.insert(0, first);
    model
}

/// Momentum, which would move a frozen weight on, and whose state must be there when it is thawed.
#[test]
fn a_layer_frozen_and_thawed_trains_on_as_in_a_plain_loop() {
    let optimizer = || {
        let momentum = MomentumConfig::new().with_dampening(0.0);
        SgdConfig::new().with_momentum(Some(momentum)).init()
    };
    let (mut plain, mut own) = (mlp(), optimizer());
    let mut ends = Vec::new();
    for step in 0..7 {
        plain = first_layer_trains(plain, !(2..5).contains(&step));
        plain = plain_step(plain, &mut own, 0.1, &[step, step + 1]);
        ends.push(weights(&plain));
    }
    assert_eq!(ends[1][0], ends[4][0]);
    assert_ne!(ends[4][0], ends[5][0]);
    // At stage 3 `update` is refused, as `parts` has it.
    for stage in [Stage::One, Stage::Two] {
        for world in DOUBLINGS {
            let sharded = agree(world, |communicator| {
                let zero = ZeroConfig::new(stage).with_ddp(caps(20, 60));
                let mut model = zero.init(mlp(), optimizer(), communicator)?;
                let mut ends = Vec::new();
                for step in 0..7 {
                    model.update(|module| first_layer_trains(module, !(2..5).contains(&step)))?;
                    model.backward(model.loss(&[step, step + 1]), 2)?;
                    model.step(0.1)?;
                    ends.push(seen(model.module()));
                }
                Ok(ends)
            });
            assert_eq!(sharded, ends, "{stage:?}, {world} ranks");
        }
    }
}

/// Two parameters whose gradients are what the test says.
#[derive(Module, Debug)]
struct Free {
    left: Param<Tensor<1>>,
    right: Param<Tensor<1>>,
}

impl Free {
    fn new() -> Self {
        Self {
            left: Param::from_tensor(vector(&[1.0, 2.0])),
            right: Param::from_tensor(vector(&[3.0, 4.0, 5.0])),
        }
    }

    fn loss(&self, slopes: [f32; 5]) -> Tensor<1> {
        let left = self.left.val() * vector(&slopes[..2]);
        let right = self.right.val() * vector(&slopes[2..]);
        left.sum() + right.sum()
    }

    fn values(&self) -> [f32; 5] {
        let all = [values(self.left.val()), values(self.right.val())].concat();
        all.try_into().unwrap()
    }
}

/// A bucket for each parameter, so that a norm is one over buckets too.
fn free(stage: Stage, config: DdpConfig) -> ZeroConfig {
    ZeroConfig::new(stage).with_ddp(DdpConfig {
        first_bucket_mb: 0.0,
        bucket_cap_mb: 0.0,
        ..config
    })
}

#[test]
fn the_norm_is_that_of_all_parts_of_all_parameters_in_whole_numbers() {
    // 4 + 16 + 25 + 36 = 81, over two buckets of which more than five ranks own parts.
    let slopes = [2.0, 4.0, 5.0, 6.0, 0.0];
    for stage in Stage::ALL {
        for world in 1..=6 {
            let (norm, end) = agree(world, |communicator| {
                let zero = free(stage, DdpConfig::new().with_max_grad_norm(4.5));
                let optimizer = SgdConfig::new().init();
                let mut model = zero.init(Free::new(), optimizer, communicator)?;
                model.backward(model.loss(slopes), 1)?;
                let norm = model.last_step().grad_norm;
                model.step(1.0)?;
                Ok((norm, model.into_module()?.values()))
            });
            assert_eq!(norm, Some(9.0), "{stage:?}, {world} ranks");
            let factor = (4.5 / (9.0 + 1e-6)) as f32;
            let clipped = slopes.map(|slope: f32| slope * factor);
            let due = Free::new().values().into_iter().zip(clipped);
            let due: Vec<f32> = due.map(|(value, slope)| value - slope).collect();
            assert_eq!(end, due[..], "{stage:?}, {world} ranks");
        }
    }
}

#[test]
fn a_rank_without_rows_takes_part_and_counts_for_nothing() {
    for stage in Stage::ALL {
        let end = agree(3, |communicator| {
            // Rank 1 runs on a stand-in, whose loss is no number.
            let slope = [2.0, f32::NAN, 4.0][communicator.rank()];
            let rows = [1, 0, 3][communicator.rank()];
            let zero = free(stage, DdpConfig::new());
            let optimizer = SgdConfig::new().init();
            let mut model = zero.init(Free::new(), optimizer, communicator)?;
            model.backward(model.loss([slope; 5]), rows)?;
            assert!(!model.last_step().skipped);
            model.step(1.0)?;
            Ok(model.into_module()?.values())
        });
        // (1 x 2 + 3 x 4) / 4.
        let due = Free::new().values().map(|value| value - 3.5);
        assert_eq!(end, due, "{stage:?}");
    }
}

#[test]
fn micro_batches_are_one_reduction_at_every_stage() {
    for stage in Stage::ALL {
        let end = agree(3, |communicator| {
            let rank = communicator.rank();
            let zero = free(stage, DdpConfig::new());
            let optimizer = SgdConfig::new().init();
            let mut model = zero.init(Free::new(), optimizer, communicator)?;
            let kind = match stage {
                Stage::One => Collective::AllReduce,
                Stage::Two | Stage::Three => Collective::ReduceScatter,
            };
            for _ in 0..2 {
                let before = model.stats()?.of(kind).calls;
                // Slope and rows of each; one of rank 1 is a stand-in.
                let batches = [
                    [(1.0, 1), (2.0, 3)],
                    [(4.0, 1), (9.0, 0)],
                    [(5.0, 2), (7.0, 1)],
                ];
                model.accumulate(batches[rank], |model, (slope, samples)| {
                    (model.loss([slope; 5]), samples)
                })?;
                // A bucket for each parameter, and none for a micro-batch.
                let calls = model.stats()?.of(kind).calls - before;
                assert_eq!(calls, 2, "{stage:?}");
                model.step(1.0)?;
            }
            Ok(model.into_module()?.values())
        });
        // (1 + 6 + 4 + 10 + 7) / 8 = 3.5, twice.
        let due = Free::new().values().map(|value| value - 7.0);
        assert_eq!(end, due, "{stage:?}");
    }
}

/// On rank 1 alone a gradient is no number, in what belongs to rank 0; then all is well again.
#[test]
fn a_step_left_out_is_left_out_of_the_optimizers_state_too() {
    let slopes = |step: usize| [1.0, 2.0, 3.0, 4.0, step as f32];
    let run = |stage, bad: Option<usize>| {
        agree(2, |communicator| {
            let rank = communicator.rank();
            let zero = free(stage, DdpConfig::new());
            let optimizer = AdamConfig::new().init();
            let mut model = zero.init(Free::new(), optimizer, communicator)?;
            for step in 0..4 {
                let mut slopes = slopes(step);
                if bad == Some(step) && rank == 1 {
                    slopes[0] = f32::NAN;
                }
                if bad.is_none() && step == 2 {
                    continue;
                }
                model.backward(model.loss(slopes), 1)?;
                model.step(0.1)?;
            }
            Ok(model.into_module()?.values())
        })
    };
    for stage in Stage::ALL {
        assert_eq!(run(stage, Some(2)), run(stage, None), "{stage:?}");
    }
}
