//! What a rank trains with: ddp and an optimizer of its own, or a part of one, by a stage of ZeRO.
//! The loops around it need not know which.

use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use collectives::{Communicator, Stats};
use ddp::{Batch, BucketPlan, DistributedDataParallel, StepRecord};
use zero::{MemoryReport, Result, ShardedDataParallel, Stage, ZeroConfig};

use crate::{Mlp, Task, optimizer};

/// One rank's model and optimizer.
pub(crate) enum Trainer {
    /// Both whole, on every rank.
    Whole(Box<Whole>),
    /// Sharded.
    Sharded(Box<ShardedDataParallel<Mlp>>),
}

pub(crate) struct Whole {
    model: DistributedDataParallel<Mlp>,
    optimizer: ModuleOptimizer,
    /// Of the last pass.
    gradients: Option<GradientsParams>,
}

impl Trainer {
    /// A collective call.
    pub(crate) fn new(
        task: &Task,
        stage: Option<Stage>,
        device: &Device,
        communicator: Communicator,
    ) -> Result<Self> {
        let settings = task.settings();
        let (model, optimizer) = (task.model(device), optimizer(&settings.optim));
        Ok(match stage {
            None => Self::Whole(Box::new(Whole {
                model: settings.ddp.init(model, communicator)?,
                optimizer,
                gradients: None,
            })),
            Some(stage) => {
                let config = ZeroConfig::new(stage).with_ddp(settings.ddp);
                Self::Sharded(Box::new(config.init(model, optimizer, communicator)?))
            }
        })
    }

    /// Runs the backward passes of a step, and keeps the means for [`step`](Self::step).
    pub(crate) fn accumulate(
        &mut self,
        micro_batches: Vec<Batch>,
        loss: impl FnMut(&Mlp, Batch) -> (Tensor<1>, usize),
    ) -> Result<()> {
        match self {
            Self::Whole(whole) => {
                whole.gradients = Some(whole.model.accumulate(micro_batches, loss)?);
                Ok(())
            }
            Self::Sharded(model) => model.accumulate(micro_batches, loss),
        }
    }

    pub(crate) fn step(&mut self, lr: f64) -> Result<()> {
        match self {
            Self::Whole(whole) => {
                let gradients = whole.gradients.take().unwrap_or_default();
                Ok(whole.model.step(lr, &mut whole.optimizer, gradients)?)
            }
            Self::Sharded(model) => model.step(lr),
        }
    }

    /// Replaces the model by what `change` makes of it. Not at stage 3.
    pub(crate) fn update(&mut self, change: impl FnOnce(Mlp) -> Mlp) -> Result<()> {
        match self {
            Self::Whole(whole) => {
                whole.model.update(change);
                Ok(())
            }
            Self::Sharded(model) => model.update(change),
        }
    }

    /// The model to run forward on; at stage 3 by all ranks alike.
    pub(crate) fn module(&self) -> &Mlp {
        match self {
            Self::Whole(whole) => whole.model.module(),
            Self::Sharded(model) => model.module(),
        }
    }

    /// The model with all its values at hand. At stage 3 a collective call.
    pub(crate) fn whole(&self) -> Mlp {
        let module = self.module().clone();
        match self.is_in_parts() {
            true => module.materialize(),
            false => module,
        }
    }

    /// The plain model. At stage 3 a collective call.
    pub(crate) fn into_module(self) -> Result<Mlp> {
        match self {
            Self::Whole(whole) => Ok(whole.model.into_module()),
            Self::Sharded(model) => model.into_module(),
        }
    }

    fn is_in_parts(&self) -> bool {
        matches!(self, Self::Sharded(model) if model.stage() == Stage::Three)
    }

    pub(crate) fn last_step(&self) -> &StepRecord {
        match self {
            Self::Whole(whole) => whole.model.last_step(),
            Self::Sharded(model) => model.last_step(),
        }
    }

    pub(crate) fn stats(&self) -> Result<Stats> {
        match self {
            Self::Whole(whole) => Ok(whole.model.stats()?),
            Self::Sharded(model) => model.stats(),
        }
    }

    pub(crate) fn plan(&self) -> &BucketPlan {
        match self {
            Self::Whole(whole) => whole.model.plan(),
            Self::Sharded(model) => model.plan(),
        }
    }

    pub(crate) fn weighted_mean<const K: usize>(
        &mut self,
        parts: impl IntoIterator<Item = ([f64; K], usize)>,
    ) -> Result<[f64; K]> {
        match self {
            Self::Whole(whole) => Ok(whole.model.weighted_mean(parts)?),
            Self::Sharded(model) => model.weighted_mean(parts),
        }
    }

    /// What is held now, and what a step comes to.
    pub(crate) fn held(&self) -> Result<MemoryReport> {
        match self {
            Self::Whole(whole) => {
                let gradients = whole.gradients.as_ref();
                MemoryReport::of_ddp(&whole.model, &whole.optimizer, gradients)
            }
            Self::Sharded(model) => model.memory_report(),
        }
    }
}
