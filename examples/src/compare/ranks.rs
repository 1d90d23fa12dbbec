//! The same training by ranks, rightly or with a fault.

use burn::optim::GradientsParams;
use burn::tensor::Device;
use collectives::{Choice, Communicator, Place, Row, launch};

use super::Fault;
use crate::moved::{minus, reductions};
use crate::weights::{Weights, flip_last_bit, parameter_hashes, scale_gradients, weights_hash};
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
    /// What its reductions moved, and were predicted to.
    pub(super) moved: Row,
    /// The algorithms that carried them out.
    pub(super) algorithms: Vec<String>,
    /// Share of communication that lay inside the backward pass, mean over
    /// steps.
    pub(super) hidden: f64,
}

pub(super) fn run(
    task: &Task,
    choice: &Choice,
    world: usize,
    fault: Option<Fault>,
) -> Result<Vec<RankRun>, Error> {
    let settings = task.settings();
    let mut config = settings.collectives.clone().with_algorithm(choice.clone());
    config.all_reduce = None;
    let runs = launch::spawn(world, &config, |communicator| match fault {
        Some(Fault::NoAllReduce) => run_alone(task, communicator.place()),
        _ => run_rank(task, communicator, fault),
    })?;
    Ok(runs)
}

fn run_rank(task: &Task, communicator: Communicator, fault: Option<Fault>) -> ddp::Result<RankRun> {
    let place = communicator.place();
    let device = Device::flex().autodiff();
    let settings = task.settings();
    let lr = settings.optim.lr;
    let mut losses = Vec::new();
    let mut rows = Vec::new();
    let mut hashes = Vec::new();
    let mut hidden = 0.0;
    let mut partial_bytes = 0;

    let model = task.model(&device);
    let mut model = settings.ddp.init(model, communicator)?;
    let mut optim = optimizer(&settings.optim);
    let at_first = reductions(&model.stats()?);
    let dealt = match fault {
        Some(Fault::FullBatch) => Place { rank: 0, world: 1 },
        _ => place,
    };
    for batch in task.batches(dealt)? {
        let mut rows_of_step = 0;
        let mut gradients = model.accumulate(task.micro_batches(&batch), |model, batch| {
            // Counted where the rows enter the model; a stand-in does not count.
            rows_of_step += match batch.samples {
                0 => 0,
                _ => batch.rows.len() as u64,
            };
            let samples = match fault {
                Some(Fault::PlainMean) => batch.samples.min(1),
                _ => batch.samples,
            };
            (task.loss(model, &batch.rows, &device), samples)
        })?;
        rows.push(rows_of_step);
        if fault == Some(Fault::SumForMean) {
            scale_gradients(model.module(), &mut gradients, place.world as f64);
        }
        model.step(lr, &mut optim, gradients)?;
        if fault == Some(Fault::OneBit) && losses.len() == Fault::ONE_BIT_STEP {
            model.update(flip_last_bit);
        }
        if settings.compare.exact && place.rank == 0 {
            hashes.push(parameter_hashes(model.module()));
        }
        losses.push(model.last_step().loss);
        hidden += model.last_step().hidden();
        partial_bytes = partial_bytes.max(model.last_step().partial_bytes);
    }
    let moved = minus(reductions(&model.stats()?), at_first);
    Ok(RankRun {
        hidden: hidden / losses.len() as f64,
        losses,
        rows,
        buckets: model.plan().len(),
        moved,
        algorithms: model.last_step().algorithms(),
        partial_bytes,
        weights_hash: weights_hash(model.module()),
        hashes,
        weights: match place.rank {
            0 => Weights::of(model.module()),
            _ => Weights::default(),
        },
    })
}

/// The fault of a rank that reduces nothing: a plain loop over its own part.
fn run_alone(task: &Task, place: Place) -> ddp::Result<RankRun> {
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
        moved: Row::default(),
        algorithms: Vec::new(),
        hidden: 0.0,
    })
}
