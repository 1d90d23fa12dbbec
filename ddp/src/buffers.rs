//! State that no gradient changes: BatchNorm's running mean and variance, and what is frozen.
//!
//! Burn presents running state as a float parameter that requires no gradient, keyed by thread
//! until the next forward pass. It is known here by the layer it lies in.
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bool, Int, Tensor, TensorData};
use collectives::CommStream;

use crate::Result;

/// Which parameters are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    /// Running state of BatchNorm.
    Running,
    /// Every parameter that is not trained, of any type.
    Untrained,
}

/// Gives every rank rank 0's values, in one broadcast; returns them too.
pub(crate) fn broadcast<M: Module>(
    module: M,
    which: Which,
    stream: &CommStream,
) -> Result<(M, Vec<TensorData>)> {
    // Each rank's last update waits in its layers for the next forward pass, which would put it
    // over what comes here; this is the call that makes them take it in.
    drop(module.valid());
    let mut values = collect(&module, which);
    if values.is_empty() {
        return Ok((module, values));
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
    let values = work.wait()?;
    Ok((overwrite(module, which, values.clone()), values))
}

/// Puts back `values` that were there before.
pub(crate) fn restore<M: Module>(module: M, which: Which, values: Vec<TensorData>) -> M {
    drop(module.valid());
    overwrite(module, which, values)
}

pub(crate) fn collect<M: Module>(module: &M, which: Which) -> Vec<TensorData> {
    let mut visitor = Collect {
        which,
        place: Vec::new(),
        values: Vec::new(),
    };
    module.visit(&mut visitor);
    visitor.values
}

fn overwrite<M: Module>(module: M, which: Which, values: Vec<TensorData>) -> M {
    module.map(&mut Overwrite {
        which,
        place: Vec::new(),
        values: values.into_iter(),
    })
}

/// Where a parameter lies: names of the fields down to it, and the types that hold them.
pub(crate) type Path = Vec<(String, String)>;

impl Which {
    pub(crate) fn holds(self, place: &Path, trained: bool) -> bool {
        let running = |(name, holder): &(String, String)| {
            holder == "Struct:BatchNorm" && (name == "running_mean" || name == "running_var")
        };
        !trained
            && match self {
                Self::Running => place.last().is_some_and(running),
                Self::Untrained => true,
            }
    }
}

struct Collect {
    which: Which,
    place: Path,
    values: Vec<TensorData>,
}

impl ModuleVisitor for Collect {
    fn enter_module(&mut self, name: &str, holder: &str) {
        self.place.push((name.to_owned(), holder.to_owned()));
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.place.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.which.holds(&self.place, param.is_require_grad()) {
            self.values.push(param.base().into_data());
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        if self.which == Which::Untrained {
            self.values.push(param.base().into_data());
        }
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        if self.which == Which::Untrained {
            self.values.push(param.base().into_data());
        }
    }
}

struct Overwrite {
    which: Which,
    place: Path,
    values: std::vec::IntoIter<TensorData>,
}

impl Overwrite {
    /// The value of a parameter that is meant.
    fn next_if(&mut self, meant: bool) -> Option<TensorData> {
        meant.then(|| self.values.next()).flatten()
    }
}

impl ModuleMapper for Overwrite {
    fn enter_module(&mut self, name: &str, holder: &str) {
        self.place.push((name.to_owned(), holder.to_owned()));
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.place.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let meant = self.which.holds(&self.place, param.is_require_grad());
        let Some(data) = self.next_if(meant) else {
            return param;
        };
        param.map(|old| {
            let (device, dtype) = (old.device(), old.dtype());
            Tensor::from_data(data, (&device, dtype)).set_require_grad(false)
        })
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        let Some(data) = self.next_if(self.which == Which::Untrained) else {
            return param;
        };
        param.map(|old| {
            let (device, dtype) = (old.device(), old.dtype());
            Tensor::from_data(data, (&device, dtype))
        })
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        let Some(data) = self.next_if(self.which == Which::Untrained) else {
            return param;
        };
        param.map(|old| {
            let (device, dtype) = (old.device(), old.dtype());
            Tensor::from_data(data, (&device, dtype))
        })
    }
}
