//! `mlp compare` and `mlp train`; `mlp memory` has its flags in a file of its own.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use super::{Flags, MemoryFlags};
use crate::{ConfigError, Fault, Preset, Settings, resolve};

/// Trains a small neural network on several ranks at once.
#[derive(Parser, Debug)]
#[command(name = "mlp")]
pub struct MlpCli {
    /// What to do.
    #[command(subcommand)]
    pub command: MlpCommand,
}

/// What `mlp` does.
#[derive(Subcommand, Debug)]
pub enum MlpCommand {
    /// Train data-parallel and in a single process from the same start, and
    /// hold the loss curves against each other. Exit code 1 if a verdict fails.
    Compare(CompareFlags),
    /// Train data-parallel and test on rows not trained on.
    Train(TrainFlags),
    /// Hold what each rank holds at every stage of ZeRO, and the most that a step comes to, against the
    /// formulas. Exit code 1 if it is not as predicted.
    Memory(MemoryFlags),
}

/// Flags of both commands. Each lies over the setting of the same name in the
/// file given by `--config`.
#[derive(Args, Debug)]
struct Shared {
    /// A TOML file of settings; --print-config shows them all.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the settings in force, defaults included, as TOML and stop.
    #[arg(long)]
    print_config: bool,
    /// Ranks, one thread each.
    #[arg(long, value_name = "N")]
    world_size: Option<usize>,
    /// Starting weights, row order and synthetic rows follow from it.
    #[arg(long)]
    seed: Option<u64>,
    /// Folder with the four files of MNIST, plain or .gz [default: embedded digits].
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Largest pixel value in that folder [default: 255].
    #[arg(long, value_name = "VALUE")]
    pixel_scale: Option<f64>,
    /// Widths: features, hidden layers, classes.
    #[arg(long, value_name = "N,N,...", value_delimiter = ',')]
    layers: Option<Vec<usize>>,
    /// Numbers to compute with: f32 or f64.
    #[arg(long)]
    dtype: Option<String>,
    /// sgd, momentum, adam or adamw, with PyTorch's constants.
    #[arg(long)]
    optimizer: Option<String>,
    /// Learning rate.
    #[arg(long)]
    lr: Option<f64>,
    /// Momentum factor, with --optimizer momentum.
    #[arg(long)]
    momentum: Option<f64>,
    /// Weight decay.
    #[arg(long)]
    weight_decay: Option<f64>,
    /// Rows a step, over all ranks.
    #[arg(long, value_name = "ROWS")]
    global_batch: Option<usize>,
    /// Steps, whatever they make in epochs; 0 goes by --epochs.
    #[arg(long, value_name = "N")]
    steps: Option<usize>,
    /// Passes over the data.
    #[arg(long, value_name = "N")]
    epochs: Option<usize>,
    /// Backward passes that each rank makes of its rows in a step, before one reduction.
    #[arg(long, value_name = "N")]
    accumulate: Option<usize>,
    /// Cut each global batch into V micro-shards: the same bits for every number of ranks up to V.
    #[arg(long, value_name = "V")]
    micro_shards: Option<usize>,
    /// Largest norm over all gradients; 0 for no limit.
    #[arg(long, value_name = "NORM")]
    max_grad_norm: Option<f64>,
    /// How gradients travel: all_reduce, bf16 or fp16 (half the bytes), or noop (not at all).
    #[arg(long, value_name = "HOOK")]
    comm_hook: Option<String>,
    /// Steps between two comparisons of all ranks' weights; 0 for none.
    #[arg(long, value_name = "STEPS")]
    check_replicas_every: Option<u64>,
    /// Largest bucket of gradients, in units of 2^20 bytes; 0 gives each parameter its own.
    #[arg(long, value_name = "MB")]
    bucket_cap_mb: Option<f64>,
    /// Largest first bucket.
    #[arg(long, value_name = "MB")]
    first_bucket_mb: Option<f64>,
    /// Reduce during the backward pass (on) or after it (off).
    #[arg(long, value_name = "on|off")]
    overlap: Option<Switch>,
    /// What auto goes by: a file that `bench crossover` wrote.
    #[arg(long, value_name = "FILE")]
    tuning: Option<PathBuf>,
    /// Seconds that a collective may take.
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<f64>,
}

/// On or off.
#[derive(ValueEnum, Debug, Clone, Copy)]
enum Switch {
    On,
    Off,
}

impl Shared {
    fn flags(&self) -> Result<Flags, ConfigError> {
        let mut flags = Flags::default();
        let path = |path: &PathBuf| path.display().to_string();
        flags.add("--world-size", "run.world_size", self.world_size);
        flags.add("--seed", "run.seed", self.seed);
        flags.add("--data", "data.dir", self.data.as_ref().map(path));
        let read = self.data.as_ref().map(|_| false);
        flags.add("--data", "data.synthetic", read);
        flags.number("--pixel-scale", "data.pixel_scale", self.pixel_scale);
        flags.add("--layers", "model.layers", self.layers.clone());
        flags.add("--dtype", "model.dtype", self.dtype.clone());
        flags.add("--optimizer", "optim.kind", self.optimizer.clone());
        flags.number("--lr", "optim.lr", self.lr);
        flags.number("--momentum", "optim.momentum", self.momentum);
        flags.number("--weight-decay", "optim.weight_decay", self.weight_decay);
        flags.add(
            "--global-batch",
            "train.global_batch_size",
            self.global_batch,
        );
        // Epochs count only if no steps are set, and a file or a preset may
        // have set some; a flag is the last word.
        let by_epochs = match (self.epochs, self.steps) {
            (Some(_), None) => Some(0),
            _ => self.steps,
        };
        flags.add("--steps", "train.steps", by_epochs);
        flags.add("--epochs", "train.epochs", self.epochs);
        flags.add("--accumulate", "train.accumulate", self.accumulate);
        flags.add("--micro-shards", "ddp.micro_shards", self.micro_shards);
        flags.number("--max-grad-norm", "ddp.max_grad_norm", self.max_grad_norm);
        flags.add("--comm-hook", "ddp.comm_hook", self.comm_hook.clone());
        flags.add(
            "--check-replicas-every",
            "ddp.check_replicas_every",
            self.check_replicas_every,
        );
        flags.number("--bucket-cap-mb", "ddp.bucket_cap_mb", self.bucket_cap_mb);
        flags.number(
            "--first-bucket-mb",
            "ddp.first_bucket_mb",
            self.first_bucket_mb,
        );
        let overlap = self.overlap.map(|switch| matches!(switch, Switch::On));
        flags.add("--overlap", "ddp.overlap", overlap);
        flags.number("--timeout", "collectives.timeout_s", self.timeout);
        flags.tuning(self.tuning.as_deref())?;
        Ok(flags)
    }
}

/// Flags of `mlp compare`.
#[derive(Args, Debug)]
pub struct CompareFlags {
    #[command(flatten)]
    shared: Shared,
    /// single; ddp: and an algorithm or auto; or zero: and a stage, by ring unless :ALGORITHM follows
    /// [default: single,ddp:ring,ddp:tree,zero:1,zero:2,zero:3].
    #[arg(long, value_name = "MODE,...", value_delimiter = ',')]
    modes: Option<Vec<String>>,
    /// Largest difference of losses that passes [default: 1e-5 in f32, 1e-10 in f64].
    #[arg(long)]
    tolerance: Option<f64>,
    /// World sizes, one run of each data-parallel mode for each.
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    world_sizes: Option<Vec<usize>>,
    /// Hold every loss and every weight against the single process's by ==; needs --micro-shards.
    /// Modes are then single, ddp:ring, ddp:tree, ddp:halving, ddp:direct, zero:1, zero:2, zero:3
    /// unless set.
    #[arg(long)]
    exact: bool,
    /// Folder for the curves.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// One JSON object a mode and line, and nothing else, on standard output.
    #[arg(long)]
    json: bool,
    /// Make a mistake on purpose, so that the verdict can be seen to fail.
    #[arg(long, hide = true, value_name = "FAULT")]
    inject: Option<Injected>,
}

/// Names of [`Fault`]s.
#[derive(ValueEnum, Debug, Clone, Copy)]
enum Injected {
    SumForMean,
    NoAllReduce,
    PlainMean,
    FullBatch,
    OneBit,
}

impl CompareFlags {
    /// Defaults, file and flags together, changed so that an injected fault
    /// shows.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn settings(&self) -> Result<Settings, ConfigError> {
        let mut flags = self.shared.flags()?;
        flags.add("--modes", "compare.modes", self.modes.clone());
        flags.number("--tolerance", "compare.tolerance", self.tolerance);
        flags.add(
            "--world-sizes",
            "compare.world_sizes",
            self.world_sizes.clone(),
        );
        flags.add("--exact", "compare.exact", self.exact.then_some(true));
        let out = self.out.as_ref().map(|out| out.display().to_string());
        flags.add("--out", "compare.out", out);
        let file = self.shared.config.as_deref();
        let defaults = match self.exact {
            true => Settings::exact(),
            false => Settings::compare(),
        };
        let mut settings = resolve(&defaults, file, &flags.0)?.settle();
        settings.check()?;
        settings.fit_modes(&defaults);
        settings.check_compare()?;
        if let Some(fault) = self.fault() {
            fault.prepare(&mut settings)?;
        }
        Ok(settings)
    }

    /// Whether to print the settings and stop.
    pub fn print_config(&self) -> bool {
        self.shared.print_config
    }

    /// Whether standard output is for programs.
    pub fn json(&self) -> bool {
        self.json
    }

    /// The mistake to make.
    pub fn fault(&self) -> Option<Fault> {
        self.inject.map(|injected| match injected {
            Injected::SumForMean => Fault::SumForMean,
            Injected::NoAllReduce => Fault::NoAllReduce,
            Injected::PlainMean => Fault::PlainMean,
            Injected::FullBatch => Fault::FullBatch,
            Injected::OneBit => Fault::OneBit,
        })
    }
}

/// Flags of `mlp train`.
#[derive(Args, Debug)]
pub struct TrainFlags {
    #[command(flatten)]
    shared: Shared,
    /// Algorithm of all collectives: auto, ring, tree, halving, direct or naive.
    #[arg(long)]
    algorithm: Option<String>,
    /// What each rank holds only a part of, by ZeRO: 0 nothing (ddp), 1 the optimizer's state, 2 also
    /// gradients, 3 also parameters.
    #[arg(long, value_name = "0|1|2|3", allow_negative_numbers = true)]
    zero_stage: Option<i64>,
    /// Other defaults: wide is 784-2048x8-10 on synthetic rows, 31.0 M parameters.
    #[arg(long)]
    preset: Option<Named>,
    /// Write what every thread did when to FILE, for Perfetto, and draw a step beside it, as .svg.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Write a line of JSON a step and rank to FILE.
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
}

/// Names of [`Preset`]s.
#[derive(ValueEnum, Debug, Clone, Copy)]
pub(super) enum Named {
    Wide,
}

impl TrainFlags {
    /// Defaults, preset, file and flags together.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn settings(&self) -> Result<Settings, ConfigError> {
        let defaults = match self.preset {
            Some(Named::Wide) => Settings::train().with_preset(Preset::Wide),
            None => Settings::train(),
        };
        let mut flags = self.shared.flags()?;
        flags.algorithm(self.algorithm.clone());
        flags.add("--zero-stage", "zero.stage", self.zero_stage);
        let path = |path: &PathBuf| path.display().to_string();
        flags.add("--trace", "log.trace", self.trace.as_ref().map(path));
        flags.add("--log", "log.steps", self.log.as_ref().map(path));
        let settings = resolve(&defaults, self.shared.config.as_deref(), &flags.0)?.settle();
        settings.check()?;
        Ok(settings)
    }

    /// Whether to print the settings and stop.
    pub fn print_config(&self) -> bool {
        self.shared.print_config
    }
}
