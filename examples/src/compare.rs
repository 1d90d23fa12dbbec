//! Data-parallel training held against a single process, step by step.

mod clip;
mod exact;
mod fault;
mod mode;
mod ranks;
mod shards;
mod single;
mod verdict;

pub use fault::Fault;
pub use mode::Mode;
pub(crate) use verdict::tolerance;
pub use verdict::{ModeReport, Verdict};

use crate::{Error, Task};

/// Runs the modes one after another, each from the same start over the same
/// global batches, and hands each report to `done` as soon as it is there. A
/// data-parallel mode runs once for each of [`Settings::world_sizes`](crate::Settings::world_sizes).
///
/// The single process always runs, as the measure of the others; it is
/// reported if it is among the modes. `fault` breaks every mode but it.
///
/// # Errors
/// [`Error`] for what keeps a mode from running; a mode that runs to another
/// end than the single process is no error but a verdict.
pub fn compare(
    task: &Task,
    modes: &[Mode],
    fault: Option<Fault>,
    mut done: impl FnMut(&ModeReport),
) -> Result<Vec<ModeReport>, Error> {
    let reference = single::run(task)?;
    let mut reports = Vec::new();
    for mode in modes {
        let mut report = |report: ModeReport| {
            done(&report);
            reports.push(report);
        };
        match mode {
            Mode::Single => report(verdict::of_single(&reference)),
            Mode::Ddp(choice) => {
                for world in task.settings().world_sizes() {
                    let runs = ranks::run(task, choice, world, fault)?;
                    let difference = match task.settings().compare.exact {
                        true => exact::first_difference(task, choice, fault, &reference, &runs)?,
                        false => None,
                    };
                    let of_ranks =
                        verdict::of_ranks(task, mode, choice, &reference, &runs, difference);
                    report(of_ranks);
                }
            }
        }
    }
    Ok(reports)
}
