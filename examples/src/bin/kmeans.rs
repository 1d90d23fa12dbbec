//! `kmeans fit`; see `--help`.

use std::process::ExitCode;

use clap::Parser;
use examples::{KMeansCli, run_kmeans};

fn main() -> ExitCode {
    examples::exit_code(run_kmeans(&KMeansCli::parse()))
}
