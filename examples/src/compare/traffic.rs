//! What a stage of ZeRO moves: by formula, and as counted.
//!
//! A unit is (N-1)/N of the model's bytes on each of N ranks. DDP all-reduces gradients: 2 units.
//! Stage 1 gathers what each rank has stepped beside that: 3. Stage 2 reduce-scatters instead: 2.
//! Stage 3 reduce-scatters, and gathers parameters in the forward pass and again in the backward
//! pass: 3, less what the backward pass does not need.

use collectives::{Algorithm, Choice};
use ddp::{BucketPlan, Hook, StepRecord};
use serde::Serialize;
use zero::Stage;

use super::mode::Way;
use super::ranks::RankRun;
use crate::moved::{KINDS, Moved};
use crate::{Precision, Task};

/// What one kind of collective moved in a whole run, all ranks together.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Traffic {
    /// Which.
    pub collective: &'static str,
    /// Bytes sent, counted where they pass the transport.
    pub bytes: u64,
    /// What they should have been: by the formula of the stage, or where that says nothing of this
    /// algorithm or these settings by that of the algorithm.
    pub bytes_formula: u64,
    /// Mean of a step and rank, in (N-1)/N of the model's bytes; 0 on one rank.
    pub units: f64,
}

/// The elements of each of [`KINDS`], by the formula of the stage, so far.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Expected {
    stage: Option<Stage>,
    passes: u64,
    /// All-reduced, reduce-scattered, gathered.
    elements: [u64; 3],
    /// Gathered as f64, beside the parameters.
    words: u64,
    /// Gathered as bytes.
    marks: u64,
}

impl Expected {
    /// None where more travels than the formulas have: narrow gradients, blocks of micro-shards, what
    /// a norm is made of, hashes of replicas.
    pub(super) fn of(task: &Task, way: Way<'_>) -> Option<Self> {
        let settings = task.settings();
        let ddp = &settings.ddp;
        let plain = ddp.comm_hook == Hook::AllReduce
            && ddp.max_grad_norm == 0.0
            && ddp.check_replicas_every == 0;
        plain.then_some(Self {
            stage: way.stage,
            passes: 0,
            elements: [0; 3],
            words: 0,
            marks: 0,
        })
    }

    /// One more step, over the buckets of `plan`.
    pub(super) fn add_step(&mut self, plan: &BucketPlan, record: &StepRecord, world: usize) {
        let sum = |of: &dyn Fn(usize) -> usize| (0..plan.len()).map(of).sum::<usize>() as u64;
        let gradients = sum(&|bucket| plan.gradients_in(bucket));
        let tails = sum(&|bucket| plan.elements(bucket)) - gradients;
        let stepped = u64::from(!record.skipped);
        let (world, passes) = (world as u64, record.micro_batches as u64);
        let [reduced, scattered, gathered] = match self.stage {
            None => [gradients + tails, 0, 0],
            Some(Stage::One) => [gradients + tails, 0, stepped * gradients],
            Some(Stage::Two) => [tails, gradients, stepped * gradients],
            Some(Stage::Three) => {
                let again = sum(&|bucket| match needed_in_backward(plan, bucket) {
                    true => plan.gradients_in(bucket),
                    false => 0,
                });
                [tails, gradients, passes * (gradients + again)]
            }
        };
        let all = &mut self.elements;
        all[0] += reduced;
        all[1] += scattered;
        all[2] += gathered;
        // Whether each rank's part is numbers; and who it was that had none.
        self.words += match self.stage {
            Some(Stage::Two | Stage::Three) => world,
            None | Some(Stage::One) => 0,
        };
        self.marks += match record.non_finite.is_empty() {
            true => 0,
            false => world,
        };
    }

    /// Elements of the kind at `at`.
    fn elements(&self, at: usize) -> u64 {
        match at {
            2 => self.elements[2] + self.words + self.marks,
            3 => 0,
            at => self.elements[at],
        }
    }

    /// Bytes that all ranks together send, if the algorithm sends as few as there can be.
    fn bytes(&self, at: usize, precision: Precision, world: usize) -> u64 {
        let size = match precision {
            Precision::F32 => 4,
            Precision::F64 => 8,
        };
        let others = world as u64 - 1;
        match at {
            0 => 2 * others * size * self.elements[0],
            1 => others * size * self.elements[1],
            2 => others * (size * self.elements[2] + 8 * self.words + self.marks),
            _ => 0,
        }
    }
}

/// Whether a bucket of an MLP is gathered again in the backward pass: for the gradient of a layer's
/// input, which takes its weight, and which the first layer's need not have. Slots are weight and
/// bias of each layer by turns.
fn needed_in_backward(plan: &BucketPlan, bucket: usize) -> bool {
    let slots = plan.slots_in(bucket).iter();
    slots.into_iter().any(|slot| slot % 2 == 0 && *slot > 0)
}

/// What all ranks moved, and where that is not what was predicted.
pub(super) fn of_ranks(
    task: &Task,
    way: Way<'_>,
    runs: &[RankRun],
) -> (Vec<Traffic>, Option<String>) {
    let world = runs.len();
    let precision = task.settings().model.dtype;
    let minimal = matches!(
        way.choice,
        Choice::Fixed(Algorithm::Ring | Algorithm::Direct)
    );
    // Blocks go by another way, in parts.
    let closed = runs.iter().all(|run| run.moved.0[3].calls == 0);
    let expected = runs[0].expected.as_ref().filter(|_| closed);
    let moved = { runs.iter() }.fold(Moved::default(), |sum, run| sum + run.moved);
    let size = match precision {
        Precision::F32 => 4,
        Precision::F64 => 8,
    };
    let unit = (world as u64 - 1) * task.parameters() as u64 * size * runs[0].losses.len() as u64;
    let mut wrong = None;
    let mut traffic = Vec::new();
    for (at, kind) in KINDS.into_iter().enumerate() {
        let row = moved.0[at];
        let mut bytes_formula = row.predicted_sent;
        if let Some(expected) = expected {
            let (elements, due) = (row.elements / world as u64, expected.elements(at));
            if elements != due {
                let what = format!("{kind} took {elements} elements, by the stage's formula {due}");
                wrong.get_or_insert(what);
            }
            if minimal {
                bytes_formula = expected.bytes(at, precision, world);
            }
        }
        if row.bytes_sent != bytes_formula {
            let bytes = row.bytes_sent;
            let what =
                format!("{kind} sent {bytes} bytes, the stage's formula says {bytes_formula}");
            wrong.get_or_insert(what);
        }
        traffic.push(Traffic {
            collective: kind.name(),
            bytes: row.bytes_sent,
            bytes_formula,
            units: match unit {
                0 => 0.0,
                unit => row.bytes_sent as f64 / unit as f64,
            },
        });
    }
    (traffic, wrong)
}
