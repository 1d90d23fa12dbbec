//! The measure of all modes: a plain Burn loop on one thread. Of our crates it
//! uses the order of rows and nothing else.

use burn::optim::GradientsParams;
use burn::tensor::Device;
use collectives::Place;

use crate::weights::weights_hash;
use crate::{Error, Task, optimizer};

/// What the single process saw.
pub(super) struct Reference {
    /// The loss of each step.
    pub(super) losses: Vec<f64>,
    /// The rows of each step.
    pub(super) rows: Vec<u64>,
    /// A hash of the final weights.
    pub(super) weights_hash: u64,
}

pub(super) fn run(task: &Task) -> Result<Reference, Error> {
    let alone = Place { rank: 0, world: 1 };
    let device = Device::flex().autodiff();
    let lr = task.settings().optim.lr;
    let mut losses = Vec::new();
    let mut rows = Vec::new();

    let mut model = task.model(&device);
    let mut optim = optimizer(&task.settings().optim);
    let criterion = task.criterion(&device);
    for batch in task.batches(alone)? {
        let (features, targets) = task.train_rows(&batch.rows, &device);
        let loss = criterion.forward(model.forward(features), targets);
        losses.push(loss.clone().into_scalar::<f64>());
        rows.push(batch.rows.len() as u64);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(lr, model, gradients);
    }
    Ok(Reference {
        losses,
        rows,
        weights_hash: weights_hash(&model),
    })
}
