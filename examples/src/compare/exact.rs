//! Every bit against the single process's, and the first that differs.

use collectives::Choice;

use super::Fault;
use super::ranks::{self, RankRun};
use super::single::{self, Reference};
use crate::{Error, Precision, Task};

/// Where a run first parts from the reference, in words; None if it nowhere does.
pub(super) fn first_difference(
    task: &Task,
    choice: &Choice,
    fault: Option<Fault>,
    reference: &Reference,
    runs: &[RankRun],
) -> Result<Option<String>, Error> {
    let (run, world) = (&runs[0], runs.len());
    let precision = task.settings().model.dtype;
    for (step, expected) in reference.losses.iter().enumerate() {
        let Some(got) = run.losses.get(step) else {
            return Ok(Some(format!("there is no step {}", step + 1)));
        };
        if got.to_bits() != expected.to_bits() {
            return Ok(Some(format!(
                "first different bits in the loss of step {}: {} instead of {}",
                step + 1,
                bits(*got, Precision::F64),
                bits(*expected, Precision::F64)
            )));
        }
        let pairs = run.hashes[step].iter().zip(&reference.hashes[step]);
        if let Some(at) = { pairs }.position(|(got, expected)| got != expected) {
            // The values are those of a run that ends with this step.
            let short = task.clone().with_steps(step + 1);
            let expected = single::run(&short)?.weights;
            let again = ranks::run(&short, choice, world, fault)?;
            let pair = again[0].weights.first_difference(&expected, at);
            return Ok(Some(match pair {
                Some((name, index, got, expected)) => format!(
                    "first different bits after step {}, in {name}, element {index}: {} instead of \
                     {}",
                    step + 1,
                    bits(got, precision),
                    bits(expected, precision)
                ),
                None => format!(
                    "first different bits after step {}, in {}; they were equal when run again",
                    step + 1,
                    expected.name(at)
                ),
            }));
        }
    }
    Ok(None)
}

fn bits(value: f64, precision: Precision) -> String {
    match precision {
        Precision::F32 => format!("0x{:08x} ({value})", (value as f32).to_bits()),
        Precision::F64 => format!("0x{:016x} ({value})", value.to_bits()),
    }
}
