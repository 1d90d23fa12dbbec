//! The settings of `mlp`.

use std::fmt;
use std::path::{Path, PathBuf};

use collectives::CommunicatorConfig;
use ddp::DdpConfig;
use serde::{Deserialize, Serialize};
use zero::{Stage, ZeroConfig};

use super::{ConfigError, MemorySettings};
use crate::Mode;
use crate::trace::drawing_path;

/// Everything `mlp` can be told, one field a section of the TOML file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// `[run]`
    pub run: Run,
    /// `[data]`
    pub data: Data,
    /// `[model]`
    pub model: Model,
    /// `[optim]`
    pub optim: Optim,
    /// `[train]`
    pub train: Train,
    /// `[compare]`, read by `mlp compare` only
    pub compare: Compare,
    /// `[collectives]`
    pub collectives: CommunicatorConfig,
    /// `[ddp]`
    pub ddp: DdpConfig,
    /// `[zero]`, read by `mlp train` only
    pub zero: Zero,
    /// `[log]`, read by `mlp train` only
    pub log: Log,
    /// `[memory]`, read by `mlp memory` only
    pub memory: MemorySettings,
}

/// `[run]`: who computes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// Starting weights, the order of rows and synthetic data follow from it.
    pub seed: u64,
    /// Ranks, one thread each.
    pub world_size: usize,
}

/// `[data]`: what is learned.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Data {
    /// A folder in the format of MNIST; empty for the embedded digits (or for
    /// synthetic rows, with the preset `wide`).
    pub dir: PathBuf,
    /// Largest pixel value in that folder, by which pixels are divided. The
    /// embedded digits are divided by 16, whatever this says.
    pub pixel_scale: f64,
    /// Rows that are made up instead of read.
    pub synthetic: bool,
}

/// `[model]`: a chain of linear layers with ReLU between.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Widths: features, hidden layers, classes.
    pub layers: Vec<usize>,
    /// Numbers to compute with.
    pub dtype: Precision,
}

/// `f32` or `f64`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 24 bits of mantissa.
    F32,
    /// 53 bits of mantissa.
    F64,
}

impl Precision {
    /// `value` as a number of this precision.
    pub(crate) fn round(self, value: f64) -> f64 {
        match self {
            Self::F32 => f64::from(value as f32),
            Self::F64 => value,
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
        })
    }
}

/// `[optim]`: how weights follow gradients. PyTorch's constants where Burn's
/// differ; see [`crate::optimizer`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Optim {
    /// Which rule.
    pub kind: OptimizerKind,
    /// Learning rate.
    pub lr: f64,
    /// Momentum factor, read by `momentum` only.
    pub momentum: f64,
    /// Weight decay: added to the gradient, or decoupled with `adamw`.
    pub weight_decay: f64,
}

/// Which rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// Plain gradient descent.
    Sgd,
    /// Gradient descent with momentum.
    Momentum,
    /// Adam.
    Adam,
    /// Adam with decoupled weight decay.
    AdamW,
}

impl fmt::Display for OptimizerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sgd => "sgd",
            Self::Momentum => "momentum",
            Self::Adam => "adam",
            Self::AdamW => "adamw",
        })
    }
}

/// `[train]`: how long.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Train {
    /// Rows a step, over all ranks.
    pub global_batch_size: usize,
    /// Passes over the data; read if `steps` is 0.
    pub epochs: usize,
    /// Steps, whatever they make in epochs; 0 leaves it to `epochs`.
    pub steps: usize,
    /// Backward passes that each rank makes of its rows in a step, before one reduction.
    pub accumulate: usize,
}

/// `[zero]`: what each rank holds only a part of.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Zero {
    /// The stage; in TOML a number, of which 0 is none: ddp, with all on every rank.
    #[serde(with = "stage")]
    pub stage: Option<Stage>,
}

/// A stage as a number, or 0.
mod stage {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};
    use zero::Stage;

    pub(super) fn serialize<S: Serializer>(
        stage: &Option<Stage>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.serialize_u8(stage.map_or(0, u8::from))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Stage>, D::Error> {
        let number = i64::deserialize(from)?;
        let found = Stage::ALL.into_iter().map(Some).chain([None]);
        let number_of = |stage: &Option<Stage>| stage.map_or(0, u8::from);
        { found }
            .find(|stage| i64::from(number_of(stage)) == number)
            .ok_or_else(|| D::Error::custom("allowed is 0 (ddp), 1, 2 or 3"))
    }
}

/// `[compare]`: what is held against the single process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compare {
    /// `single`; `ddp:` and an algorithm or `auto`; or `zero:` and a stage, and `:` and an algorithm
    /// if that is not to be the ring.
    pub modes: Vec<String>,
    /// Largest difference of losses, per step, that still passes; 0 takes
    /// 1e-5 in f32 and 1e-10 in f64.
    pub tolerance: f64,
    /// Ranks of the data-parallel modes, one run each; empty for `run.world_size`, or, if `exact`,
    /// for 1, 2, 3, 4 and 8 as far as there are micro-shards.
    pub world_sizes: Vec<usize>,
    /// Whether every loss and weight must be the single process's to the bit. Needs
    /// `ddp.micro_shards`.
    pub exact: bool,
    /// Folder for the curves.
    pub out: PathBuf,
}

/// `[log]`: what a run writes down of itself. Empty is nothing.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Log {
    /// File for a [`Recording`](crate::Recording) of all threads; the step in the middle of the
    /// run is drawn beside it, with the extension `svg`.
    pub trace: PathBuf,
    /// File for a line of JSON a step and rank, as in `docs/records.md`.
    pub steps: PathBuf,
}

impl Log {
    /// Refuses files that would take each other's place.
    fn check(&self) -> Result<(), ConfigError> {
        if self.trace.as_os_str().is_empty() {
            return Ok(());
        }
        let drawing = drawing_path(&self.trace);
        let refused = |key, file: &Path, what| {
            let file = format!("{:?}", file.display().to_string());
            Err(ConfigError::value(key, file, what))
        };
        if self.trace == drawing {
            let what = "another extension: the drawing beside it takes svg";
            return refused("log.trace", &self.trace, what);
        }
        if same_file(&self.steps, &self.trace) || same_file(&self.steps, &drawing) {
            let what = "another file than those of log.trace";
            return refused("log.steps", &self.steps, what);
        }
        Ok(())
    }
}

/// Whether both paths lead to one file, also by other spellings and links.
fn same_file(left: &Path, right: &Path) -> bool {
    let real = |path: &Path| {
        let there = path.canonicalize();
        there.or_else(|_| std::path::absolute(path)).ok()
    };
    real(left).is_some_and(|left| real(right) == Some(left))
}

/// A bundle of defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preset {
    /// 784-2048x8-10 on synthetic rows: 31.0 M parameters, which fill buckets
    /// of the default size; one epoch with Adam, which is enough for rows so
    /// easy, on two ranks, which take 1.3 GB.
    Wide,
}

impl Settings {
    /// Defaults of `mlp train`: the digits, twenty epochs, plain SGD.
    pub fn train() -> Self {
        Self {
            run: Run {
                seed: 7,
                world_size: 4,
            },
            data: Data {
                dir: PathBuf::new(),
                pixel_scale: 255.0,
                synthetic: false,
            },
            model: Model {
                layers: vec![64, 128, 10],
                dtype: Precision::F32,
            },
            optim: Optim {
                kind: OptimizerKind::Sgd,
                lr: 0.1,
                momentum: 0.9,
                weight_decay: 0.0,
            },
            train: Train {
                global_batch_size: 32,
                epochs: 20,
                steps: 0,
                accumulate: 1,
            },
            compare: Compare {
                modes: [
                    "single", "ddp:ring", "ddp:tree", "zero:1", "zero:2", "zero:3",
                ]
                .map(str::to_owned)
                .to_vec(),
                tolerance: 0.0,
                world_sizes: Vec::new(),
                exact: false,
                out: PathBuf::from("target/lockstep"),
            },
            collectives: CommunicatorConfig::default(),
            ddp: DdpConfig::default(),
            zero: Zero::default(),
            log: Log::default(),
            memory: MemorySettings::default(),
        }
    }

    /// Defaults of `mlp compare`: 200 steps of 96 rows, which 2, 3, 4, 6 and 8
    /// ranks share evenly, and bucket caps so small that even this model of
    /// 9,610 parameters (38 kB) needs several buckets.
    pub fn compare() -> Self {
        let mut settings = Self::train();
        settings.train = Train {
            global_batch_size: 96,
            epochs: 0,
            steps: 200,
            accumulate: 1,
        };
        settings.ddp.first_bucket_mb = 0.001;
        settings.ddp.bucket_cap_mb = 0.006;
        settings
    }

    /// Defaults of `mlp compare --exact`: every algorithm that is not there to be plain, and every
    /// stage.
    pub fn exact() -> Self {
        let mut settings = Self::compare();
        let modes = [
            "single",
            "ddp:ring",
            "ddp:tree",
            "ddp:halving",
            "ddp:direct",
            "zero:1",
            "zero:2",
            "zero:3",
        ];
        settings.compare.modes = modes.map(str::to_owned).to_vec();
        settings.compare.exact = true;
        settings
    }

    /// These defaults, changed by a preset.
    pub fn with_preset(mut self, preset: Preset) -> Self {
        match preset {
            Preset::Wide => {
                self.data.synthetic = true;
                self.model.layers = [&[784][..], &[2048; 8], &[10]].concat();
                self.run.world_size = 2;
                self.optim.kind = OptimizerKind::Adam;
                self.optim.lr = 1e-4;
                self.train = Train {
                    global_batch_size: 128,
                    epochs: 0,
                    steps: 16,
                    accumulate: 1,
                };
                self.ddp = DdpConfig::default();
            }
        }
        self
    }

    /// The world sizes of the data-parallel modes of `compare`.
    pub fn world_sizes(&self) -> Vec<usize> {
        let shards = self.ddp.micro_shards;
        match (&self.compare.world_sizes[..], self.compare.exact) {
            ([], true) => [1, 2, 3, 4, 8]
                .into_iter()
                .filter(|&n| n <= shards)
                .collect(),
            ([], false) => vec![self.run.world_size],
            (sizes, _) => sizes.to_vec(),
        }
    }

    /// Those of one mode: the exact ones that nobody chose leave out what stage 3 cannot share out.
    pub(crate) fn world_sizes_of(&self, mode: &Mode) -> Vec<usize> {
        let mut sizes = self.world_sizes();
        if mode.stage() == Some(Stage::Three)
            && self.compare.exact
            && self.compare.world_sizes.is_empty()
        {
            sizes.retain(|&size| self.ddp.micro_shards.is_multiple_of(size));
        }
        sizes
    }

    /// Takes the modes out of `defaults` that these settings cannot have, if nobody chose others.
    pub(crate) fn fit_modes(&mut self, defaults: &Self) {
        if self.compare.modes != defaults.compare.modes {
            return;
        }
        let can = |name: &String| {
            let mode: Result<Mode, _> = name.parse();
            mode.is_ok_and(|mode| self.check_mode(&mode).is_ok())
        };
        let modes = self.compare.modes.iter().filter(|name| can(name));
        self.compare.modes = modes.cloned().collect();
    }

    /// Sets what follows from other settings: with micro-shards the ranks must continue one tree
    /// of sums.
    pub fn settle(mut self) -> Self {
        self.collectives.deterministic |= self.ddp.micro_shards > 0;
        self
    }

    /// Refuses what has the right type and makes no sense.
    ///
    /// # Errors
    /// [`ConfigError::Value`], naming the first such key and what is allowed.
    ///
    /// ```
    /// use examples::Settings;
    ///
    /// let mut settings = Settings::compare();
    /// assert!(settings.check().is_ok());
    /// settings.run.world_size = 0;
    /// let error = settings.check().unwrap_err().to_string();
    /// assert_eq!(error, "run.world_size = 0: allowed is 1 to 256 (one thread a rank)");
    /// ```
    pub fn check(&self) -> Result<(), ConfigError> {
        check_world_size("run.world_size", self.run.world_size)?;
        for &size in &self.compare.world_sizes {
            check_world_size("compare.world_sizes", size)?;
        }
        printable("run.seed", self.run.seed)?;
        printable(
            "train.global_batch_size",
            self.train.global_batch_size as u64,
        )?;
        printable("train.epochs", self.train.epochs as u64)?;
        printable("train.steps", self.train.steps as u64)?;
        let layers = &self.model.layers;
        if layers.len() < 2 || layers.contains(&0) {
            return Err(ConfigError::value(
                "model.layers",
                format!("{layers:?}"),
                "two or more widths of at least 1, features first and classes last",
            ));
        }
        let pairs = layers.windows(2);
        let parameters: u128 = pairs
            .map(|pair| (pair[0] as u128 + 1) * pair[1] as u128)
            .sum();
        if parameters > MOST_PARAMETERS {
            return Err(ConfigError::value(
                "model.layers",
                format!("{layers:?}"),
                format!("up to {MOST_PARAMETERS} parameters, not {parameters}"),
            ));
        }
        if self.train.global_batch_size == 0 {
            return Err(ConfigError::value(
                "train.global_batch_size",
                0,
                "1 or more rows",
            ));
        }
        if self.train.steps == 0 && self.train.epochs == 0 {
            return Err(ConfigError::value(
                "train.epochs",
                0,
                "1 or more, unless train.steps is set",
            ));
        }
        self.check_micro_batches()?;
        positive("optim.lr", self.optim.lr)?;
        not_negative("optim.momentum", self.optim.momentum)?;
        not_negative("optim.weight_decay", self.optim.weight_decay)?;
        positive("data.pixel_scale", self.data.pixel_scale)?;
        not_negative("compare.tolerance", self.compare.tolerance)?;
        self.log.check()?;
        not_negative("ddp.bucket_cap_mb", self.ddp.bucket_cap_mb)?;
        not_negative("ddp.first_bucket_mb", self.ddp.first_bucket_mb)?;
        self.ddp.validate().map_err(ConfigError::of_ddp)?;
        self.check_stage(self.zero.stage, &[self.run.world_size])?;
        self.collectives
            .validate()
            .map_err(ConfigError::of_collectives)
    }
}

impl Settings {
    /// Refuses what `compare` would pass over in silence.
    ///
    /// # Errors
    /// [`ConfigError::Value`].
    pub(crate) fn check_compare(&self) -> Result<(), ConfigError> {
        for (key, path) in [
            ("log.trace", &self.log.trace),
            ("log.steps", &self.log.steps),
        ] {
            if !path.as_os_str().is_empty() {
                let allowed = "nothing with compare: only train writes it";
                return Err(ConfigError::value(key, format!("{path:?}"), allowed));
            }
        }
        if let Some(stage) = self.zero.stage {
            let allowed = "0 with compare, whose modes name stages, as in --modes zero:2";
            return Err(ConfigError::value("zero.stage", u8::from(stage), allowed));
        }
        for mode in Mode::read(&self.compare.modes)? {
            self.check_mode(&mode)?;
        }
        let sizes = &self.compare.world_sizes;
        if (1..sizes.len()).any(|at| sizes[..at].contains(&sizes[at])) {
            let allowed = "each world size once";
            return Err(ConfigError::value(
                "compare.world_sizes",
                format!("{sizes:?}"),
                allowed,
            ));
        }
        if self.compare.exact && self.compare.tolerance > 0.0 {
            let allowed = "0 with compare.exact, which tolerates nothing";
            return Err(ConfigError::value(
                "compare.tolerance",
                self.compare.tolerance,
                allowed,
            ));
        }
        Ok(())
    }

    /// Of `usual` modes, those that these settings have not, since they cannot.
    pub(crate) fn modes_left_out(&self, usual: &[String]) -> Vec<String> {
        let left_out = |name: &&String| {
            let mode: Result<Mode, _> = name.parse();
            !self.compare.modes.contains(name)
                && mode.is_ok_and(|mode| self.check_mode(&mode).is_err())
        };
        usual.iter().filter(left_out).cloned().collect()
    }

    fn check_mode(&self, mode: &Mode) -> Result<(), ConfigError> {
        self.check_stage(mode.stage(), &self.world_sizes_of(mode))
    }

    /// Refuses what a stage cannot do at these world sizes.
    fn check_stage(&self, stage: Option<Stage>, worlds: &[usize]) -> Result<(), ConfigError> {
        let Some(stage) = stage else {
            return Ok(());
        };
        match ZeroConfig::new(stage).with_ddp(self.ddp).validate() {
            Err(zero::Error::Ddp(error)) => return Err(ConfigError::of_ddp(error)),
            Err(error) => {
                let number = u8::from(stage);
                return Err(ConfigError::value("zero.stage", number, error.to_string()));
            }
            Ok(()) => {}
        }
        let shards = self.ddp.micro_shards;
        let uneven = worlds.iter().find(|&&world| !shards.is_multiple_of(world));
        match uneven {
            Some(world) if stage == Stage::Three => {
                let allowed = format!(
                    "a multiple of {world} with stage 3 on {world} ranks, which all make as many \
                     forward passes"
                );
                Err(ConfigError::value("ddp.micro_shards", shards, allowed))
            }
            _ => Ok(()),
        }
    }

    fn check_micro_batches(&self) -> Result<(), ConfigError> {
        let (accumulate, shards) = (self.train.accumulate, self.ddp.micro_shards);
        if accumulate == 0 {
            return Err(ConfigError::value("train.accumulate", 0, "1 or more"));
        }
        if shards > 0 && accumulate > 1 {
            let allowed = "1 with ddp.micro_shards: the shards of a rank are its backward passes";
            return Err(ConfigError::value("train.accumulate", accumulate, allowed));
        }
        if self.compare.exact && shards == 0 {
            let allowed = "at least 1 with compare.exact: bits are equal at every world size only \
                           if the sums are cut alike";
            return Err(ConfigError::value("ddp.micro_shards", 0, allowed));
        }
        let worlds = self.world_sizes().into_iter();
        let largest = worlds.chain([self.run.world_size]).max().unwrap_or(1);
        // `compare.exact` with its default leaves out worlds that are too large.
        let largest = match self.compare.exact {
            true => self.world_sizes().into_iter().max().unwrap_or(1),
            false => largest,
        };
        if shards > 0 && shards < largest {
            let allowed = format!("at least one for each of {largest} ranks, or 0 for none");
            return Err(ConfigError::value("ddp.micro_shards", shards, allowed));
        }
        Ok(())
    }
}

/// Each rank holds all parameters, in 4 GB and as much again for gradients;
/// more is surely a slip.
const MOST_PARAMETERS: u128 = 1_000_000_000;

/// Each rank is a thread; more than this is surely a slip.
pub(super) fn check_world_size(key: &'static str, world_size: usize) -> Result<(), ConfigError> {
    match world_size {
        1..=256 => Ok(()),
        _ => Err(ConfigError::value(
            key,
            world_size,
            "1 to 256 (one thread a rank)",
        )),
    }
}

/// Refuses what could be printed as TOML and not be read again.
pub(super) fn printable(key: &'static str, value: u64) -> Result<(), ConfigError> {
    match i64::try_from(value) {
        Ok(_) => Ok(()),
        Err(_) => {
            let allowed = format!("0 to {}, TOML's largest integer", i64::MAX);
            Err(ConfigError::value(key, value, allowed))
        }
    }
}

fn positive(key: &'static str, value: f64) -> Result<(), ConfigError> {
    match value.is_finite() && value > 0.0 {
        true => Ok(()),
        false => Err(ConfigError::value(key, value, "a finite number above 0")),
    }
}

pub(super) fn not_negative(key: &'static str, value: f64) -> Result<(), ConfigError> {
    match value.is_finite() && value >= 0.0 {
        true => Ok(()),
        false => Err(ConfigError::value(
            key,
            value,
            "a finite number, 0 or above",
        )),
    }
}
