//! Training runs, sharded and not, whose ends are compared to the bit.
use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::{Tensor, TensorData};
use collectives::{Communicator, CommunicatorConfig, launch};
use ddp::{DdpConfig, DistributedSampler, StepRecord};
use zero::{Stage, ZeroConfig};

use crate::support::weights;

/// What is trained, and on what.
#[derive(Clone, Copy)]
pub(crate) struct Task<M> {
    pub(crate) model: fn() -> M,
    /// The mean over some rows.
    pub(crate) loss: fn(&M, &[usize]) -> Tensor<1>,
    pub(crate) optimizer: fn() -> ModuleOptimizer,
    pub(crate) rate: f64,
    pub(crate) rows: usize,
    pub(crate) global_batch: usize,
    pub(crate) epochs: usize,
}

/// How a run went: losses and norms of the steps, and the weights it ended with.
#[derive(Debug, PartialEq)]
pub(crate) struct End {
    pub(crate) losses: Vec<f64>,
    pub(crate) norms: Vec<Option<f64>>,
    pub(crate) weights: Vec<TensorData>,
}

impl End {
    fn new() -> Self {
        Self {
            losses: Vec::new(),
            norms: Vec::new(),
            weights: Vec::new(),
        }
    }

    fn note(&mut self, record: &StepRecord) {
        self.losses.push(record.loss);
        self.norms.push(record.grad_norm);
    }
}

/// One order of every sum.
pub(crate) fn deterministic() -> CommunicatorConfig {
    CommunicatorConfig::new().with_deterministic(true)
}

/// `f` on every rank; all must come to the same.
pub(crate) fn agree<R: Send + PartialEq + std::fmt::Debug>(
    world: usize,
    f: impl Fn(Communicator) -> zero::Result<R> + Sync,
) -> R {
    let mut ends = launch::spawn(world, &deterministic(), f).unwrap();
    let end = ends.swap_remove(0);
    assert!(ends.iter().all(|other| *other == end), "ranks differ");
    end
}

impl<M: Module> Task<M> {
    fn sampler(
        &self,
        communicator: &Communicator,
        shards: usize,
    ) -> ddp::Result<DistributedSampler> {
        let sampler = DistributedSampler::new(self.rows, self.global_batch, communicator.place())?;
        match shards {
            0 => Ok(sampler.with_shuffle(3)),
            _ => sampler.with_shuffle(3).with_micro_shards(shards),
        }
    }

    /// By ddp.
    pub(crate) fn ddp(&self, world: usize, config: DdpConfig) -> End {
        agree(world, |communicator| {
            let mut sampler = self.sampler(&communicator, config.micro_shards)?;
            let mut optimizer = (self.optimizer)();
            let mut model = config.init((self.model)(), communicator)?;
            let mut end = End::new();
            for _ in 0..self.epochs {
                for batch in sampler.epoch() {
                    let gradients = match config.micro_shards {
                        0 => model.backward((self.loss)(&model, &batch.rows), batch.samples)?,
                        _ => model.accumulate(batch.micro_shards(), |model, shard| {
                            ((self.loss)(model, &shard.rows), shard.samples)
                        })?,
                    };
                    end.note(model.last_step());
                    model.step(self.rate, &mut optimizer, gradients)?;
                }
            }
            end.weights = weights(&model.into_module());
            Ok(end)
        })
    }

    /// Sharded.
    pub(crate) fn zero(&self, stage: Stage, world: usize, config: DdpConfig) -> End {
        agree(world, |communicator| {
            let mut sampler = self.sampler(&communicator, config.micro_shards)?;
            let zero = ZeroConfig::new(stage).with_ddp(config);
            let mut model = zero.init((self.model)(), (self.optimizer)(), communicator)?;
            let mut end = End::new();
            for _ in 0..self.epochs {
                for batch in sampler.epoch() {
                    match config.micro_shards {
                        0 => model.backward((self.loss)(&model, &batch.rows), batch.samples)?,
                        _ => model.accumulate(batch.micro_shards(), |model, shard| {
                            ((self.loss)(model, &shard.rows), shard.samples)
                        })?,
                    }
                    end.note(model.last_step());
                    model.step(self.rate)?;
                }
            }
            end.weights = weights(&model.into_module()?);
            Ok(end)
        })
    }

    /// Every stage ends where ddp does, to the bit.
    pub(crate) fn check(
        &self,
        name: &str,
        worlds: std::ops::RangeInclusive<usize>,
        config: DdpConfig,
    ) {
        for world in worlds {
            let whole = self.ddp(world, config);
            assert!(whole.losses.iter().all(|loss| loss.is_finite()), "{name}");
            for stage in Stage::ALL {
                let sharded = self.zero(stage, world, config);
                assert_eq!(sharded, whole, "{name}, {stage:?}, {world} ranks");
            }
        }
    }
}

/// All float parameters of a module as a forward pass sees them, in visiting order.
pub(crate) fn seen<M: Module>(module: &M) -> Vec<TensorData> {
    weights(&module.clone().materialize())
}
