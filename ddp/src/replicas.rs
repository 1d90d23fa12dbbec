//! Whether all replicas hold the same values, and if not, where they part.
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Bool, Int, Tensor, TensorData};
use collectives::CommStream;

use crate::buffers::Which;
use crate::{Error, Result, hash};

/// Compares a hash of every parameter over all ranks. `buffers`: BatchNorm's running state too.
pub(crate) fn compare<M: Module>(
    module: &M,
    buffers: bool,
    step: u64,
    stream: &CommStream,
) -> Result<()> {
    let mut visitor = Hashes {
        buffers,
        path: Vec::new(),
        containers: Vec::new(),
        names: Vec::new(),
        hashes: Vec::new(),
    };
    module.visit(&mut visitor);
    let Hashes { names, hashes, .. } = visitor;
    let count = names.len();
    let work = stream.run(move |communicator| {
        let mut all = vec![0; count * communicator.world_size()];
        communicator.all_gather(&hashes, &mut all)?;
        Ok(all)
    });
    let all = work.wait()?;
    let ranks: Vec<&[u64]> = all.chunks(count.max(1)).collect();
    let differing = |at: usize| {
        let differs = |rank: &usize| ranks[*rank][at] != ranks[0][at];
        (0..ranks.len()).filter(differs).collect::<Vec<_>>()
    };
    let mut parted = (0..count)
        .map(|at| (at, differing(at)))
        .filter(|(_, ranks)| !ranks.is_empty());
    let Some((at, ranks)) = parted.next() else {
        return Ok(());
    };
    Err(Error::ReplicasDiffer {
        step,
        ranks,
        parameter: names[at].clone(),
        of: 1 + parted.count(),
    })
}

struct Hashes {
    buffers: bool,
    path: Vec<String>,
    containers: Vec<String>,
    names: Vec<String>,
    hashes: Vec<u64>,
}

impl Hashes {
    fn add(&mut self, data: &TensorData) {
        self.names.push(self.path.join("."));
        self.hashes.push(hash::of_values(data.as_bytes()));
    }
}

impl ModuleVisitor for Hashes {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.push(name.to_owned());
        self.containers.push(container.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
        self.containers.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let running = Which::Running.holds(&self.containers, param.is_require_grad());
        if self.buffers || !running {
            self.add(&param.base().into_data());
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.add(&param.base().into_data());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.add(&param.base().into_data());
    }
}
