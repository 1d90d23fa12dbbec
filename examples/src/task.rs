//! What `mlp` trains on: the data, cut into global batches, as tensors.

use std::ops::Range;

use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use collectives::{Partition, Place};
use ddp::{Batch, DistributedSampler, Shards};
use zero::Stage;

use crate::model::tensor;
use crate::{ConfigError, DataSet, Error, Mlp, Samples, Settings, digits, mnist_folder, synthetic};

/// Settings and the data they name, fitted to each other.
#[derive(Debug, Clone)]
pub struct Task {
    settings: Settings,
    data: DataSet,
}

impl Task {
    /// Checks the settings, loads the data and holds the first and last layer
    /// against them.
    ///
    /// # Errors
    /// [`Error::Config`] and [`Error::Data`].
    ///
    /// ```
    /// use examples::{Settings, Task};
    ///
    /// let mut settings = Settings::compare();
    /// settings.model.layers = vec![64, 32, 11];
    /// let error = Task::new(settings).unwrap_err();
    /// assert!(error.to_string().contains("10 last"), "{error}");
    /// ```
    pub fn new(settings: Settings) -> Result<Self, Error> {
        settings.check()?;
        let folder = &settings.data.dir;
        let data = if settings.data.synthetic {
            synthetic(settings.run.seed)
        } else if folder.as_os_str().is_empty() {
            digits()
        } else {
            mnist_folder(folder, settings.data.pixel_scale)?
        };
        let (width, classes) = (data.train.width(), data.classes);
        let layers = &settings.model.layers;
        if layers.first() != Some(&width) || layers.last() != Some(&classes) {
            return Err(Error::Config(ConfigError::Value {
                key: "model.layers".to_owned(),
                value: format!("{layers:?}"),
                allowed: format!(
                    "{} has {width} features and {classes} classes, so {width} must come first \
                     and {classes} last",
                    data.name
                ),
            }));
        }
        Ok(Self { settings, data })
    }

    /// The settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The data.
    pub fn data(&self) -> &DataSet {
        &self.data
    }

    /// Steps of one pass over the training rows.
    pub fn steps_per_epoch(&self) -> usize {
        let batch = self.settings.train.global_batch_size;
        self.data.train.len().div_ceil(batch)
    }

    /// Steps of the whole run.
    pub fn steps(&self) -> usize {
        match self.settings.train.steps {
            0 => self
                .settings
                .train
                .epochs
                .saturating_mul(self.steps_per_epoch()),
            steps => steps,
        }
    }

    /// The same with another number of steps.
    pub(crate) fn with_steps(mut self, steps: usize) -> Self {
        self.settings.train.steps = steps;
        self
    }

    /// Weights and biases of the model.
    pub fn parameters(&self) -> usize {
        let layers = self.settings.model.layers.windows(2);
        layers.map(|pair| (pair[0] + 1) * pair[1]).sum()
    }

    /// The start that all modes and ranks share.
    pub(crate) fn model(&self, device: &Device) -> Mlp {
        let model = &self.settings.model;
        Mlp::new(&model.layers, self.settings.run.seed, model.dtype, device)
    }

    /// This place's batches for the whole run, shuffled anew each epoch.
    pub(crate) fn batches(&self, place: Place) -> ddp::Result<impl Iterator<Item = Batch>> {
        let rows = self.data.train.len();
        let batch = self.settings.train.global_batch_size;
        let sampler = DistributedSampler::new(rows, batch, place)?;
        let mut sampler = sampler.with_shuffle(self.settings.run.seed);
        if self.settings.ddp.micro_shards > 0 {
            sampler = sampler.with_micro_shards(self.settings.ddp.micro_shards)?;
        }
        Ok(std::iter::repeat_with(move || sampler.epoch())
            .flatten()
            .take(self.steps()))
    }

    /// Training rows as features `[rows, width]` and targets `[rows]`.
    pub(crate) fn train_rows(
        &self,
        rows: &[usize],
        device: &Device,
    ) -> (Tensor<2>, Tensor<1, Int>) {
        let samples = &self.data.train;
        let targets: Vec<i64> = rows
            .iter()
            .map(|&row| i64::from(samples.labels()[row]))
            .collect();
        let targets = TensorData::new(targets, [rows.len()]);
        (
            self.features(samples, rows, device),
            Tensor::from_data(targets, device),
        )
    }

    /// The backward passes that a rank makes of its batch: its micro-shards if bits are to be equal
    /// at every world size, else as many as are to be accumulated. That is fewer where rows are few,
    /// but not at stage 3, where all ranks make as many: there the rest are stand-ins.
    pub(crate) fn micro_batches(&self, batch: &Batch, stage: Option<Stage>) -> Vec<Batch> {
        if self.settings.ddp.micro_shards > 0 {
            return batch.micro_shards();
        }
        let due = self.settings.train.accumulate;
        let mut pieces = batch.micro_batches(due);
        if stage == Some(Stage::Three) {
            let mut stand_in = batch.clone();
            stand_in.rows.truncate(1);
            stand_in.samples = 0;
            pieces.resize(due, stand_in);
        }
        pieces
    }

    /// The mean loss of `model` over training rows.
    pub(crate) fn loss(&self, model: &Mlp, rows: &[usize], device: &Device) -> Tensor<1> {
        self.loss_of(model, self.train_rows(rows, device), device)
    }

    /// The mean cross-entropy of `model` over features and targets.
    pub(crate) fn loss_of(
        &self,
        model: &Mlp,
        (features, targets): (Tensor<2>, Tensor<1, Int>),
        device: &Device,
    ) -> Tensor<1> {
        let criterion = CrossEntropyLossConfig::new().init(device);
        criterion.forward(model.forward(features), targets)
    }

    /// This place's test rows: all ranks together test each row once. In as many parts as the rank
    /// has micro-shards.
    pub(crate) fn test_parts(&self, place: Place) -> Vec<Range<usize>> {
        let rows = self.data.test.len();
        match Shards::new(self.settings.ddp.micro_shards, place) {
            Ok(shards) => {
                let cut = Partition::new(rows, shards.count());
                shards.own().map(|shard| cut.range(shard)).collect()
            }
            Err(_) => vec![Partition::new(rows, place.world).range(place.rank)],
        }
    }

    /// Share of some test rows that the model puts into the right class; 0 of none. Every part of
    /// every rank takes as many forward passes, as stage 3 needs it; one without rows runs on a
    /// stand-in.
    pub(crate) fn accuracy(&self, model: &Mlp, rows: Range<usize>, device: &Device) -> f64 {
        /// Rows at a time, to bound memory.
        const CHUNK: usize = 1000;
        let samples = &self.data.test;
        if samples.is_empty() {
            return 0.0;
        }
        let parts = match self.settings.ddp.micro_shards {
            0 => self.settings.run.world_size,
            shards => shards,
        };
        let longest = Partition::new(samples.len(), parts).range(0).len();
        let passes = longest.div_ceil(CHUNK).max(1);
        let cut = Partition::new(rows.len(), passes);
        let right: usize = (0..passes)
            .map(|pass| {
                let chunk = cut.range(pass);
                let own: Vec<usize> = chunk.map(|at| rows.start + at).collect();
                let shown = if own.is_empty() { &[0][..] } else { &own };
                let logits = model.forward(self.features(samples, shown, device));
                let classes = logits.argmax(1).into_data();
                let pairs = classes.iter::<i64>().zip(own);
                pairs
                    .filter(|(class, row)| *class == i64::from(samples.labels()[*row]))
                    .count()
            })
            .sum();
        right as f64 / rows.len().max(1) as f64
    }

    fn features(&self, samples: &Samples, rows: &[usize], device: &Device) -> Tensor<2> {
        let values: Vec<f64> = rows
            .iter()
            .flat_map(|&row| samples.row(row).iter().copied().map(f64::from))
            .collect();
        let shape = [rows.len(), samples.width()];
        tensor(values, shape, self.settings.model.dtype, device)
    }
}
