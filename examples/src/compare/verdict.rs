//! What a mode did, and whether that was right.

use collectives::{Algorithm, Choice};
use ddp::Hook;
use serde::Serialize;
use zero::{Memory, MemoryReport, Stage};

use super::Mode;
use super::mode::Way;
use super::ranks::RankRun;
use super::single::Reference;
use super::traffic::{self, Traffic};
use crate::{Precision, Task};

/// Right or wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Everything that can be checked is as it should be.
    Pass,
    /// Something is not; see [`ModeReport::failures`].
    Fail,
}

/// One line of `mlp compare`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModeReport {
    /// As `--modes` names it.
    pub mode: String,
    /// Ranks.
    pub world_size: usize,
    /// Steps done.
    pub steps: usize,
    /// The loss of each step, before its update: the mean over the rows of the
    /// global batch.
    pub losses: Vec<f64>,
    /// The last of them.
    pub final_loss: f64,
    /// The largest difference to the single process's losses, over all steps.
    pub max_abs_diff: f64,
    /// Whether all ranks ended with the same weights and saw the same losses,
    /// bit for bit.
    pub bits_equal_ranks: bool,
    /// FNV-1a of rank 0's final weights, in hexadecimal.
    pub weights_hash: String,
    /// Whether every loss and every weight was held against the single process's by `==`.
    pub exact: bool,
    /// Most bytes of partial sums of micro-shards that a rank held at one time, beside its buckets.
    pub partial_bytes: usize,
    /// Buckets, that is all-reduces, a step; 0 for the single process.
    pub buckets: usize,
    /// Bytes sent by the busiest rank in all its steps of the whole run, counted
    /// where they pass the transport.
    pub bytes_per_rank: u64,
    /// What the algorithm's closed form says it should have sent.
    pub bytes_formula: u64,
    /// The same by collective, for all ranks; empty for the single process.
    pub traffic: Vec<Traffic>,
    /// Bytes of parameters, gradients and optimizer's state that a rank holds between a backward pass
    /// and its step, at most; 0 for the single process.
    pub held_bytes: usize,
    /// What they are by formula.
    pub held_formula: usize,
    /// By formula, the most that a step comes to: these, buckets that fill, are under way or are gathered,
    /// and what Burn forms a gradient and a new value in.
    pub peak_formula: usize,
    /// Share of communication time inside the backward pass, 0 to 1: mean over
    /// steps and ranks. None for the single process.
    pub hidden: Option<f64>,
    /// The algorithms that really ran, joined by `+`; None if none did.
    pub algorithm: Option<String>,
    /// The verdict.
    pub verdict: Verdict,
    /// Why it failed, one sentence a reason. Not part of the JSON.
    #[serde(skip)]
    pub failures: Vec<String>,
}

/// The single process is the measure: all it can fail at is numbers that are
/// none.
pub(super) fn of_single(reference: &Reference) -> ModeReport {
    let mut failures = Vec::new();
    if let Some(step) = reference.losses.iter().position(|loss| !loss.is_finite()) {
        failures.push(format!("the loss of step {} is not finite", step + 1));
    }
    ModeReport {
        mode: Mode::Single.to_string(),
        world_size: 1,
        steps: reference.losses.len(),
        losses: reference.losses.clone(),
        final_loss: last(&reference.losses),
        max_abs_diff: 0.0,
        bits_equal_ranks: true,
        weights_hash: format!("{:016x}", reference.weights_hash),
        exact: false,
        partial_bytes: 0,
        buckets: 0,
        bytes_per_rank: 0,
        bytes_formula: 0,
        traffic: Vec::new(),
        held_bytes: 0,
        held_formula: 0,
        peak_formula: 0,
        hidden: None,
        algorithm: None,
        verdict: verdict(&failures),
        failures,
    }
}

/// Holds the ranks against the single process, each other and the formula.
pub(super) fn of_ranks(
    task: &Task,
    mode: &Mode,
    way: Way<'_>,
    reference: &Reference,
    runs: &[RankRun],
    difference: Option<String>,
) -> ModeReport {
    let losses = mean_losses(runs);
    let max_abs_diff = max_abs_diff(&losses, &reference.losses);
    let bits_equal_ranks = runs.iter().all(|run| {
        let same = |left: &f64, right: &f64| left.to_bits() == right.to_bits();
        run.weights_hash == runs[0].weights_hash
            && run
                .losses
                .iter()
                .zip(&runs[0].losses)
                .all(|(left, right)| same(left, right))
    });
    let busiest = runs.iter().max_by_key(|run| run.moved.total().bytes_sent);
    let busiest = busiest.expect("a world has a rank").moved.total();
    let (traffic, wrong_traffic) = traffic::of_ranks(task, way, runs);
    let most = |of: fn(&MemoryReport) -> usize| {
        let held = runs.iter().filter_map(|run| run.held.as_ref());
        held.map(of).max().unwrap_or(0)
    };
    let failures = [
        far_from_single(task, reference, &losses, max_abs_diff),
        difference,
        (!bits_equal_ranks).then(|| "ranks ended with different bits".to_owned()),
        wrong_rows(reference, runs),
        wrong_bytes(runs),
        wrong_traffic,
        wrong_memory(runs),
        wrong_algorithm(task, way, runs),
    ];
    let failures: Vec<String> = failures.into_iter().flatten().collect();
    let algorithms = &runs[0].algorithms;
    ModeReport {
        mode: mode.to_string(),
        world_size: runs.len(),
        steps: losses.len(),
        final_loss: last(&losses),
        max_abs_diff,
        losses,
        bits_equal_ranks,
        weights_hash: format!("{:016x}", runs[0].weights_hash),
        exact: task.settings().compare.exact,
        partial_bytes: runs.iter().map(|run| run.partial_bytes).max().unwrap_or(0),
        buckets: runs[0].buckets,
        bytes_per_rank: busiest.bytes_sent,
        bytes_formula: busiest.predicted_sent,
        traffic,
        held_bytes: most(|held| held.measured.total()),
        held_formula: most(|held| held.predicted.total()),
        peak_formula: most(|held| held.peak.most()),
        // One rank alone has nothing to hide.
        hidden: (runs.len() > 1)
            .then(|| runs.iter().map(|run| run.hidden).sum::<f64>() / runs.len() as f64),
        algorithm: (!algorithms.is_empty()).then(|| algorithms.join("+")),
        verdict: verdict(&failures),
        failures,
    }
}

fn verdict(failures: &[String]) -> Verdict {
    match failures.is_empty() {
        true => Verdict::Pass,
        false => Verdict::Fail,
    }
}

fn last(losses: &[f64]) -> f64 {
    losses.last().copied().unwrap_or(f64::NAN)
}

/// Where ranks agree on every loss, that loss; where they trained alone, the
/// mean over their rows.
fn mean_losses(runs: &[RankRun]) -> Vec<f64> {
    let steps = runs.iter().map(|run| run.losses.len()).min().unwrap_or(0);
    (0..steps)
        .map(|step| {
            let first = runs[0].losses[step];
            if runs.iter().all(|run| run.losses[step] == first) {
                return first;
            }
            let rows: u64 = runs.iter().map(|run| run.rows[step]).sum();
            let weighted = |run: &RankRun| run.losses[step] * run.rows[step] as f64;
            runs.iter().map(weighted).sum::<f64>() / rows as f64
        })
        .collect()
}

/// Infinite where the steps differ in number or a difference is no number, so
/// that no tolerance lets it through.
fn max_abs_diff(losses: &[f64], reference: &[f64]) -> f64 {
    if losses.len() != reference.len() {
        return f64::INFINITY;
    }
    let differences = losses
        .iter()
        .zip(reference)
        .map(|(left, right)| (left - right).abs());
    differences.fold(0.0, |most, difference| match difference.is_nan() {
        true => f64::INFINITY,
        false => most.max(difference),
    })
}

/// The tolerance in force: 1e-5 in f32 is 30 times the rounding seen on the
/// digits with SGD at 0.1 and 260 times below the smallest fault; 1e-10 in f64.
pub(crate) fn tolerance(task: &Task) -> f64 {
    let settings = task.settings();
    match (settings.compare.tolerance, settings.model.dtype) {
        (0.0, Precision::F32) => 1e-5,
        (0.0, Precision::F64) => 1e-10,
        (given, _) => given,
    }
}

fn far_from_single(
    task: &Task,
    reference: &Reference,
    losses: &[f64],
    max_abs_diff: f64,
) -> Option<String> {
    let tolerance = tolerance(task);
    if max_abs_diff <= tolerance {
        return None;
    }
    let pairs = losses.iter().zip(&reference.losses);
    let first = pairs
        .map(|(left, right)| (left - right).abs())
        .position(|difference| difference.is_nan() || difference > tolerance);
    Some(match first {
        Some(step) => format!(
            "losses differ from single by up to {max_abs_diff:.1e}, allowed is {tolerance:.0e}; \
             first in step {}",
            step + 1
        ),
        None => format!(
            "{} steps instead of {}",
            losses.len(),
            reference.losses.len()
        ),
    })
}

/// Each row of a global batch is one rank's work.
fn wrong_rows(reference: &Reference, runs: &[RankRun]) -> Option<String> {
    reference
        .rows
        .iter()
        .enumerate()
        .find_map(|(step, expected)| {
            let rows = runs
                .iter()
                .map(|run| run.rows.get(step).copied().unwrap_or(0));
            let rows: u64 = rows.sum();
            (rows != *expected).then(|| {
                format!(
                    "ranks trained {rows} rows in step {}, the global batch has {expected}",
                    step + 1
                )
            })
        })
}

fn wrong_bytes(runs: &[RankRun]) -> Option<String> {
    runs.iter().enumerate().find_map(|(rank, run)| {
        let all = run.moved.total();
        let (sent, predicted) = (all.bytes_sent, all.predicted_sent);
        (sent != predicted)
            .then(|| format!("rank {rank} sent {sent} bytes, the formula says {predicted}"))
    })
}

/// What is held is what the formula says; the optimizer keeps nothing before its first step.
fn wrong_memory(runs: &[RankRun]) -> Option<String> {
    runs.iter().enumerate().find_map(|(rank, run)| {
        let held = run.held.as_ref()?;
        let Memory {
            parameters,
            gradients,
            state,
        } = held.measured;
        (held.measured != held.predicted).then(|| {
            format!(
                "rank {rank} held {parameters} + {gradients} + {state} bytes of parameters, gradients \
                 and optimizer's state, by formula {} + {} + {}",
                held.predicted.parameters, held.predicted.gradients, held.predicted.state
            )
        })
    })
}

/// A named algorithm is the one that runs, and something does run.
fn wrong_algorithm(task: &Task, way: Way<'_>, runs: &[RankRun]) -> Option<String> {
    let settings = task.settings();
    let narrow = matches!(settings.ddp.comm_hook, Hook::Bf16 | Hook::Fp16);
    let one_order = settings.collectives.deterministic || narrow || way.stage.is_some();
    // Of a reduce-scatter nothing is left but the exchange.
    let scatters = way.stage > Some(Stage::One);
    runs.iter().enumerate().find_map(|(rank, run)| {
        let ran = run.algorithms.join("+");
        match way.choice {
            _ if run.algorithms.is_empty() => Some(format!("rank {rank} reduced nothing")),
            // For one order of sums, or 16-bit floats, the ring and at times halving take the direct
            // exchange.
            Choice::Fixed(asked)
                if ran == asked.to_string()
                    || one_order && (ran == format!("direct+{asked}") || ran == "blocks")
                    || scatters
                        && matches!(asked, Algorithm::Ring | Algorithm::Halving)
                        && ran == "direct" =>
            {
                None
            }
            Choice::Fixed(asked) => Some(format!(
                "rank {rank} reduced by {ran}, asked for was {asked}"
            )),
            _ => None,
        }
    })
}
