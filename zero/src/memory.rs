//! What a rank holds: predicted by formula, and counted.
use std::fmt::{self, Display, Formatter};

use serde::{Deserialize, Serialize};

use crate::Stage;
use crate::pieces::Pieces;
use crate::trial::Kept;

/// Bytes that one rank holds between a backward pass and its step.
///
/// Made by [`ShardedDataParallel::memory_report`](crate::ShardedDataParallel::memory_report). The
/// model's activations, and parameters that are not trained, are not in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryReport {
    /// The rank.
    pub rank: usize,
    /// The stage.
    pub stage: Stage,
    /// By the formula, whatever has happened so far.
    pub predicted: Memory,
    /// Of what is there now: gradients after a backward pass, state after the first step.
    pub measured: Memory,
    /// The most that a backward pass holds beside that, and beside what Burn does: buckets that are
    /// filling and under way, and at stage 3 the parameters that are in use and those being gathered.
    pub in_flight: usize,
}

/// Bytes of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Of trained parameters.
    pub parameters: usize,
    /// Of their gradients.
    pub gradients: usize,
    /// Of the optimizer's state.
    pub state: usize,
}

impl Memory {
    /// All of them.
    ///
    /// ```
    /// let memory = zero::Memory { parameters: 4, gradients: 4, state: 8 };
    /// assert_eq!(memory.total(), 16);
    /// ```
    pub fn total(&self) -> usize {
        self.parameters + self.gradients + self.state
    }

    /// What this rank holds at `stage`, if the optimizer has `kept` such things of each slot.
    pub(crate) fn predict(stage: Stage, pieces: &Pieces, kept: &[Kept]) -> Self {
        let plan = pieces.plan();
        let mut memory = Self::default();
        for bucket in 0..plan.len() {
            let size = plan.dtype(bucket).bytes();
            let (whole, part) = (
                plan.gradients_in(bucket) * size,
                pieces.part(bucket).len() * size,
            );
            memory.parameters += match stage {
                Stage::One | Stage::Two => whole,
                Stage::Three => part,
            };
            memory.gradients += match stage {
                Stage::One => plan.bytes(bucket),
                Stage::Two | Stage::Three => part,
            };
            for &slot in plan.slots_in(bucket) {
                memory.state += pieces.of(slot).len() * size * kept[slot].per_element;
            }
        }
        memory
    }
}

/// Beside what is held, the most of buckets at a time.
pub(crate) fn in_flight(stage: Stage, pieces: &Pieces) -> usize {
    let plan = pieces.plan();
    let bytes = |bucket| plan.bytes(bucket);
    let largest = (0..plan.len()).map(bytes).max().unwrap_or_default();
    match stage {
        // The buckets are the gradients.
        Stage::One => 0,
        Stage::Two => 2 * largest,
        Stage::Three => 4 * largest,
    }
}

/// The reports of all ranks as a table, in MB of 2^20 bytes.
///
/// ```
/// use zero::{Memory, MemoryReport, Stage};
/// let held = Memory { parameters: 4 << 20, gradients: 2 << 20, state: 4 << 20 };
/// let report = MemoryReport {
///     rank: 0, stage: Stage::Two, predicted: held, measured: held, in_flight: 1 << 20,
/// };
/// let table = zero::memory_table(&[report]);
/// assert!(table.lines().nth(1).unwrap().ends_with("10.00          10.00       1.00"));
/// ```
pub fn memory_table(reports: &[MemoryReport]) -> String {
    let head = "rank  stage  parameters  gradients      state      total      predicted  in flight";
    let rows = reports.iter().map(|report| format!("\n{report}"));
    head.to_owned() + &rows.collect::<String>()
}

impl Display for MemoryReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mb = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        let Memory {
            parameters,
            gradients,
            state,
        } = self.measured;
        write!(
            f,
            "{:>4}  {:>5}  {:>10.2}  {:>9.2}  {:>9.2}  {:>9.2}  {:>13.2}  {:>9.2}",
            self.rank,
            u8::from(self.stage),
            mb(parameters),
            mb(gradients),
            mb(state),
            mb(self.measured.total()),
            mb(self.predicted.total()),
            mb(self.in_flight)
        )
    }
}
