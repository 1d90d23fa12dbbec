//! The measure of exact modes: one process that sums its micro-shards by the definition of the
//! tree, one number after the other. It uses nothing of what it measures but the order of rows.

use std::ops::Range;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use ddp::Batch;

use crate::model::tensor;
use crate::{Mlp, Precision};

/// The mean gradients and loss over the shards of `batch`; `loss` runs forward on some rows.
pub(super) fn backward(
    model: &Mlp,
    batch: &Batch,
    precision: Precision,
    loss: impl Fn(&Mlp, &[usize]) -> Tensor<1>,
) -> (GradientsParams, f64) {
    let shards = batch.micro_shards();
    let leaf = |shard: usize| {
        let shard = &shards[shard];
        let loss = loss(model, &shard.rows);
        let mean = loss.clone().into_scalar::<f64>();
        let gradients = GradientsParams::from_grads(loss.backward(), model);
        let mut leaf = Leaf {
            gradients: &gradients,
            values: Vec::new(),
        };
        model.visit(&mut leaf);
        leaf.values.push(mean);
        let samples = shard.samples as f64;
        for value in &mut leaf.values {
            // A stand-in's gradient may be no number, and counts for nothing.
            *value = match shard.samples {
                0 => 0.0,
                _ => precision.round(*value * samples),
            };
        }
        leaf.values
    };
    let mut sum = tree(0..shards.len(), precision, &leaf);
    let samples = batch.samples as f64;
    let loss = sum.pop().expect("the loss comes last") / samples;
    let means = sum
        .into_iter()
        .map(|value| precision.round(value / samples));
    (Means::of(model, means, precision), loss)
}

/// T(1) = leaf; T(n) = T(p) + T(n - p), p the largest power of two below n.
pub(super) fn tree(
    leaves: Range<usize>,
    precision: Precision,
    leaf: &impl Fn(usize) -> Vec<f64>,
) -> Vec<f64> {
    if leaves.len() == 1 {
        return leaf(leaves.start);
    }
    let middle = leaves.start + leaves.len().next_power_of_two() / 2;
    let left = tree(leaves.start..middle, precision, leaf);
    let right = tree(middle..leaves.end, precision, leaf);
    let pairs = left.into_iter().zip(right);
    pairs.map(|(a, b)| precision.round(a + b)).collect()
}

/// All gradients of a model in visiting order.
struct Leaf<'a> {
    gradients: &'a GradientsParams,
    values: Vec<f64>,
}

impl ModuleVisitor for Leaf<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = self.gradients.get::<D>(param.id);
        let gradient = gradient.expect("a multilayer perceptron uses all it has");
        self.values.extend(gradient.into_data().iter::<f64>());
    }
}

/// Gradients from all their numbers in visiting order.
pub(super) struct Means<I> {
    rest: I,
    precision: Precision,
    gradients: GradientsParams,
}

impl<I: Iterator<Item = f64>> Means<I> {
    pub(super) fn of(model: &Mlp, values: I, precision: Precision) -> GradientsParams {
        let mut means = Self {
            rest: values,
            precision,
            gradients: GradientsParams::new(),
        };
        model.visit(&mut means);
        means.gradients
    }
}

impl<I: Iterator<Item = f64>> ModuleVisitor for Means<I> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let shape: [usize; D] = param.dims();
        let values = self.rest.by_ref().take(shape.iter().product()).collect();
        let device = param.device().without_autodiff();
        let gradient = tensor(values, shape, self.precision, &device);
        self.gradients.register::<D>(param.id, gradient);
    }
}
