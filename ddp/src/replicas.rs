//! Whether all replicas hold the same values, and if not, where they part.
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Bool, Int, Tensor, TensorData};
use collectives::CommStream;

use crate::buffers::{Path, Which};
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
        place: Vec::new(),
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
    place: Path,
    names: Vec<String>,
    hashes: Vec<u64>,
}

impl Hashes {
    fn add(&mut self, data: &TensorData) {
        let names: Vec<&str> = self.place.iter().map(|(name, _)| name.as_str()).collect();
        self.names.push(match names.is_empty() {
            true => "the module itself".to_owned(),
            false => names.join("."),
        });
        self.hashes.push(hash::of_values(data.as_bytes()));
    }
}

impl ModuleVisitor for Hashes {
    fn enter_module(&mut self, name: &str, holder: &str) {
        self.place.push((name.to_owned(), holder.to_owned()));
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.place.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let running = Which::Running.holds(&self.place, param.is_require_grad());
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
