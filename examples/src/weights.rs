//! Looks into a model's weights, and at its gradients.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Tensor, TensorData};

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

/// A hash of each parameter, in visiting order.
pub(crate) fn parameter_hashes<M: Module>(model: &M) -> Vec<u64> {
    let weights = Weights::of(model).0.into_iter();
    let hash = |(_, values): (String, Vec<f64>)| fingerprint(values.into_iter().map(f64::to_bits));
    weights.map(hash).collect()
}

/// The values of a model, with the paths of its parameters, in visiting order.
#[derive(Default)]
pub(crate) struct Weights(Vec<(String, Vec<f64>)>);

impl Weights {
    pub(crate) fn of<M: Module>(model: &M) -> Self {
        let mut visitor = Collect {
            path: Vec::new(),
            weights: Self::default(),
        };
        model.visit(&mut visitor);
        visitor.weights
    }

    /// How many parameters there are.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Path of a parameter.
    pub(crate) fn name(&self, at: usize) -> &str {
        &self.0[at].0
    }

    /// The first element of parameter `at` whose bits differ: its path, index, and both values.
    pub(crate) fn first_difference(
        &self,
        other: &Self,
        at: usize,
    ) -> Option<(&str, usize, f64, f64)> {
        let (name, own) = &self.0[at];
        let pairs = own.iter().zip(&other.0[at].1);
        pairs.enumerate().find_map(|(index, (&own, &other))| {
            (own.to_bits() != other.to_bits()).then_some((name.as_str(), index, own, other))
        })
    }
}

struct Collect {
    path: Vec<String>,
    weights: Weights,
}

impl ModuleVisitor for Collect {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<D>>) {
        let values = parameter.base().into_data().iter::<f64>().collect();
        self.weights.0.push((self.path.join("."), values));
    }
}

/// Whether every gradient is a number.
pub(crate) fn all_finite<M: Module>(model: &M, gradients: &GradientsParams) -> bool {
    let mut visitor = Finite {
        gradients,
        all: true,
    };
    model.visit(&mut visitor);
    visitor.all
}

struct Finite<'a> {
    gradients: &'a GradientsParams,
    all: bool,
}

impl ModuleVisitor for Finite<'_> {
    fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.get::<D>(parameter.id) {
            self.all &= gradient.into_data().iter::<f64>().all(f64::is_finite);
        }
    }
}

/// Turns over the lowest bit of the first weight, in f32 or f64.
pub(crate) fn flip_last_bit<M: Module>(model: M) -> M {
    model.map(&mut Flip { done: false })
}

struct Flip {
    done: bool,
}

impl ModuleMapper for Flip {
    fn map_float<const D: usize>(&mut self, parameter: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if std::mem::replace(&mut self.done, true) {
            return parameter;
        }
        parameter.map(|tensor| {
            let (device, dtype) = (tensor.device(), tensor.dtype());
            let mut data = tensor.inner().into_data();
            // Little-endian numbers begin with their lowest bits.
            TensorData::with_bytes_mut([&mut data], |mut bytes| bytes[0][0] ^= 1);
            Tensor::from_data(data, (&device, dtype)).require_grad()
        })
    }
}
