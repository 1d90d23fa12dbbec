//! One rank's replica of the model, with its optimizer and its rows.
use std::{
    ops::Sub,
    time::{Duration, Instant},
};

use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor, TensorData};
use clap::ValueEnum;
use collectives::{Collective, Communicator, Partition};
use ddp::{DdpConfig, DistributedDataParallel, StepRecord};
use zero::{ShardedDataParallel, Stage, ZeroConfig};

use super::super::BenchError;
use crate::model::tensor;
use crate::{Mlp, Optim, OptimizerKind, Precision, SplitMix64, optimizer};

const SEED: u64 = 7;

/// What makes a step of gradients; PyTorch's constants, for all contenders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StepOptimizer {
    /// Gradient descent with momentum 0.9, at 0.01
    Momentum,
    /// Adam, at 0.001
    Adam,
}

impl StepOptimizer {
    /// As on the command line and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Momentum => "momentum",
            Self::Adam => "adam",
        }
    }

    fn rate(self) -> f64 {
        match self {
            Self::Momentum => 0.01,
            Self::Adam => 0.001,
        }
    }

    fn make(self) -> ModuleOptimizer {
        optimizer(&Optim {
            kind: match self {
                Self::Momentum => OptimizerKind::Momentum,
                Self::Adam => OptimizerKind::Adam,
            },
            lr: self.rate(),
            momentum: 0.9,
            weight_decay: 0.0,
        })
    }
}

/// Which model, how it is stepped, and on how many rows a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Training {
    /// Widths, from features to classes.
    pub(super) layers: Vec<usize>,
    /// Rows of each rank's batch.
    pub(super) batch: usize,
    /// What makes a step of gradients.
    pub(super) optimizer: StepOptimizer,
}

impl Training {
    /// Weights and biases.
    pub(super) fn parameters(&self) -> usize {
        let pairs = self.layers.windows(2);
        pairs.map(|pair| (pair[0] + 1) * pair[1]).sum()
    }

    /// A model that trains by itself on the rows of the ranks in `places`.
    pub(super) fn alone(&self, ranks: std::ops::Range<usize>) -> Replica {
        let device = Device::flex().autodiff();
        let body = Body::Alone {
            model: Some(Box::new(self.model(&device))),
            optimizer: self.optimizer.make(),
        };
        self.replica(body, ranks, 1)
    }

    /// A model that trains with those of the other ranks in the communicator's world, on the rows
    /// of the ranks in `places`.
    ///
    /// # Errors
    ///
    /// Those of [`DdpConfig::init`].
    pub(super) fn wrapped(
        &self,
        config: &DdpConfig,
        communicator: Communicator,
        ranks: std::ops::Range<usize>,
    ) -> Result<Replica, BenchError> {
        let device = Device::flex().autodiff();
        let model = config.init(self.model(&device), communicator)?;
        let pieces = model.shards().map_or(1, |shards| shards.own().len());
        let body = Body::Wrapped {
            model: Box::new(model),
            optimizer: self.optimizer.make(),
        };
        Ok(self.replica(body, ranks, pieces))
    }

    /// The same, sharded.
    ///
    /// # Errors
    ///
    /// Those of [`ZeroConfig::init`].
    pub(super) fn sharded(
        &self,
        stage: Stage,
        config: DdpConfig,
        communicator: Communicator,
        ranks: std::ops::Range<usize>,
    ) -> Result<Replica, BenchError> {
        let device = Device::flex().autodiff();
        let config = ZeroConfig::new(stage).with_ddp(config);
        let model = config.init(self.model(&device), self.optimizer.make(), communicator)?;
        Ok(self.replica(Body::Sharded(Box::new(model)), ranks, 1))
    }

    fn replica(&self, body: Body, ranks: std::ops::Range<usize>, pieces: usize) -> Replica {
        Replica {
            body,
            rows: self.rows(ranks, pieces, &Device::flex().autodiff()),
            rate: self.optimizer.rate(),
        }
    }

    fn model(&self, device: &Device) -> Mlp {
        Mlp::new(&self.layers, SEED, Precision::F32, device)
    }

    /// Made-up rows, the same at every call; each rank has its own.
    fn rows(&self, ranks: std::ops::Range<usize>, pieces: usize, device: &Device) -> Rows {
        let [features, classes] = [self.layers[0], self.layers[self.layers.len() - 1]];
        let count = ranks.len() * self.batch;
        let values = ranks.flat_map(|rank| {
            let mut random = SplitMix64::new(SEED + 1 + rank as u64);
            (0..self.batch * features).map(move |_| random.uniform(-1.0, 1.0))
        });
        let shape = [count, features];
        let targets: Vec<i64> = (0..count).map(|row| (row % classes) as i64).collect();
        Rows {
            features: tensor(values.collect(), shape, Precision::F32, device),
            targets: Tensor::from_data(TensorData::new(targets, [count]), device),
            criterion: CrossEntropyLossConfig::new().init(device),
            count,
            pieces,
        }
    }
}

/// One model that is trained again and again on the same rows.
pub(super) struct Replica {
    body: Body,
    rows: Rows,
    rate: f64,
}

enum Body {
    Alone {
        /// Away only while the optimizer has it.
        model: Option<Box<Mlp>>,
        optimizer: ModuleOptimizer,
    },
    Wrapped {
        model: Box<DistributedDataParallel<Mlp>>,
        optimizer: ModuleOptimizer,
    },
    /// It owns its optimizer.
    Sharded(Box<ShardedDataParallel<Mlp>>),
}

struct Rows {
    features: Tensor<2>,
    targets: Tensor<1, Int>,
    criterion: CrossEntropyLoss,
    count: usize,
    /// Backward passes to make of them.
    pieces: usize,
}

/// Where the time of a step goes on this rank's training thread, and what its record says of
/// communication. The first four add up to the step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Seen {
    /// The forward passes; with what they wait for, where parameters are gathered in them.
    pub(super) forward: Duration,
    /// The backward passes, less what communication kept the thread; with what they wait for, where
    /// parameters are gathered in them.
    pub(super) backward: Duration,
    /// Waiting after the backward pass.
    pub(super) exposed: Duration,
    /// The optimizer's step; with what follows it there, where parts are gathered.
    pub(super) update: Duration,
    /// What [`Replica::moved`] says of it.
    pub(super) moved: Moved,
    /// Reductions, start to end.
    pub(super) reducing: Duration,
    /// The part of them inside the backward pass.
    pub(super) inside: Duration,
    /// Reductions of gradients.
    pub(super) buckets: usize,
}

/// Communication of one rank, by its communicator's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Moved {
    /// All-gathers, start to end, wherever they ran.
    pub(super) gathering: Duration,
    /// Bytes that left the rank.
    pub(super) sent: u64,
}

impl Replica {
    /// Forward pass, backward pass, optimizer.
    ///
    /// # Errors
    ///
    /// Those of data-parallel training.
    pub(super) fn step(&mut self) -> Result<Seen, BenchError> {
        let (rows, rate) = (&self.rows, self.rate);
        let began = Instant::now();
        let mut forward = Duration::ZERO;
        let mut pass = |model: &Mlp, piece| {
            let began = Instant::now();
            let loss = rows.loss(model, piece);
            forward += began.elapsed();
            loss
        };
        match &mut self.body {
            Body::Alone {
                model: slot,
                optimizer,
            } => {
                let Some(model) = slot.take() else {
                    return Ok(Seen::default());
                };
                let (loss, _) = pass(&model, 0);
                let gradients = GradientsParams::from_grads(loss.backward(), &*model);
                let passed = Instant::now();
                *slot = Some(Box::new(optimizer.step(rate, *model, gradients)));
                Ok(Seen {
                    forward,
                    backward: (passed - began).saturating_sub(forward),
                    update: passed.elapsed(),
                    ..Seen::default()
                })
            }
            Body::Wrapped { model, optimizer } => {
                let gradients = model.accumulate(0..rows.pieces, pass)?;
                let passed = Instant::now();
                model.step(rate, optimizer, gradients)?;
                let update = passed.elapsed();
                Ok(Seen::new(
                    forward,
                    passed - began,
                    update,
                    model.last_step(),
                ))
            }
            Body::Sharded(model) => {
                model.accumulate(0..rows.pieces, pass)?;
                let passed = Instant::now();
                model.step(rate)?;
                let update = passed.elapsed();
                Ok(Seen::new(
                    forward,
                    passed - began,
                    update,
                    model.last_step(),
                ))
            }
        }
    }

    /// What has been moved since the replica was made, once the communication that has been begun
    /// is over.
    ///
    /// # Errors
    ///
    /// Those of data-parallel training.
    pub(super) fn moved(&self) -> Result<Moved, BenchError> {
        let stats = match &self.body {
            Body::Alone { .. } => return Ok(Moved::default()),
            Body::Wrapped { model, .. } => model.stats()?,
            Body::Sharded(model) => model.stats()?,
        };
        Ok(Moved {
            gathering: stats.of(Collective::AllGather).time,
            sent: stats.total().bytes_sent,
        })
    }
}

impl Sub for Moved {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            gathering: self.gathering - before.gathering,
            sent: self.sent - before.sent,
        }
    }
}

impl Rows {
    /// The mean loss of one of the pieces, and its rows.
    fn loss(&self, model: &Mlp, piece: usize) -> (Tensor<1>, usize) {
        let range = Partition::new(self.count, self.pieces).range(piece);
        let features = self.features.clone().slice([range.clone()]);
        let targets = self.targets.clone().slice([range.clone()]);
        let loss = self.criterion.forward(model.forward(features), targets);
        (loss, range.len())
    }
}

impl Seen {
    /// Of a step whose passes took so long with all that they waited for.
    fn new(forward: Duration, passes: Duration, update: Duration, record: &StepRecord) -> Self {
        let buckets = record.buckets.iter();
        let reducing = buckets.map(|bucket| bucket.end - bucket.start);
        let reducing = reducing.sum::<Duration>();
        Self {
            forward,
            backward: passes.saturating_sub(forward + record.exposed),
            exposed: record.exposed,
            update,
            moved: Moved::default(),
            reducing,
            inside: reducing.mul_f64(record.hidden()),
            buckets: record.buckets.len(),
        }
    }

    pub(super) fn and(self, other: Self) -> Self {
        Self {
            forward: self.forward + other.forward,
            backward: self.backward + other.backward,
            exposed: self.exposed + other.exposed,
            update: self.update + other.update,
            moved: Moved {
                gathering: self.moved.gathering + other.moved.gathering,
                sent: self.moved.sent + other.moved.sent,
            },
            reducing: self.reducing + other.reducing,
            inside: self.inside + other.inside,
            buckets: other.buckets,
        }
    }
}
