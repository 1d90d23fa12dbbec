//! Blocks of steps become rows.
use std::time::Duration;

use serde::Serialize;

use super::{
    Contender,
    processor::Spent,
    replica::{Seen, Training},
};
use crate::bench::{
    Times, Wire,
    table::{Columns, short},
};

/// A few steps in a row, as one rank or one program took them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Block {
    /// Of one step, the mean over the block.
    pub(super) seconds: f64,
    /// Summed over the block.
    pub(super) seen: Seen,
    /// By all ranks, from the block's beginning to its end, the step that does not count
    /// included; none of other programs.
    pub(super) spent: Option<Spent>,
}

/// What one contender did, block by block.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    pub(super) contender: Contender,
    /// By round; the slowest rank's time, and what rank 0 saw.
    pub(super) blocks: Vec<Block>,
}

/// All contenders on one model and transport.
#[derive(Clone, Debug)]
pub(super) struct Table {
    pub(super) training: Training,
    pub(super) wire: Wire,
    pub(super) ranks: usize,
    /// Steps in a block.
    pub(super) steps: usize,
    pub(super) measured: Vec<Measured>,
}

/// One contender. The keys are those of the JSON lines.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepRow {
    /// `row`, to tell it from a target.
    pub kind: &'static str,
    /// Widths of the model.
    pub layers: Vec<usize>,
    /// Its weights and biases.
    pub parameters: usize,
    /// What joined the ranks.
    pub transport: String,
    /// Which way to take a step.
    pub contender: &'static str,
    /// World size.
    pub ranks: usize,
    /// What makes a step of gradients.
    pub optimizer: &'static str,
    /// Rows of a rank's batch.
    pub batch: usize,
    /// Blocks measured.
    pub rounds: usize,
    /// Steps in each.
    pub steps: usize,
    /// One step, the median over the blocks, in ms.
    pub step_ms: f64,
    /// The lower quartile: nearer to what a machine without other work does.
    pub quartile_ms: f64,
    /// The shortest.
    pub min_ms: f64,
    /// A step's time on a core, all threads of all ranks together, the median, in ms.
    pub ran_ms: Option<f64>,
    /// A step's time of these threads ready to run but without a core, the median, in ms.
    pub queued_ms: Option<f64>,
    /// `ran_ms` over that of `ddp_noop`, the median of the ratios within a round.
    pub ran_of_noop: Option<f64>,
    /// Over `ddp_noop`, the median of the ratios within a round.
    pub of_noop: Option<f64>,
    /// What communication adds to a step: less `ddp_noop`, the median of the differences within a
    /// round, in ms. None for sharded rows, which also update less than that row.
    pub visible_ms: Option<f64>,
    /// Where the mean step of rank 0 goes, in ms: forward passes; at stage 3 with the all-gathers in
    /// them. This, `backward_ms`, `exposed_ms` and `update_ms` add up to its step.
    pub forward_ms: Option<f64>,
    /// Backward passes, less `exposed_ms`; at stage 3 with the all-gathers in them.
    pub backward_ms: Option<f64>,
    /// What communication kept rank 0 in its backward passes and after them. It holds the time
    /// by which other ranks came later, too.
    pub exposed_ms: Option<f64>,
    /// The optimizer's step; at stages 1 and 2 with the all-gathers that follow it.
    pub update_ms: Option<f64>,
    /// Start to end of all-gathers on rank 0, in ms a step, waiting for other ranks included and
    /// wherever they ran: a part of the others, or beside them.
    pub gathering_ms: Option<f64>,
    /// Bytes that rank 0 sends in a step.
    pub sent_bytes: Option<u64>,
    /// Start to end of the reductions of gradients as rank 0 recorded them, in ms a step.
    pub reducing_ms: Option<f64>,
    /// The share of these that lay inside the backward pass.
    pub hidden: Option<f64>,
    /// Reductions of gradients in a step.
    pub buckets: Option<usize>,
    /// One step of each block, in ms.
    pub blocks_ms: Vec<f64>,
}

impl Table {
    /// The rows, in the order of the contenders.
    pub(super) fn rows(&self) -> Vec<StepRow> {
        let rows = self.measured.iter().map(|measured| self.row(measured));
        rows.collect()
    }

    fn row(&self, measured: &Measured) -> StepRow {
        let blocks_ms: Vec<_> = (measured.blocks.iter())
            .map(|block| block.seconds * 1e3)
            .collect();
        let times = Times::new(blocks_ms.clone());
        let contender = measured.contender;
        let seen = measured.blocks.iter().map(|block| block.seen);
        let seen = seen.fold(Seen::default(), Seen::and);
        let steps = (measured.blocks.len() * self.steps).max(1) as f64;
        let recorded = |value: f64| contender.exchanges().then_some(value);
        let ms = |time: Duration| time.as_secs_f64() * 1e3 / steps;
        let own = |time| (!contender.is_outside()).then(|| ms(time));
        let sharded = contender.stage().is_some();
        StepRow {
            kind: "row",
            layers: self.training.layers.clone(),
            parameters: self.training.parameters(),
            transport: self.wire.to_string(),
            contender: contender.name(),
            ranks: self.ranks,
            optimizer: self.training.optimizer.name(),
            batch: self.training.batch,
            rounds: measured.blocks.len(),
            steps: self.steps,
            step_ms: times.median(),
            quartile_ms: times.quartile(),
            min_ms: times.min(),
            ran_ms: self.spent_ms(measured, |spent| spent.ran),
            queued_ms: self.spent_ms(measured, |spent| spent.queued),
            ran_of_noop: self.paired(
                contender,
                Contender::Noop,
                |block| block.spent.map_or(f64::NAN, |spent| spent.ran),
                |row, noop| row / noop,
            ),
            of_noop: self.ratio(contender, Contender::Noop),
            visible_ms: (self.visible_ms(contender)).filter(|_| contender.exchanges() && !sharded),
            forward_ms: own(seen.forward),
            backward_ms: own(seen.backward),
            exposed_ms: recorded(ms(seen.exposed)),
            update_ms: own(seen.update),
            gathering_ms: sharded.then(|| ms(seen.moved.gathering)),
            sent_bytes: (contender.exchanges()).then(|| seen.moved.sent / steps as u64),
            reducing_ms: recorded(ms(seen.reducing)),
            hidden: recorded(
                seen.inside.as_secs_f64() / seen.reducing.as_secs_f64().max(f64::MIN_POSITIVE),
            ),
            buckets: contender.exchanges().then_some(seen.buckets),
            blocks_ms,
        }
    }

    /// `of` over `over`: the median of the ratios within a round, so that what the machine
    /// does meanwhile meets both.
    pub(super) fn ratio(&self, of: Contender, over: Contender) -> Option<f64> {
        self.paired(of, over, seconds, |of, over| of / over)
    }

    /// What communication adds to a step, in ms.
    fn visible_ms(&self, of: Contender) -> Option<f64> {
        self.paired(of, Contender::Noop, seconds, |of, noop| (of - noop) * 1e3)
    }

    /// [`hidden_by_overlap`] in this table, or the row that is missing.
    pub(super) fn hidden_by_overlap(&self) -> Result<f64, Contender> {
        let steps = |row| Some(self.blocks(row)?.iter().map(seconds).collect::<Vec<_>>());
        let steps = |row| steps(row).ok_or(row);
        Ok(hidden_by_overlap(
            &steps(Contender::Ddp)?,
            &steps(Contender::NoOverlap)?,
            &steps(Contender::Noop)?,
        ))
    }

    /// What reducing in buckets saves over parameter by parameter, in ms a step.
    pub(super) fn saved_by_buckets(&self) -> Option<f64> {
        let paired = |each, ddp| (each - ddp) * 1e3;
        self.paired(Contender::PerParameter, Contender::Ddp, seconds, paired)
    }

    fn spent_ms(&self, measured: &Measured, of: fn(Spent) -> f64) -> Option<f64> {
        let spent = measured.blocks.iter().filter_map(|block| block.spent);
        let all = spent.map(|spent| of(spent) * 1e3 / (self.steps + 1) as f64);
        Some(Times::new(all.collect()).median()).filter(|median| median.is_finite())
    }

    /// The median over the rounds of what `both` makes of two contenders' blocks, by `value`.
    fn paired(
        &self,
        a: Contender,
        b: Contender,
        value: fn(&Block) -> f64,
        both: fn(f64, f64) -> f64,
    ) -> Option<f64> {
        let pairs = self.blocks(a)?.iter().zip(self.blocks(b)?);
        let all = pairs.map(|(a, b)| both(value(a), value(b))).collect();
        Some(Times::new(all).median()).filter(|median| median.is_finite())
    }

    fn blocks(&self, contender: Contender) -> Option<&[Block]> {
        let measured = self.measured.iter().find(|row| row.contender == contender);
        measured.map(|measured| &*measured.blocks)
    }
}

fn seconds(block: &Block) -> f64 {
    block.seconds
}

/// Of what communication adds to a step without overlap, the share that overlap hides, given the
/// times of a step in each round: with overlap, without, and without any exchange. 0 where
/// communication adds nothing.
///
/// What it adds is the time of a step less that of a step without exchange in the same round, and
/// of these differences the median. A step ends when the slowest rank has it. What one rank records
/// of its waiting would not do in place of that: it also holds the time by which the others came
/// later, which is there with overlap and without, so that the share would come out too small.
///
/// ```
/// // In the second round the machine has other work.
/// let [with, without, noop] = [[1.25, 2.25, 1.25], [2.0, 3.0, 2.0], [1.0, 2.0, 1.0]];
/// assert_eq!(examples::bench::hidden_by_overlap(&with, &without, &noop), 0.75);
/// // Nothing is seen, so nothing is hidden.
/// assert_eq!(examples::bench::hidden_by_overlap(&noop, &noop, &noop), 0.0);
/// ```
pub fn hidden_by_overlap(with: &[f64], without: &[f64], noop: &[f64]) -> f64 {
    let added = |steps: &[f64]| {
        let added = steps.iter().zip(noop).map(|(step, noop)| step - noop);
        Times::new(added.collect()).median()
    };
    match added(without) {
        all if all > 0.0 => 1.0 - added(with) / all,
        _ => 0.0,
    }
}

impl StepRow {
    pub(super) fn columns() -> Columns {
        Columns::new([
            ("", 33),
            ("step", 7),
            ("quartile", 8),
            ("min", 7),
            ("of no-op", 8),
            ("ran", 7),
            ("CPU of it", 9),
            ("queued", 7),
            ("visible", 7),
            ("forward", 7),
            ("backward", 8),
            ("exposed", 7),
            ("update", 7),
            ("gathering", 9),
            ("hidden", 6),
            ("buckets", 7),
        ])
    }

    pub(super) fn cells(&self, what: String) -> Vec<String> {
        let or_none = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
        vec![
            what,
            short(self.step_ms),
            short(self.quartile_ms),
            short(self.min_ms),
            or_none(self.of_noop.map(|ratio| format!("{ratio:.3}"))),
            or_none(self.ran_ms.map(short)),
            or_none(self.ran_of_noop.map(|ratio| format!("{ratio:.3}"))),
            or_none(self.queued_ms.map(short)),
            or_none(self.visible_ms.map(short)),
            or_none(self.forward_ms.map(short)),
            or_none(self.backward_ms.map(short)),
            or_none(self.exposed_ms.map(short)),
            or_none(self.update_ms.map(short)),
            or_none(self.gathering_ms.map(short)),
            or_none(self.hidden.map(|share| format!("{:.0} %", 100.0 * share))),
            or_none(self.buckets.map(|count| count.to_string())),
        ]
    }
}

/// A contender that was asked for, or is in every table, and could not take part. The keys are those
/// of the JSON lines.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct LeftOut {
    /// `left_out`, to tell it from a row.
    pub(super) kind: &'static str,
    /// Which way to take a step.
    pub(super) contender: &'static str,
    /// What it needs, or what its program said.
    pub(super) why: String,
}
