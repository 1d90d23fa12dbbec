//! Measures and verifies the collectives; see `--help`.
use std::{io::Write, process::ExitCode};

use examples::bench::{parse, run};

fn main() -> ExitCode {
    match run(&parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            // There is nobody left to tell if this fails.
            drop(writeln!(std::io::stderr(), "error: {error}"));
            ExitCode::from(error.exit_code())
        }
    }
}
