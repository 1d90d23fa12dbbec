//! `mlp memory`.

use std::path::PathBuf;

use clap::Args;

use super::Flags;
use super::mlp::Named;
use crate::{ConfigError, Preset, Settings, resolve};

/// Flags of `mlp memory`. Each lies over the setting of the same name in the file given by `--config`.
#[derive(Args, Debug)]
pub struct MemoryFlags {
    /// A TOML file of settings; --print-config shows them all.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the settings in force, defaults included, as TOML and stop.
    #[arg(long)]
    print_config: bool,
    /// Other defaults: wide is 784-2048x8-10, 31.0 M parameters.
    #[arg(long)]
    preset: Option<Named>,
    /// Ranks, one run of ddp and of every stage for each [default: 1,2,4,8].
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    world_size: Option<Vec<usize>>,
    /// Widths: features, hidden layers, classes.
    #[arg(long, value_name = "N,N,...", value_delimiter = ',')]
    layers: Option<Vec<usize>>,
    /// Numbers to compute with: f32 or f64.
    #[arg(long)]
    dtype: Option<String>,
    /// adam or adamw.
    #[arg(long)]
    optimizer: Option<String>,
    /// Largest bucket of gradients, in units of 2^20 bytes; 0 gives each parameter its own.
    #[arg(long, value_name = "MB")]
    bucket_cap_mb: Option<f64>,
    /// Largest first bucket.
    #[arg(long, value_name = "MB")]
    first_bucket_mb: Option<f64>,
    /// Only predict, and count what lies there; no allocator.
    #[arg(long)]
    no_measure: bool,
    /// Draw the table to FILE.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

impl MemoryFlags {
    /// Defaults, preset, file and flags together.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn settings(&self) -> Result<Settings, ConfigError> {
        let defaults = match self.preset {
            Some(Named::Wide) => Settings::memory().with_preset(Preset::Wide),
            None => Settings::memory(),
        };
        let mut flags = Flags::default();
        flags.add(
            "--world-size",
            "memory.world_sizes",
            self.world_size.clone(),
        );
        flags.add("--layers", "model.layers", self.layers.clone());
        flags.add("--dtype", "model.dtype", self.dtype.clone());
        flags.add("--optimizer", "optim.kind", self.optimizer.clone());
        flags.number("--bucket-cap-mb", "ddp.bucket_cap_mb", self.bucket_cap_mb);
        let first = self.first_bucket_mb;
        flags.number("--first-bucket-mb", "ddp.first_bucket_mb", first);
        let measure = self.no_measure.then_some(false);
        flags.add("--no-measure", "memory.measure", measure);
        let svg = self.svg.as_ref().map(|file| file.display().to_string());
        flags.add("--svg", "memory.svg", svg);
        let settings = resolve(&defaults, self.config.as_deref(), &flags.0)?.settle();
        settings.check()?;
        settings.check_memory()?;
        Ok(settings)
    }

    /// Whether to print the settings and stop.
    pub fn print_config(&self) -> bool {
        self.print_config
    }
}
