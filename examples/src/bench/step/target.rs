//! What a step is meant to cost, and whether it does.
use std::fmt;

use serde::Serialize;

use super::{Contender, LARGE, StepOptimizer, rows::Table};
use crate::bench::Wire;

/// DDP over DDP without exchange, at most.
const OF_NOOP: f64 = 1.08;
/// DDP over as many processes that train alone, at most.
const OF_PLAIN: f64 = 1.1;
/// DDP's speed-up over one process at the global batch, as a share of theirs, at least.
const SHARE_OF_SPEED_UP: f64 = 0.93;
/// DDP over one process on as many cores, and over PyTorch's DDP, at most.
const OF_PEER: f64 = 1.0;
/// Of the communication that is seen without overlap, the share that overlap hides, at least.
const HIDDEN: f64 = 0.5;
/// Stages 1 and 2 over DDP, at most; with Adam, of which each rank updates its part.
const OF_DDP: f64 = 1.05;
/// Stage 3 over DDP, at most: it gathers twice what the others gather once.
const THIRD_OF_DDP: f64 = 1.4;

/// One target, and what was measured. The keys are those of the JSON lines.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// `target`, to tell it from a row.
    pub kind: &'static str,
    /// Which model.
    pub layers: Vec<usize>,
    /// What makes a step of gradients.
    pub optimizer: &'static str,
    /// What joined the ranks.
    pub transport: String,
    /// What is bounded.
    pub what: &'static str,
    /// By how much.
    pub bound: f64,
    /// Whether the measured value may be at most, or at least, the bound.
    pub at_most: bool,
    /// The measured value; none if a row is missing.
    pub measured: Option<f64>,
    /// Whether it was met; none if it was not measured.
    pub met: Option<bool>,
    /// The row that is missing.
    pub missing: Option<&'static str>,
}

/// Holds the rows against every target of their transport.
pub(super) fn verdicts(table: &Table) -> Vec<Verdict> {
    let of = |row| table.ratio(Contender::Ddp, row).ok_or(row);
    let verdict = |what, bound, at_most, measured: Result<f64, Contender>| Verdict {
        kind: "target",
        layers: table.training.layers.clone(),
        optimizer: table.training.optimizer.name(),
        transport: table.wire.to_string(),
        what,
        bound,
        at_most,
        measured: measured.ok(),
        met: (measured.ok()).map(|value| {
            if at_most {
                value <= bound
            } else {
                value >= bound
            }
        }),
        missing: measured.err().map(Contender::name),
    };
    // Models of fewer parameters have too short a backward pass to hide much in it, and too
    // short an update.
    let is_large = table.training.parameters() >= LARGE;
    if table.wire == Wire::Local {
        let share = of(Contender::Plain).map(f64::recip);
        let mut verdicts = vec![
            verdict(
                "DDP over DDP without exchange",
                OF_NOOP,
                true,
                of(Contender::Noop),
            ),
            verdict(
                "DDP over processes that train alone",
                OF_PLAIN,
                true,
                of(Contender::Plain),
            ),
            verdict(
                "share of the speed-up of processes that train alone",
                SHARE_OF_SPEED_UP,
                false,
                share,
            ),
            verdict(
                "DDP over one process on as many cores",
                OF_PEER,
                true,
                of(Contender::SingleCores),
            ),
            verdict(
                "DDP over PyTorch's DDP",
                OF_PEER,
                true,
                of(Contender::Torch),
            ),
        ];
        if is_large && table.training.optimizer == StepOptimizer::Adam {
            for (what, bound, stage) in [
                ("ZeRO 1 over DDP", OF_DDP, Contender::ZeroOne),
                ("ZeRO 2 over DDP", OF_DDP, Contender::ZeroTwo),
                ("ZeRO 3 over DDP", THIRD_OF_DDP, Contender::ZeroThree),
            ] {
                let measured = table.ratio(stage, Contender::Ddp).ok_or(stage);
                verdicts.push(verdict(what, bound, true, measured));
            }
        }
        verdicts
    } else if is_large {
        vec![verdict(
            "share of communication that overlap hides",
            HIDDEN,
            false,
            table.hidden_by_overlap(),
        )]
    } else {
        vec![]
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, bound) = (self.what, self.bound);
        let limit = if self.at_most { "at most" } else { "at least" };
        match (self.measured, self.met) {
            (Some(value), Some(true)) => {
                write!(f, "met: {what} {value:.3}, {limit} {bound}")
            }
            (Some(value), _) => {
                let by = (value - bound).abs();
                write!(f, "missed by {by:.3}: {what} {value:.3}, {limit} {bound}")
            }
            (None, _) => {
                let missing = self.missing.unwrap_or("ddp");
                let needed = match missing {
                    "ddp" => "the row ddp".to_owned(),
                    missing => format!("the rows ddp and {missing}"),
                };
                write!(
                    f,
                    "not measured: {what}, {limit} {bound}; it needs {needed}"
                )
            }
        }
    }
}
