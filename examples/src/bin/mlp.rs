//! `mlp compare`, `mlp train` and `mlp memory`; see `--help`.

use std::process::ExitCode;

use clap::Parser;
use examples::{Allocated, Error, MlpCli, MlpCommand, run_compare, run_memory, run_train};

fn main() -> ExitCode {
    let outcome: Result<bool, Error> = match MlpCli::parse().command {
        MlpCommand::Compare(flags) => run_compare(&flags),
        MlpCommand::Train(flags) => run_train(&flags),
        MlpCommand::Memory(flags) => run_memory(&flags, count),
    };
    examples::exit_code(outcome)
}

fn count(work: &mut dyn FnMut()) -> Allocated {
    let counted = allocation_counter::measure(work);
    Allocated {
        left: counted.bytes_current,
        most: counted.bytes_max,
    }
}
