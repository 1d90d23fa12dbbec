//! ShardedDataParallel: each rank steps its part, and the parts are gathered.
use std::mem;
use std::ops::Deref;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::Tensor;
use collectives::{CommStream, Communicator, Place, Stats};
use ddp::{
    BucketPlan, Buffer, Keep, Means, Order, Progress, Replica, Shards, Slots, StepRecord, Terms,
};

use crate::pieces::Pieces;
use crate::shards::{self, Collect, Cut, Fill, Gradients};
use crate::{Error, Result, Stage, ZeroConfig, trial};

impl ZeroConfig {
    /// Makes this rank's replica of `module`, which owns `optimizer` from now on. A collective call:
    /// every rank makes its own, at the same point, from a module of the same structure and an
    /// optimizer with the same settings; all start from rank 0's values.
    ///
    /// As with [`DdpConfig::init`](ddp::DdpConfig::init), seed and make the module once, and pass
    /// clones of it.
    ///
    /// # Errors
    ///
    /// As [`DdpConfig::init`](ddp::DdpConfig::init); [`Error::WholeTensor`] for an optimizer that
    /// cannot be given pieces of parameters, found by a trial on small ones;
    /// [`Error::HasState`] for one that is not new.
    ///
    /// # Cost
    ///
    /// As there, and nine trial steps on 40 elements of each parameter.
    pub fn init<M: Module>(
        &self,
        module: M,
        optimizer: ModuleOptimizer,
        mut communicator: Communicator,
    ) -> Result<ShardedDataParallel<M>> {
        let tried = self
            .validate()
            .and_then(|()| match optimizer.to_record().len() {
                0 => trial::element_wise(&module, &optimizer),
                tensors => Err(Error::HasState(tensors)),
            });
        let hash = match tried {
            Ok(hash) => hash,
            Err(error) => {
                communicator.abort(error.to_string());
                return Err(error);
            }
        };
        let terms = Terms {
            keep: match self.stage {
                Stage::One => Keep::Whole,
                Stage::Two => Keep::Part,
            },
            order: Order::Use,
            signature: format!(
                "stage: {}\noptimizer, by what it makes of a trial: {hash:x}",
                u8::from(self.stage)
            ),
        };
        Ok(ShardedDataParallel {
            stage: self.stage,
            replica: self.ddp.replica(module, communicator, terms)?,
            optimizer,
            held: None,
            flats: Vec::new(),
        })
    }
}

/// One rank's replica of a module, and its part of the optimizer; it derefs to the module, whose
/// methods work as ever.
///
/// Made by [`ZeroConfig::init`]. A step is `forward`, [`backward`](Self::backward) and
/// [`step`](Self::step). Losses, clipping, steps that are left out, accumulation, uneven batches and
/// micro-shards are [ddp's](ddp::DistributedDataParallel); with a
/// [deterministic](collectives::CommunicatorConfig::deterministic) communicator, weights are ddp's
/// to the bit, at every stage.
///
/// After any error every later call returns it again.
///
/// # Memory
///
/// For each of the model's P trained parameters, in f32 with Adam on N ranks, between two steps:
///
/// | stage | parameters | gradients | state |
/// |-------|------------|-----------|-------|
/// | 1     | 4 P        | 4 P       | 8 P/N |
/// | 2     | 4 P        | 4 P/N     | 8 P/N |
///
/// A backward pass of stage 2 holds, beside its gradients, only the buckets that are filling or under
/// way. [`accumulate`](Self::accumulate) needs them all until its last backward pass, since it reduces
/// once.
pub struct ShardedDataParallel<M: Module> {
    stage: Stage,
    replica: Replica<M>,
    optimizer: ModuleOptimizer,
    /// The gradients of the last pass.
    held: Option<Means>,
    /// What the module's parameters are views of.
    flats: Vec<Tensor<1>>,
}

impl<M: Module> ShardedDataParallel<M> {
    /// Runs the backward pass and takes the mean gradients over the samples of all ranks, of which
    /// this rank keeps what its [`step`](Self::step) needs.
    ///
    /// A collective call; `loss` and `samples` are as
    /// [ddp's](ddp::DistributedDataParallel::backward).
    ///
    /// # Errors
    ///
    /// As there, and [`ddp::Error::State`] if the gradients of the last pass have not been used.
    ///
    /// # Cost
    ///
    /// Stage 1: one all-reduce per bucket. Stage 2: one reduce-scatter, half the bytes; one small
    /// all-reduce more for the first and the last bucket, and one small all-gather in the end.
    pub fn backward<const D: usize>(&mut self, loss: Tensor<D>, samples: usize) -> Result<()> {
        self.make_room()?;
        self.held = Some(self.replica.backward(loss, samples)?);
        Ok(())
    }

    /// Runs one backward pass for each of `micro_batches` and reduces once; as
    /// [ddp's](ddp::DistributedDataParallel::accumulate).
    ///
    /// # Errors
    ///
    /// As there, and as [`backward`](Self::backward).
    ///
    /// # Panics
    ///
    /// If `loss` does; the other ranks are told.
    pub fn accumulate<T, const D: usize>(
        &mut self,
        micro_batches: impl IntoIterator<Item = T>,
        loss: impl FnMut(&M, T) -> (Tensor<D>, usize),
    ) -> Result<()> {
        self.make_room()?;
        self.held = Some(self.replica.accumulate(micro_batches, loss)?);
        Ok(())
    }

    fn make_room(&self) -> Result<()> {
        self.replica.check()?;
        match self.held {
            None => Ok(()),
            Some(_) => Err(Error::Ddp(ddp::Error::State(
                "the gradients of the last backward pass wait for a step: call `step`, or \
                 `accumulate` for several backward passes of one step",
            ))),
        }
    }

    /// Lets the optimizer update this rank's pieces with the gradients of the last
    /// [`backward`](Self::backward), and gathers the parts of all ranks. A collective call.
    ///
    /// # Errors
    ///
    /// [`ddp::Error::State`] if there are no gradients; [`ddp::Error::ReplicasDiffer`]; the error of
    /// a collective, with which the module is lost.
    ///
    /// # Cost
    ///
    /// Of the update 1/N, and one all-gather per bucket.
    pub fn step(&mut self, learning_rate: impl Into<ModuleLearningRate>) -> Result<()> {
        self.replica.check()?;
        let Some(means) = self.held.take() else {
            return Err(Error::Ddp(ddp::Error::State(
                "there are no gradients to step with: call `backward` or `accumulate` first",
            )));
        };
        if means.skipped {
            self.recycle(means.buckets);
            self.replica.step(|module, _, _| Ok(module))?;
            return Ok(());
        }
        let pieces = Pieces::new(self.replica.plan().clone(), self.replica.place());
        let device = self.replica.device().clone();
        let buckets = means.buckets.into_iter().enumerate();
        let parts: Vec<_> = buckets
            .map(|(bucket, buffer)| {
                let start = match self.stage {
                    Stage::One => pieces.part(bucket).start,
                    Stage::Two => 0,
                };
                (ddp::flat(buffer, &device), start)
            })
            .collect();
        let mut flats = mem::take(&mut self.flats);
        let optimizer = &mut self.optimizer;
        self.replica.step(|module, slots, stream| {
            let device = shards::device(&module, slots);
            let mut gradients = Gradients {
                slots,
                pieces: &pieces,
                used: &means.used,
                parts: &parts,
                gradients: GradientsParams::new(),
            };
            module.visit(&mut gradients);
            let gradients = gradients.gradients;
            let module = module.map(&mut Cut {
                slots,
                pieces: &pieces,
            });
            let module = optimizer.step(learning_rate, module, gradients);
            let (module, filled) = gather(module, slots, &pieces, mem::take(&mut flats), stream)?;
            flats = filled
                .into_iter()
                .map(|buffer| ddp::flat(buffer, &device))
                .collect();
            Ok(module.map(&mut Fill {
                slots,
                pieces: &pieces,
                flats: &flats,
            }))
        })?;
        self.flats = flats;
        self.recycle(parts.into_iter().filter_map(|(part, _)| ddp::reclaim(part)));
        Ok(())
    }

    /// Gives back the memory of gradients, if they were whole buckets.
    fn recycle(&mut self, buffers: impl IntoIterator<Item = Buffer>) {
        if let Stage::One = self.stage {
            for buffer in buffers {
                self.replica.recycle(buffer);
            }
        }
    }

    /// As [`DistributedDataParallel::sync_buffers`](ddp::DistributedDataParallel::sync_buffers).
    ///
    /// # Errors
    ///
    /// As there.
    pub fn sync_buffers(&mut self) -> Result<()> {
        Ok(self.replica.sync_buffers()?)
    }

    /// As [`DistributedDataParallel::check_replicas`](ddp::DistributedDataParallel::check_replicas).
    ///
    /// # Errors
    ///
    /// As there.
    pub fn check_replicas(&mut self) -> Result<()> {
        Ok(self.replica.check_replicas()?)
    }

    /// As [`DistributedDataParallel::weighted_mean`](ddp::DistributedDataParallel::weighted_mean).
    ///
    /// # Errors
    ///
    /// As there.
    pub fn weighted_mean<const K: usize>(
        &mut self,
        parts: impl IntoIterator<Item = ([f64; K], usize)>,
    ) -> Result<[f64; K]> {
        Ok(self.replica.weighted_mean(parts)?)
    }

    /// Replaces the module by what `change` makes of it, as
    /// [`DistributedDataParallel::update`](ddp::DistributedDataParallel::update). The optimizer keeps
    /// its state.
    ///
    /// # Panics
    ///
    /// If `change` does; the module is lost then, and every later use of it panics.
    pub fn update(&mut self, change: impl FnOnce(M) -> M) {
        // The next step writes every parameter anew.
        self.flats.clear();
        self.replica.update(change);
    }

    /// The module, with taps behind its parameters; see
    /// [`DistributedDataParallel::module`](ddp::DistributedDataParallel::module).
    pub fn module(&self) -> &M {
        self.replica.module()
    }

    /// The plain module, without taps.
    pub fn into_module(self) -> M {
        self.replica.into_module()
    }

    /// This rank's optimizer: its state is that of this rank's pieces alone.
    pub fn optimizer(&self) -> &ModuleOptimizer {
        &self.optimizer
    }

    /// What is sharded.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// What the last step did; empty before the first.
    pub fn last_step(&self) -> &StepRecord {
        self.replica.last_step()
    }

    /// Counts of this rank's collectives so far.
    ///
    /// # Errors
    ///
    /// The error with which it failed.
    pub fn stats(&self) -> Result<Stats> {
        Ok(self.replica.stats()?)
    }

    /// How the global batch is cut into micro-shards, if it is.
    pub fn shards(&self) -> Option<Shards> {
        self.replica.shards()
    }

    /// Where this rank stands.
    pub fn place(&self) -> Place {
        self.replica.place()
    }

    /// The layout of the buckets: a guess before the first step, and from then on in the order in
    /// which rank 0's first forward pass used the parameters, from the last to the first.
    pub fn plan(&self) -> &BucketPlan {
        self.replica.plan()
    }

    /// A counter of the buckets reduced so far, for other threads to watch.
    pub fn progress(&self) -> Progress {
        self.replica.progress()
    }
}

/// Gathers the pieces of all ranks: a module without parameters, and every bucket of them. `old` is
/// what they were in before, to be filled anew.
fn gather<M: Module>(
    module: M,
    slots: &Slots,
    pieces: &Pieces,
    old: Vec<Tensor<1>>,
    stream: &CommStream,
) -> ddp::Result<(M, Vec<Buffer>)> {
    let mut own = Collect {
        slots,
        pieces,
        values: vec![None; slots.len()],
    };
    let module = module.map(&mut own);
    let plan = pieces.plan();
    // Nobody looks at the old values any more, unless the user keeps a clone of the module.
    let mut old = old.into_iter();
    let works: Vec<_> = (0..plan.len())
        .map(|bucket| {
            let fits = |buffer: &Buffer| {
                buffer.dtype() == plan.dtype(bucket) && buffer.len() == plan.gradients_in(bucket)
            };
            let room = old.next().and_then(ddp::reclaim).filter(fits);
            let mut room = room
                .unwrap_or_else(|| Buffer::zeros(plan.dtype(bucket), plan.gradients_in(bucket)));
            own.write(bucket, pieces.part(bucket).start, &mut room);
            stream.run(move |communicator| {
                match &mut room {
                    Buffer::F32(values) => communicator.all_gather_in_place(values)?,
                    Buffer::F64(values) => communicator.all_gather_in_place(values)?,
                }
                Ok(room)
            })
        })
        .collect();
    let filled = works.into_iter().map(|work| Ok(work.wait()?));
    Ok((module, filled.collect::<ddp::Result<_>>()?))
}

impl<M: Module> Deref for ShardedDataParallel<M> {
    type Target = M;

    fn deref(&self) -> &M {
        self.module()
    }
}

impl<M: Module> std::fmt::Debug for ShardedDataParallel<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShardedDataParallel")
            .field("stage", &self.stage)
            .field("replica", &self.replica)
            .finish_non_exhaustive()
    }
}
