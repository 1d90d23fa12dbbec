//! State that no gradient changes: BatchNorm's running mean and variance, and what is frozen.
//!
//! Burn presents running state as a float parameter that requires no gradient, keyed by thread
//! until the next forward pass. It is known here by the layer it lies in.
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Tensor, TensorData};
use collectives::CommStream;

use crate::Result;

/// Which parameters are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    /// Running state of BatchNorm.
    Running,
    /// Every float parameter that is not trained.
    Untrained,
}

/// Whether `module` has BatchNorm's running state.
pub(crate) fn has_running_state<M: Module>(module: &M) -> bool {
    !collect(module, Which::Running).is_empty()
}

/// Gives every rank rank 0's values, in one broadcast.
pub(crate) fn broadcast<M: Module>(module: M, which: Which, stream: &CommStream) -> Result<M> {
    // Each rank's last update waits in its layers for the next forward pass, which would put it
    // over what comes here; this is the call that makes them take it in.
    drop(module.valid());
    let mut values = collect(&module, which);
    if values.is_empty() {
        return Ok(module);
    }
    let work = stream.run(move |communicator| {
        TensorData::with_bytes_mut(values.iter_mut().collect::<Vec<_>>(), |mut bytes| {
            let mut together: Vec<u8> = bytes.iter().flat_map(|own| own.iter().copied()).collect();
            communicator.broadcast(&mut together, 0)?;
            let mut rest = &together[..];
            for own in &mut bytes {
                let (new, others) = rest.split_at(own.len());
                own.copy_from_slice(new);
                rest = others;
            }
            Ok::<_, collectives::Error>(())
        })?;
        Ok(values)
    });
    let values = work.wait()?.into_iter();
    Ok(module.map(&mut Overwrite {
        which,
        containers: Vec::new(),
        values,
    }))
}

fn collect<M: Module>(module: &M, which: Which) -> Vec<TensorData> {
    let mut visitor = Collect {
        which,
        containers: Vec::new(),
        values: Vec::new(),
    };
    module.visit(&mut visitor);
    visitor.values
}

impl Which {
    pub(crate) fn holds(self, containers: &[String], trained: bool) -> bool {
        !trained
            && match self {
                Self::Running => containers
                    .last()
                    .is_some_and(|last| last == "Struct:BatchNorm"),
                Self::Untrained => true,
            }
    }
}

struct Collect {
    which: Which,
    containers: Vec<String>,
    values: Vec<TensorData>,
}

impl ModuleVisitor for Collect {
    fn enter_module(&mut self, _: &str, container: &str) {
        self.containers.push(container.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.containers.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.which.holds(&self.containers, param.is_require_grad()) {
            self.values.push(param.base().into_data());
        }
    }
}

struct Overwrite {
    which: Which,
    containers: Vec<String>,
    values: std::vec::IntoIter<TensorData>,
}

impl ModuleMapper for Overwrite {
    fn enter_module(&mut self, _: &str, container: &str) {
        self.containers.push(container.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.containers.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.which.holds(&self.containers, param.is_require_grad()) {
            return param;
        }
        let Some(data) = self.values.next() else {
            return param;
        };
        param.map(|old| {
            let (device, dtype) = (old.device(), old.dtype());
            Tensor::from_data(data, (&device, dtype)).set_require_grad(false)
        })
    }
}
