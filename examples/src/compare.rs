//! Data-parallel training held against a single process, step by step.

mod clip;
mod exact;
mod fault;
mod mode;
mod ranks;
mod shards;
mod single;
mod traffic;
mod verdict;

pub use fault::Fault;
pub use mode::Mode;
pub use traffic::Traffic;
pub(crate) use verdict::tolerance;
pub use verdict::{ModeReport, Verdict};

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::{Error, Task};
use mode::TREE;

/// Runs the modes one after another, each from the same start over the same
/// global batches, and hands each report to `done` as soon as it is there. A
/// data-parallel mode runs once for each of [`Settings::world_sizes`](crate::Settings::world_sizes).
///
/// The single process always runs, as the measure of the others, and `ddp:tree` as that of sharded
/// modes, unless everything is held against the single process to the bit; they are
/// reported if they are among the modes. `fault` breaks every mode but the single process, and
/// never a measure.
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
    // Runs of ddp by the tree, at each world size.
    let mut whole = HashMap::new();
    for mode in modes {
        let mut report = |report: ModeReport| {
            done(&report);
            reports.push(report);
        };
        let Some(way) = mode.way() else {
            report(verdict::of_single(&reference));
            continue;
        };
        for world in task.settings().world_sizes_of(mode) {
            let runs = ranks::run(task, way, world, fault)?;
            let exact = task.settings().compare.exact;
            let mut difference = match exact {
                true => exact::first_difference(task, way, fault, &reference, &runs)?,
                false => None,
            };
            if way.stage.is_some() && !exact {
                let measure = match whole.entry(world) {
                    Entry::Occupied(run) => run.into_mut(),
                    Entry::Vacant(room) => room.insert(ranks::run(task, TREE, world, None)?),
                };
                difference = exact::from_ddp(measure, &runs);
            }
            report(verdict::of_ranks(
                task, mode, way, &reference, &runs, difference,
            ));
            if way.is_tree() && fault.is_none() {
                whole.insert(world, runs);
            }
        }
    }
    Ok(reports)
}
