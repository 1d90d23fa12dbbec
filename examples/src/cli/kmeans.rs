//! `kmeans fit`.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use super::Flags;
use crate::{ConfigError, KMeansSettings, resolve};

/// Clusters rows that lie on several ranks.
#[derive(Parser, Debug)]
#[command(name = "kmeans")]
pub struct KMeansCli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Run Lloyd's iteration until no centroid moves, one all-reduce an iteration.
    Fit(FitFlags),
}

#[derive(Args, Debug)]
struct FitFlags {
    /// A TOML file of settings; --print-config shows them all.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the settings in force, defaults included, as TOML and stop.
    #[arg(long)]
    print_config: bool,
    /// CSV of numbers, no header, one row a line; needs --init [default: embedded Iris].
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// CSV of starting centroids [default, for the embedded Iris: its rows 146, 1 and 90].
    #[arg(long, value_name = "FILE")]
    init: Option<PathBuf>,
    /// Clusters [default: as many as the start has rows].
    #[arg(long)]
    k: Option<usize>,
    /// Stop when no centroid moved farther than this.
    #[arg(long)]
    epsilon: Option<f64>,
    /// Stop after this many iterations in any case.
    #[arg(long, value_name = "N")]
    max_iter: Option<usize>,
    /// Ranks, one thread each.
    #[arg(long, value_name = "N")]
    world_size: Option<usize>,
    /// Algorithm of all collectives: auto, ring, tree, halving, direct or naive.
    #[arg(long)]
    algorithm: Option<String>,
    /// What auto goes by: a file that `bench crossover` wrote.
    #[arg(long, value_name = "FILE")]
    tuning: Option<PathBuf>,
    /// Seconds that a collective may take.
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<f64>,
    /// JSON on standard output: an object for each iteration, then one for the result.
    #[arg(long)]
    json: bool,
}

impl KMeansCli {
    fn flags(&self) -> &FitFlags {
        let Command::Fit(flags) = &self.command;
        flags
    }

    /// Defaults, file and flags together.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn settings(&self) -> Result<KMeansSettings, ConfigError> {
        let given = self.flags();
        let mut flags = Flags::default();
        let path = |path: &PathBuf| path.display().to_string();
        flags.add("--data", "data.file", given.data.as_ref().map(path));
        flags.add("--init", "data.init", given.init.as_ref().map(path));
        flags.add("--k", "run.k", given.k);
        flags.number("--epsilon", "run.epsilon", given.epsilon);
        flags.add("--max-iter", "run.max_iter", given.max_iter);
        flags.add("--world-size", "run.world_size", given.world_size);
        flags.number("--timeout", "collectives.timeout_s", given.timeout);
        flags.algorithm(given.algorithm.clone());
        flags.tuning(given.tuning.as_deref())?;
        let defaults = KMeansSettings::default();
        let settings = resolve(&defaults, given.config.as_deref(), &flags.0)?;
        settings.check()?;
        Ok(settings)
    }

    /// Whether to print the settings and stop.
    pub fn print_config(&self) -> bool {
        self.flags().print_config
    }

    /// Whether standard output is for programs.
    pub fn json(&self) -> bool {
        self.flags().json
    }
}
