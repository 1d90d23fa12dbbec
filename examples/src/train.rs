//! Data-parallel training as one would run it.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::tensor::Device;
use collectives::{Communicator, Row, launch};
use ddp::StepRecord;
use zero::Memory;

use crate::moved::{KINDS, Moved};
use crate::step_log::{StepInfo, StepLog};
use crate::trainer::Trainer;
use crate::weights::weights_hash;
use crate::{Error, Recording, Task};

/// A span that a [`Recording`] sees.
macro_rules! span {
    ($name:literal, $($field:ident),+) => {
        tracing::info_span!(target: "lockstep", $name, $($field),+)
    };
}

/// What rank 0 has to tell while training runs.
#[derive(Debug, Clone, PartialEq)]
pub enum News {
    /// A step is done.
    Step {
        /// Which, from 1.
        step: usize,
        /// Its loss: the mean over the global batch.
        loss: f64,
    },
    /// An epoch, or the run, is done.
    Epoch(Epoch),
}

/// An epoch, or the part of one with which a run ends.
#[derive(Debug, Clone, PartialEq)]
pub struct Epoch {
    /// Which, from 1.
    pub epoch: usize,
    /// Steps since the run began.
    pub steps: usize,
    /// Mean of the steps' losses.
    pub loss: f64,
    /// Share of the test rows put into the right class.
    pub accuracy: f64,
    /// Rows of all ranks a second, the time of testing left out.
    pub samples_per_second: f64,
    /// Share of communication time inside the backward pass, mean over steps.
    pub hidden: f64,
    /// Time a step spent waiting for communication after backward, mean.
    pub exposed: Duration,
}

/// What training left behind.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainReport {
    /// The last epoch's figures.
    pub last: Epoch,
    /// Elements of each bucket, by the plan in force at the end.
    pub buckets: Vec<usize>,
    /// The last step as rank 0 saw it.
    pub step: StepRecord,
    /// What rank 0's steps moved: gradients, and by the stages of ZeRO parameters.
    pub moved: Row,
    /// The bytes that it sent for that, by collective, as far as there were any.
    pub sent: Vec<(&'static str, u64)>,
    /// Bytes of parameters, gradients and optimizer's state that a rank held between the last
    /// backward pass and its step, at most, with the state as the step left it.
    pub held: Memory,
    /// What they are by formula.
    pub held_formula: Memory,
    /// The algorithms that carried them out in the last step.
    pub algorithms: Vec<String>,
    /// Steps that all ranks left out, and the ranks whose gradients were no numbers.
    pub skipped: usize,
    /// Those ranks, over the whole run.
    pub non_finite: BTreeSet<usize>,
    /// Whether all ranks ended with the same weights, bit for bit.
    pub bits_equal_ranks: bool,
}

/// Trains the task's model and reports to `news` on rank 0's thread.
///
/// # Errors
/// [`Error::Launch`], naming the first rank that failed and why; [`Error::Write`] for the files
/// of `[log]`: before training starts, if they cannot be there.
pub fn train(task: &Task, news: impl Fn(News) + Sync) -> Result<TrainReport, Error> {
    let settings = task.settings();
    let (config, ranks) = (&settings.collectives, settings.run.world_size);
    let named = |path: &Path| (!path.as_os_str().is_empty()).then(|| path.to_owned());
    let steps = named(&settings.log.steps).map(|path| StepLog::create(&path));
    let steps = steps.transpose()?;
    let drawn = task.steps() / 2 + 1;
    let trace = named(&settings.log.trace).map(|path| Recording::create(&path, drawn, ranks));
    let trace = trace.transpose()?;
    let run = || {
        launch::spawn(ranks, config, |communicator| {
            run_rank(task, communicator, steps.as_ref(), &news)
        })
    };
    let outcome = match &trace {
        Some(trace) => trace.record(run),
        None => run(),
    };
    let written = [
        trace.map_or(Ok(()), Recording::finish),
        steps.map_or(Ok(()), StepLog::finish),
    ];
    // Why training ended is the better news.
    let mut reports = outcome?;
    written.into_iter().collect::<Result<(), _>>()?;
    let equal = reports.iter().all(|(_, hash)| *hash == reports[0].1);
    let most = |of: fn(&TrainReport) -> Memory| {
        let held = reports.iter().map(|(report, _)| of(report));
        held.max_by_key(Memory::total).unwrap_or_default()
    };
    let (held, held_formula) = (
        most(|report| report.held),
        most(|report| report.held_formula),
    );
    let (report, _) = reports.swap_remove(0);
    Ok(TrainReport {
        bits_equal_ranks: equal,
        held,
        held_formula,
        ..report
    })
}

/// The report as far as one rank knows it, and a hash of its weights.
fn run_rank(
    task: &Task,
    communicator: Communicator,
    steps: Option<&StepLog>,
    news: &(impl Fn(News) + Sync),
) -> zero::Result<(TrainReport, u64)> {
    let place = communicator.place();
    let rank = place.rank;
    let plain = Device::flex();
    let device = plain.clone().autodiff();
    let lr = task.settings().optim.lr;

    let stage = task.settings().zero.stage;
    let mut model = Trainer::new(task, stage, &device, communicator)?;
    let before = Moved::of(&model.stats()?);
    let mut tested = Moved::default();
    let mut held = None;
    let (mut skipped, mut non_finite) = (0, BTreeSet::new());
    let mut tally = Tally::default();
    let mut last = None;
    for (index, batch) in task.batches(place)?.enumerate() {
        let step = index + 1;
        let epoch = step.div_ceil(task.steps_per_epoch());
        let whole = span!("step", rank, step, epoch).entered();
        let started = Instant::now();
        model.accumulate(task.micro_batches(&batch, stage), |model, batch| {
            let rows = span!("data", rank).in_scope(|| task.train_rows(&batch.rows, &device));
            let loss = span!("forward", rank).in_scope(|| task.loss_of(model, rows, &device));
            (loss, batch.samples)
        })?;
        let computed = started.elapsed();
        if step == task.steps() {
            held = Some(model.held()?);
        }
        let started = Instant::now();
        model.step(lr)?;
        let time = computed + started.elapsed();
        drop(whole);
        tally.add(model.last_step(), time);
        skipped += usize::from(model.last_step().skipped);
        non_finite.extend(model.last_step().non_finite.iter().copied());
        if let Some(steps) = steps {
            let info = StepInfo { epoch, lr, time };
            steps.write(&info, model.last_step());
        }

        if rank == 0 {
            let loss = model.last_step().loss;
            news(News::Step { step, loss });
        }
        if step.is_multiple_of(task.steps_per_epoch()) || step == task.steps() {
            let mut epoch = tally.epoch(epoch, step);
            let before = Moved::of(&model.stats()?);
            let parts = span!("test", rank).in_scope(|| {
                let model = model.module().valid();
                let parts = task.test_parts(place).into_iter();
                parts
                    .map(|part| ([task.accuracy(&model, part.clone(), &plain)], part.len()))
                    .collect::<Vec<_>>()
            });
            [epoch.accuracy] = model.weighted_mean(parts)?;
            tested = tested + (Moved::of(&model.stats()?) - before);
            if rank == 0 {
                news(News::Epoch(epoch.clone()));
            }
            last = Some(epoch);
            tally = Tally::default();
        }
    }
    let moved = Moved::of(&model.stats()?) - before - tested;
    let now = model.held()?;
    let mut held = held.unwrap_or_else(|| now.clone());
    held.measured.state = now.measured.state;
    let sent = KINDS.iter().zip(moved.0);
    let sent = sent.filter(|(_, row)| row.bytes_sent > 0);
    let report = TrainReport {
        last: last.expect("a run has a step"),
        buckets: model.plan().buckets(),
        step: model.last_step().clone(),
        moved: moved.total(),
        sent: sent
            .map(|(kind, row)| (kind.name(), row.bytes_sent))
            .collect(),
        held: held.measured,
        held_formula: held.predicted,
        algorithms: model.last_step().algorithms(),
        skipped,
        non_finite,
        bits_equal_ranks: true,
    };
    Ok((report, weights_hash(&model.into_module()?)))
}

/// Sums over the steps of an epoch.
#[derive(Default)]
struct Tally {
    steps: usize,
    loss: f64,
    samples: u64,
    time: Duration,
    hidden: f64,
    exposed: Duration,
}

impl Tally {
    fn add(&mut self, record: &StepRecord, time: Duration) {
        self.steps += 1;
        self.loss += record.loss;
        self.samples += record.samples;
        self.time += time;
        self.hidden += record.hidden();
        self.exposed += record.exposed;
    }

    fn epoch(&self, epoch: usize, steps: usize) -> Epoch {
        let count = self.steps as f64;
        Epoch {
            epoch,
            steps,
            loss: self.loss / count,
            accuracy: f64::NAN,
            samples_per_second: self.samples as f64 / self.time.as_secs_f64(),
            hidden: self.hidden / count,
            exposed: self.exposed.div_f64(count),
        }
    }
}
