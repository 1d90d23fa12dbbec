//! The single process's clipping: the global norm, in the order that is written down in decision 8.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use super::shards::{Means, tree};
use crate::{Mlp, Precision};

/// Scales the gradients down so that their norm is at most `most`; 0 is no limit.
pub(super) fn clip(
    model: &Mlp,
    gradients: GradientsParams,
    most: f64,
    precision: Precision,
) -> GradientsParams {
    if most == 0.0 {
        return gradients;
    }
    let mut visitor = Collect {
        gradients: &gradients,
        parameters: Vec::new(),
    };
    model.visit(&mut visitor);
    let squares = visitor.parameters.iter().map(|values| squares(values));
    let norm = sum(squares.collect()).sqrt();
    let factor = most / (norm + 1e-6);
    if factor >= 1.0 {
        return gradients;
    }
    let factor = precision.round(factor);
    let scaled = visitor.parameters.iter().flatten();
    let scaled = scaled.map(|value| precision.round(value * factor));
    Means::of(model, scaled, precision)
}

/// Blocks of 1024, eight sums side by side in each, then the tree over blocks.
fn squares(values: &[f64]) -> f64 {
    let blocks = values.chunks(1024).map(|block| {
        let whole = block.len() / 8 * 8;
        let lane = |lane: usize| {
            let of_lane = block[..whole].iter().skip(lane).step_by(8);
            of_lane.fold(0.0, |sum, value| sum + value * value)
        };
        let lanes = (0..8).map(lane).fold(0.0, |sum, lane| sum + lane);
        let rest = block[whole..].iter();
        lanes + rest.fold(0.0, |sum, value| sum + value * value)
    });
    sum(blocks.collect())
}

fn sum(leaves: Vec<f64>) -> f64 {
    match leaves.len() {
        0 => 0.0,
        count => tree(0..count, Precision::F64, &|at| vec![leaves[at]])[0],
    }
}

struct Collect<'a> {
    gradients: &'a GradientsParams,
    parameters: Vec<Vec<f64>>,
}

impl ModuleVisitor for Collect<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = self.gradients.get::<D>(param.id);
        let values = gradient.map(|gradient| gradient.into_data().iter::<f64>().collect());
        self.parameters.push(values.unwrap_or_default());
    }
}
