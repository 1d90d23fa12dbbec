//! One rank's replica of the model, with its optimizer and its rows.
use std::time::Duration;

use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor, TensorData};
use collectives::{Communicator, Partition};
use ddp::{DdpConfig, DistributedDataParallel};

use crate::model::tensor;
use crate::{Mlp, Optim, OptimizerKind, Precision, SplitMix64, optimizer};

const SEED: u64 = 7;
const RATE: f64 = 0.01;

/// Which model, and on how many rows a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Training {
    /// Widths, from features to classes.
    pub(super) layers: Vec<usize>,
    /// Rows of each rank's batch.
    pub(super) batch: usize,
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
        Replica {
            body: Body::Alone(Some(Box::new(self.model(&device)))),
            rows: self.rows(ranks, &device),
        }
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
    ) -> ddp::Result<Replica> {
        let device = Device::flex().autodiff();
        let model = config.init(self.model(&device), communicator)?;
        Ok(Replica {
            rows: Rows {
                pieces: model.shards().map_or(1, |shards| shards.own().len()),
                ..self.rows(ranks, &device)
            },
            body: Body::Wrapped(Box::new(model)),
        })
    }

    fn model(&self, device: &Device) -> Mlp {
        Mlp::new(&self.layers, SEED, Precision::F32, device)
    }

    /// Made-up rows, the same at every call; each rank has its own.
    fn rows(&self, ranks: std::ops::Range<usize>, device: &Device) -> Rows {
        let [features, classes] = [self.layers[0], self.layers[self.layers.len() - 1]];
        let count = ranks.len() * self.batch;
        let values = ranks.flat_map(|rank| {
            let mut random = SplitMix64::new(SEED + 1 + rank as u64);
            (0..self.batch * features).map(move |_| random.uniform(-1.0, 1.0))
        });
        let shape = [count, features];
        let targets: Vec<i64> = (0..count).map(|row| (row % classes) as i64).collect();
        let optim = Optim {
            kind: OptimizerKind::Momentum,
            lr: RATE,
            momentum: 0.9,
            weight_decay: 0.0,
        };
        Rows {
            features: tensor(values.collect(), shape, Precision::F32, device),
            targets: Tensor::from_data(TensorData::new(targets, [count]), device),
            criterion: CrossEntropyLossConfig::new().init(device),
            optimizer: optimizer(&optim),
            count,
            pieces: 1,
        }
    }
}

/// One model that is trained again and again on the same rows.
pub(super) struct Replica {
    body: Body,
    rows: Rows,
}

enum Body {
    /// Away only while the optimizer has it.
    Alone(Option<Box<Mlp>>),
    Wrapped(Box<DistributedDataParallel<Mlp>>),
}

struct Rows {
    features: Tensor<2>,
    targets: Tensor<1, Int>,
    criterion: CrossEntropyLoss,
    optimizer: ModuleOptimizer,
    count: usize,
    /// Backward passes to make of them.
    pieces: usize,
}

/// What a step says of its communication; times of this rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Seen {
    /// Waiting after the backward pass.
    pub(super) exposed: Duration,
    /// All-reduces, start to end.
    pub(super) reducing: Duration,
    /// The part of them inside the backward pass.
    pub(super) inside: Duration,
    /// All-reduces of gradients.
    pub(super) buckets: usize,
}

impl Replica {
    /// Forward pass, backward pass, optimizer.
    ///
    /// # Errors
    ///
    /// Those of data-parallel training.
    pub(super) fn step(&mut self) -> ddp::Result<Seen> {
        let rows = &mut self.rows;
        let (features, targets) = (rows.features.clone(), rows.targets.clone());
        match &mut self.body {
            Body::Alone(slot) => {
                if let Some(model) = slot.take() {
                    let loss = rows.criterion.forward(model.forward(features), targets);
                    let gradients = GradientsParams::from_grads(loss.backward(), &*model);
                    let model = rows.optimizer.step(RATE, *model, gradients);
                    *slot = Some(Box::new(model));
                }
                Ok(Seen::default())
            }
            Body::Wrapped(model) => {
                let cut = Partition::new(rows.count, rows.pieces);
                let gradients = model.accumulate(0..rows.pieces, |model, piece| {
                    let piece = cut.range(piece);
                    let features = features.clone().slice([piece.clone()]);
                    let targets = targets.clone().slice([piece.clone()]);
                    let loss = rows.criterion.forward(model.forward(features), targets);
                    (loss, piece.len())
                })?;
                model.step(RATE, &mut rows.optimizer, gradients)?;
                let record = model.last_step();
                let reducing = record
                    .buckets
                    .iter()
                    .map(|bucket| bucket.end - bucket.start);
                let reducing = reducing.sum::<Duration>();
                Ok(Seen {
                    exposed: record.exposed,
                    reducing,
                    inside: reducing.mul_f64(record.hidden()),
                    buckets: record.buckets.len(),
                })
            }
        }
    }
}

impl Seen {
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            exposed: self.exposed + other.exposed,
            reducing: self.reducing + other.reducing,
            inside: self.inside + other.inside,
            buckets: other.buckets,
        }
    }
}
