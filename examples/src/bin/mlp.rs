//! `mlp compare` and `mlp train`; see `--help`.

use std::process::ExitCode;

use clap::Parser;
use examples::{Error, MlpCli, MlpCommand, run_compare, run_train};

fn main() -> ExitCode {
    let outcome: Result<bool, Error> = match MlpCli::parse().command {
        MlpCommand::Compare(flags) => run_compare(&flags),
        MlpCommand::Train(flags) => run_train(&flags),
    };
    examples::exit_code(outcome)
}
