//! The measure of all modes: a plain Burn loop on one thread. Of our crates it
//! uses the order of rows and nothing else.

use burn::optim::GradientsParams;
use burn::tensor::Device;
use collectives::Place;

use super::{clip, shards};
use crate::weights::{Weights, all_finite, parameter_hashes, weights_hash};
use crate::{Error, Task, optimizer};

/// What the single process saw.
pub(super) struct Reference {
    /// The loss of each step.
    pub(super) losses: Vec<f64>,
    /// The rows of each step.
    pub(super) rows: Vec<u64>,
    /// A hash of the final weights.
    pub(super) weights_hash: u64,
    /// A hash of each parameter after each step, where bits are compared.
    pub(super) hashes: Vec<Vec<u64>>,
    /// The final weights.
    pub(super) weights: Weights,
}

pub(super) fn run(task: &Task) -> Result<Reference, Error> {
    let alone = Place { rank: 0, world: 1 };
    let device = Device::flex().autodiff();
    let settings = task.settings();
    let precision = settings.model.dtype;
    let mut losses = Vec::new();
    let mut rows = Vec::new();
    let mut hashes = Vec::new();

    let mut model = task.model(&device);
    let mut optim = optimizer(&settings.optim);
    for batch in task.batches(alone)? {
        rows.push(batch.rows.len() as u64);
        let gradients = if settings.ddp.micro_shards > 0 {
            let loss = |model: &_, rows: &[usize]| task.loss(model, rows, &device);
            let (gradients, loss) = shards::backward(&model, &batch, precision, loss);
            losses.push(loss);
            gradients
        } else {
            let loss = task.loss(&model, &batch.rows, &device);
            losses.push(loss.clone().into_scalar::<f64>());
            GradientsParams::from_grads(loss.backward(), &model)
        };
        let most = settings.ddp.max_grad_norm;
        let gradients = clip::clip(&model, gradients, most, precision);
        let finite = losses.last().is_some_and(|loss: &f64| loss.is_finite());
        if finite && all_finite(&model, &gradients) || !settings.ddp.skip_non_finite {
            model = optim.step(settings.optim.lr, model, gradients);
        }
        if settings.compare.exact {
            hashes.push(parameter_hashes(&model));
        }
    }
    Ok(Reference {
        losses,
        rows,
        weights_hash: weights_hash(&model),
        hashes,
        weights: Weights::of(&model),
    })
}
