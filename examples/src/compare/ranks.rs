//! The same training by ranks, rightly or with a fault.

use burn::optim::GradientsParams;
use burn::tensor::Device;
use collectives::{Choice, Collective, Communicator, Place, Row, launch};

use super::Fault;
use crate::weights::{scale_gradients, weights_hash};
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
    /// Buckets a step, by the plan in force at the end.
    pub(super) buckets: usize,
    /// What its all-reduces moved, and were predicted to.
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
    fault: Option<Fault>,
) -> Result<Vec<RankRun>, Error> {
    let settings = task.settings();
    let mut config = settings.collectives.clone().with_algorithm(choice.clone());
    config.all_reduce = None;
    let runs = launch::spawn(
        settings.run.world_size,
        &config,
        |communicator| match fault {
            Some(Fault::NoAllReduce) => run_alone(task, communicator.place()),
            _ => run_rank(task, communicator, fault),
        },
    )?;
    Ok(runs)
}

fn run_rank(task: &Task, communicator: Communicator, fault: Option<Fault>) -> ddp::Result<RankRun> {
    let place = communicator.place();
    let device = Device::flex().autodiff();
    let lr = task.settings().optim.lr;
    let mut losses = Vec::new();
    let mut rows = Vec::new();
    let mut hidden = 0.0;

    let model = task.model(&device);
    let mut model = task.settings().ddp.init(model, communicator)?;
    let mut optim = optimizer(&task.settings().optim);
    let criterion = task.criterion(&device);
    let dealt = match fault {
        Some(Fault::FullBatch) => Place { rank: 0, world: 1 },
        _ => place,
    };
    for batch in task.batches(dealt)? {
        let (features, targets) = task.train_rows(&batch.rows, &device);
        // Counted where the rows enter the model; a stand-in does not count.
        rows.push(match batch.samples {
            0 => 0,
            _ => features.dims()[0] as u64,
        });
        let loss = criterion.forward(model.forward(features), targets);
        let samples = match fault {
            Some(Fault::PlainMean) => batch.samples.min(1),
            _ => batch.samples,
        };
        let mut gradients = model.backward(loss, samples)?;
        if fault == Some(Fault::SumForMean) {
            scale_gradients(model.module(), &mut gradients, place.world as f64);
        }
        model.step(lr, &mut optim, gradients)?;
        losses.push(model.last_step().loss);
        hidden += model.last_step().hidden();
    }
    let stats = model.stats()?;
    let algorithms = stats.algorithms(Collective::AllReduce);
    Ok(RankRun {
        hidden: hidden / losses.len() as f64,
        losses,
        rows,
        buckets: model.plan().len(),
        moved: stats.of(Collective::AllReduce),
        algorithms: algorithms.map(|algorithm| algorithm.to_string()).collect(),
        weights_hash: weights_hash(model.module()),
    })
}

/// The fault of a rank that reduces nothing: a plain loop over its own part.
fn run_alone(task: &Task, place: Place) -> ddp::Result<RankRun> {
    let device = Device::flex().autodiff();
    let mut losses = Vec::new();
    let mut rows = Vec::new();
    let mut model = task.model(&device);
    let mut optim = optimizer(&task.settings().optim);
    let criterion = task.criterion(&device);
    for batch in task.batches(place)? {
        let (features, targets) = task.train_rows(&batch.rows, &device);
        let loss = criterion.forward(model.forward(features), targets);
        losses.push(loss.clone().into_scalar::<f64>());
        rows.push(batch.samples as u64);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(task.settings().optim.lr, model, gradients);
    }
    Ok(RankRun {
        losses,
        rows,
        weights_hash: weights_hash(&model),
        buckets: 0,
        moved: Row::default(),
        algorithms: Vec::new(),
        hidden: 0.0,
    })
}
