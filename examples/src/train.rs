//! Data-parallel training as one would run it.

use std::time::{Duration, Instant};

use burn::module::Module;
use burn::tensor::Device;
use collectives::{Collective, Communicator, Row, launch};
use ddp::StepRecord;

use crate::weights::weights_hash;
use crate::{Error, Task, optimizer};

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
    /// Rank 0's all-reduces.
    pub moved: Row,
    /// The algorithms that carried them out.
    pub algorithms: Vec<String>,
    /// Whether all ranks ended with the same weights, bit for bit.
    pub bits_equal_ranks: bool,
}

/// Trains the task's model and reports to `news` on rank 0's thread.
///
/// # Errors
/// [`Error::Launch`], naming the first rank that failed and why.
pub fn train(task: &Task, news: impl Fn(News) + Sync) -> Result<TrainReport, Error> {
    let settings = task.settings();
    let config = &settings.collectives;
    let mut reports = launch::spawn(settings.run.world_size, config, |communicator| {
        run_rank(task, communicator, &news)
    })?;
    let equal = reports.iter().all(|(_, hash)| *hash == reports[0].1);
    let (report, _) = reports.swap_remove(0);
    Ok(TrainReport {
        bits_equal_ranks: equal,
        ..report
    })
}

/// The report as far as one rank knows it, and a hash of its weights.
fn run_rank(
    task: &Task,
    communicator: Communicator,
    news: &(impl Fn(News) + Sync),
) -> ddp::Result<(TrainReport, u64)> {
    let place = communicator.place();
    let plain = Device::flex();
    let device = plain.clone().autodiff();
    let lr = task.settings().optim.lr;

    let model = task.model(&device);
    let mut model = task.settings().ddp.init(model, communicator)?;
    let mut optim = optimizer(&task.settings().optim);
    let criterion = task.criterion(&device);
    let mut tally = Tally::default();
    let mut last = None;
    for (index, batch) in task.batches(place)?.enumerate() {
        let started = Instant::now();
        let (features, targets) = task.train_rows(&batch.rows, &device);
        let loss = criterion.forward(model.forward(features), targets);
        let gradients = model.backward(loss, batch.samples)?;
        model.step(lr, &mut optim, gradients)?;
        tally.add(model.last_step(), started.elapsed());

        let step = index + 1;
        if place.rank == 0 {
            let loss = model.last_step().loss;
            news(News::Step { step, loss });
        }
        if step.is_multiple_of(task.steps_per_epoch()) || step == task.steps() {
            let mut epoch = tally.epoch(step.div_ceil(task.steps_per_epoch()), step);
            // One rank is enough to test; the others wait in their next step.
            if place.rank == 0 {
                epoch.accuracy = task.accuracy(&model.valid(), &plain);
                news(News::Epoch(epoch.clone()));
            }
            last = Some(epoch);
            tally = Tally::default();
        }
    }
    let stats = model.stats()?;
    let algorithms = stats.algorithms(Collective::AllReduce);
    let report = TrainReport {
        last: last.expect("a run has a step"),
        buckets: model.plan().buckets(),
        step: model.last_step().clone(),
        moved: stats.of(Collective::AllReduce),
        algorithms: algorithms.map(|algorithm| algorithm.to_string()).collect(),
        bits_equal_ranks: true,
    };
    Ok((report, weights_hash(model.module())))
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
