//! What the binaries do once the command line is parsed: run, and print.

mod compare;
mod kmeans;
mod memory;
mod train;

pub use compare::run_compare;
pub use kmeans::run_kmeans;
pub use memory::run_memory;
pub use train::run_train;

use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;
use std::sync::OnceLock;

use crate::Error;

/// 0 for a run that passed, 1 for one that did not; for an error, its line on
/// standard error and its code.
pub fn exit_code(outcome: Result<bool, Error>) -> ExitCode {
    if let (Ok(_), Some(reason)) = (&outcome, UNSAID.get()) {
        drop(writeln!(
            std::io::stderr(),
            "error: standard output: cannot be written: {reason}"
        ));
        return ExitCode::FAILURE;
    }
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            // There is nobody left to tell if this fails.
            drop(writeln!(std::io::stderr(), "error: {error}"));
            ExitCode::from(error.exit_code())
        }
    }
}

/// A line on standard output.
fn say(line: impl Display) {
    // `println!` would panic when a reader such as `head` has gone; the run
    // has its exit code all the same. A full disk is another matter.
    if let Err(error) = writeln!(std::io::stdout(), "{line}")
        && error.kind() != std::io::ErrorKind::BrokenPipe
    {
        UNSAID.get_or_init(|| error.to_string());
    }
}

/// Why a line could not be written, the first time.
static UNSAID: OnceLock<String> = OnceLock::new();

/// A share as a percentage.
fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

/// "1 bucket", "3 buckets".
fn counted(count: usize, what: &str) -> String {
    match count {
        1 => format!("1 {what}"),
        _ => format!("{count} {what}s"),
    }
}

/// Layer widths with repetitions counted: 784-2048x8-10.
fn widths(layers: &[usize]) -> String {
    let runs = layers
        .chunk_by(|left, right| left == right)
        .map(|run| match run {
            [width] => width.to_string(),
            _ => format!("{}x{}", run[0], run.len()),
        });
    runs.collect::<Vec<_>>().join("-")
}
