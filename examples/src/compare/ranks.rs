//! The same training by ranks, rightly or with a fault.

use burn::optim::GradientsParams;
use burn::tensor::Device;
use collectives::{Communicator, Place, launch};
use zero::MemoryReport;

use super::Fault;
use super::mode::Way;
use super::traffic::Expected;
use crate::moved::Moved;
use crate::trainer::Trainer;
use crate::weights::{Weights, flip_last_bit, parameter_hashes, weights_hash};
use crate::{Error, Task, optimizer};

/// What one rank saw.
pub(super) struct RankRun {
    /// The loss of each step: the mean over all ranks' rows, or over this
    /// rank's own if nothing was reduced.
    pub(super) losses: Vec<f64>,
    /// The rows this rank trained on in each step.
    pub(super) rows: Vec<u64>,
    /// A hash of its final weights.
    pub(super) weights_hash: u64,
    /// A hash of each parameter after each step, and the final weights, on rank 0 where bits are
    /// compared.
    pub(super) hashes: Vec<Vec<u64>>,
    pub(super) weights: Weights,
    /// Most bytes of partial sums that waited for their twin at one time.
    pub(super) partial_bytes: usize,
    /// Buckets a step, by the plan in force at the end.
    pub(super) buckets: usize,
    /// What its steps moved, and were predicted to.
    pub(super) moved: Moved,
    /// What the formulas of the stage say that they move, where they say it.
    pub(super) expected: Option<Expected>,
    /// What it held between the last backward pass and its step, with the optimizer's state as the
    /// step left it; None if nothing was reduced, or the step left out.
    pub(super) held: Option<MemoryReport>,
    /// The algorithms that carried them out.
    pub(super) algorithms: Vec<String>,
    /// Share of communication that lay inside the backward pass, mean over
    /// steps.
    pub(super) hidden: f64,
}

pub(super) fn run(
    task: &Task,
    way: Way<'_>,
    world: usize,
    fault: Option<Fault>,
) -> Result<Vec<RankRun>, Error> {
    let settings = task.settings();
    let mut config = settings
        .collectives
        .clone()
        .with_algorithm(way.choice.clone());
    config.all_reduce = None;
    config.deterministic |= way.stage.is_some();
    let runs = launch::spawn(world, &config, |communicator| match fault {
        Some(Fault::NoAllReduce) => run_alone(task, communicator.place()),
        _ => run_rank(task, way, communicator, fault),
    })?;
    Ok(runs)
}

fn run_rank(
    task: &Task,
    way: Way<'_>,
    communicator: Communicator,
    fault: Option<Fault>,
) -> zero::Result<RankRun> {
    let place = communicator.place();
    let device = Device::flex().autodiff();
    let settings = task.settings();
    let exact = settings.compare.exact;
    // As if the sum were not divided.
    let scale = match fault {
        Some(Fault::SumForMean) => place.world as f64,
        _ => 1.0,
    };
    let mut losses = Vec::new();
    let mut rows = Vec::new();
    let mut hashes = Vec::new();
    let mut hidden = 0.0;
    let mut partial_bytes = 0;
    let mut moved = Moved::default();
    let mut expected = Expected::of(task, way);
    let mut held = None;

    let mut model = Trainer::new(task, way.stage, &device, communicator)?;
    let dealt = match fault {
        Some(Fault::FullBatch) => Place { rank: 0, world: 1 },
        _ => place,
    };
    for batch in task.batches(dealt)? {
        // Looking at the weights moves some too.
        let before = Moved::of(&model.stats()?);
        let mut rows_of_step = 0;
        model.accumulate(task.micro_batches(&batch, way.stage), |model, batch| {
            // Counted where the rows enter the model; a stand-in does not count.
            rows_of_step += match batch.samples {
                0 => 0,
                _ => batch.rows.len() as u64,
            };
            let samples = match fault {
                Some(Fault::PlainMean) => batch.samples.min(1),
                _ => batch.samples,
            };
            let loss = task.loss(model, &batch.rows, &device);
            match fault {
                Some(Fault::SumForMean) => (loss * scale, samples),
                _ => (loss, samples),
            }
        })?;
        rows.push(rows_of_step);
        if losses.len() + 1 == task.steps() {
            held = Some(model.held()?);
        }
        model.step(settings.optim.lr)?;
        moved = moved + (Moved::of(&model.stats()?) - before);
        let record = model.last_step();
        losses.push(record.loss / scale);
        hidden += record.hidden();
        partial_bytes = partial_bytes.max(record.partial_bytes);
        if let Some(expected) = &mut expected {
            expected.add_step(model.plan(), record, place.world);
        }
        if fault == Some(Fault::OneBit) && losses.len() == Fault::ONE_BIT_STEP + 1 {
            model.update(flip_last_bit)?;
        }
        if exact {
            let whole = model.whole();
            if place.rank == 0 {
                hashes.push(parameter_hashes(&whole));
            }
        }
    }
    if let Some(held) = &mut held {
        held.measured.state = model.held()?.measured.state;
    }
    // Of gradients that are no numbers ddp gives none.
    held = held.filter(|_| !model.last_step().skipped);
    let (buckets, algorithms) = (model.plan().len(), model.last_step().algorithms());
    let model = model.into_module()?;
    Ok(RankRun {
        hidden: hidden / losses.len() as f64,
        losses,
        rows,
        buckets,
        moved,
        expected,
        held,
        algorithms,
        partial_bytes,
        weights_hash: weights_hash(&model),
        hashes,
        weights: match place.rank {
            0 => Weights::of(&model),
            _ => Weights::default(),
        },
    })
}

/// The fault of a rank that reduces nothing: a plain loop over its own part.
fn run_alone(task: &Task, place: Place) -> zero::Result<RankRun> {
    let device = Device::flex().autodiff();
    let mut losses = Vec::new();
    let mut rows = Vec::new();
    let mut hashes = Vec::new();
    let mut model = task.model(&device);
    let mut optim = optimizer(&task.settings().optim);
    for batch in task.batches(place)? {
        let loss = task.loss(&model, &batch.rows, &device);
        losses.push(loss.clone().into_scalar::<f64>());
        rows.push(batch.samples as u64);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(task.settings().optim.lr, model, gradients);
        hashes.push(parameter_hashes(&model));
    }
    Ok(RankRun {
        losses,
        rows,
        weights_hash: weights_hash(&model),
        hashes,
        weights: Weights::of(&model),
        partial_bytes: 0,
        buckets: 0,
        moved: Moved::default(),
        expected: None,
        held: None,
        algorithms: Vec::new(),
        hidden: 0.0,
    })
}
