//! Every bit against the single process's, and the first that differs.

use super::Fault;
use super::mode::Way;
use super::ranks::{self, RankRun};
use super::single::{self, Reference};
use crate::{Error, Precision, Task};

/// Where a run first parts from the reference, in words; None if it nowhere does.
pub(super) fn first_difference(
    task: &Task,
    way: Way<'_>,
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
            let again = ranks::run(&short, way, world, fault)?;
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

/// Where sharded ranks first part from those of `ddp:tree`, which hold all that they hold a part of.
pub(super) fn from_ddp(whole: &[RankRun], runs: &[RankRun]) -> Option<String> {
    let (run, whole) = (&runs[0], &whole[0]);
    let differs = |step: &usize| run.losses[*step].to_bits() != whole.losses[*step].to_bits();
    let steps = run.losses.len().min(whole.losses.len());
    if let Some(step) = (0..steps).find(differs) {
        return Some(format!(
            "first other bits than ddp:tree's in the loss of step {}: {} instead of {}",
            step + 1,
            bits(run.losses[step], Precision::F64),
            bits(whole.losses[step], Precision::F64)
        ));
    }
    if run.losses.len() != whole.losses.len() {
        let (got, expected) = (run.losses.len(), whole.losses.len());
        return Some(format!("{got} steps instead of ddp:tree's {expected}"));
    }
    let parameters = 0..whole.weights.len();
    let mut found = parameters.filter_map(|at| run.weights.first_difference(&whole.weights, at));
    found.next().map(|(name, index, got, expected)| {
        format!(
            "ends with other bits than ddp:tree in {name}, element {index}: {} instead of {}",
            bits(got, Precision::F64),
            bits(expected, Precision::F64)
        )
    })
}

fn bits(value: f64, precision: Precision) -> String {
    match precision {
        Precision::F32 => format!("0x{:08x} ({value})", (value as f32).to_bits()),
        Precision::F64 => format!("0x{:016x} ({value})", value.to_bits()),
    }
}
