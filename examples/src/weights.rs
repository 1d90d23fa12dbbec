//! Looks into a model's weights, and at its gradients.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use crate::fingerprint;

/// A hash of every bit of every weight, in visiting order.
pub(crate) fn weights_hash<M: Module>(model: &M) -> u64 {
    let mut visitor = Bits(Vec::new());
    model.visit(&mut visitor);
    fingerprint(visitor.0)
}

struct Bits(Vec<u64>);

impl ModuleVisitor for Bits {
    fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<D>>) {
        // f64 holds every f32 exactly, so that its bits tell two of them apart.
        let data = parameter.base().into_data();
        self.0.extend(data.iter::<f64>().map(f64::to_bits));
    }
}

/// Multiplies every gradient by `factor`.
pub(crate) fn scale_gradients<M: Module>(model: &M, gradients: &mut GradientsParams, factor: f64) {
    model.visit(&mut Scale { gradients, factor });
}

struct Scale<'a> {
    gradients: &'a mut GradientsParams,
    factor: f64,
}

impl ModuleVisitor for Scale<'_> {
    fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.remove::<D>(parameter.id) {
            let scaled = gradient.mul_scalar(self.factor);
            self.gradients.register(parameter.id, scaled);
        }
    }
}
