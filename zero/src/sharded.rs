//! ShardedDataParallel: each rank steps its part, and the parts are gathered.
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::Tensor;
use collectives::{Communicator, Place, Stats};
use ddp::{
    BucketPlan, Buffer, DdpConfig, Keep, Means, Order, Progress, Replica, Shards, StepRecord, Terms,
};

use crate::checkpoint::{self, Own, Saved};
use crate::flats::Flats;
use crate::memory::{Forecast, Reduced};
use crate::pieces::Pieces;
use crate::shards::{self, Collect, Cut, Empty, Fill, Gradients};
use crate::state::{self, State};
use crate::trial::Kept;
use crate::vault::Vault;
use crate::{Error, Memory, MemoryReport, Result, Stage, ZeroConfig, trial};

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
        let trial = match tried {
            Ok(trial) => trial,
            Err(error) => {
                communicator.abort(error.to_string());
                return Err(error);
            }
        };
        let terms = Terms {
            keep: match self.stage {
                Stage::One => Keep::Whole,
                Stage::Two | Stage::Three => Keep::Part,
            },
            // Parameters that are in parts are in parts of buckets, before any has been used.
            order: match self.stage {
                Stage::One | Stage::Two => Order::Use,
                Stage::Three => Order::Visiting,
            },
            signature: format!(
                "stage: {}{}\noptimizer, by what it makes of a trial: {:x}",
                u8::from(self.stage),
                self.order_of_gathers(),
                trial.hash
            ),
        };
        let mut made = ShardedDataParallel {
            stage: self.stage,
            replica: self.ddp.replica(module, communicator, terms)?,
            optimizer,
            held: None,
            values: Values::Whole(None),
            kept: Vec::new(),
        };
        made.kept = trial.by_slot(made.replica.slots());
        if let Stage::Three = self.stage {
            made.part_with_parameters()?;
        }
        Ok(made)
    }

    /// The settings on which the order of calls in a pass depends, a line: of no concern to other ranks
    /// but at stage 3, whose gathers lie between the reductions.
    fn order_of_gathers(&self) -> String {
        let DdpConfig {
            overlap,
            comm_thread,
            rung_stride,
            ..
        } = self.ddp;
        match self.stage {
            Stage::One | Stage::Two => String::new(),
            Stage::Three => format!(
                "\noverlap, comm_thread, rung_stride: {overlap} {comm_thread} {rung_stride}"
            ),
        }
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
/// | 3     | 4 P/N      | 4 P/N     | 8 P/N |
///
/// From stage 2 on a backward pass holds, beside its gradients, only the buckets that are filling or
/// under way. [`accumulate`](Self::accumulate) needs them all until its last backward pass, since it
/// reduces once.
///
/// # Stage 3
///
/// The module holds placeholders of the parameters' shapes. `val()` gathers a parameter's bucket; it
/// is let go when the last parameter of it has been used, and gathered again in the backward pass,
/// where that needs it. From the second pass on the bucket that was used next in the last one is
/// gathered at the same time, unless [`overlap`](ddp::DdpConfig::overlap) is off. What a layer derives from a weight (a transpose, say) and the graph keeps,
/// keeps the weight; `gradient_checkpointing()` on the device helps.
///
/// Gradients of a parameter's uses are summed use by use. That is ddp's order, and its bits, unless what
/// one `val()` returned is used several times and there is another `val()` of it in the same pass.
///
/// Every use is a collective call, so all ranks use their modules alike: as many forward passes, by
/// the same way through the model, and validation on all of them. Ranks that do not are told so by an
/// error, in the next [`backward`](Self::backward). Whether and when calls overlap orders them, so here
/// `overlap`, `comm_thread` and `rung_stride` are the same on all ranks. Clones of the module see the
/// values of the present, and `base()` sees none: nor do Burn's recorders, which write zeros for them. Use
/// [`save`](Self::save), or [`into_module`](Self::into_module).
pub struct ShardedDataParallel<M: Module> {
    stage: Stage,
    replica: Replica<M>,
    optimizer: ModuleOptimizer,
    /// The gradients of the last pass.
    held: Option<Means>,
    values: Values,
    /// What the optimizer keeps of each slot.
    kept: Vec<Kept>,
}

/// Where the trained parameters are.
enum Values {
    /// In the module: views of these, once a step has been taken.
    Whole(Option<Arc<Flats>>),
    /// In parts.
    Parts(Arc<Vault>),
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

    fn pieces(&self) -> Pieces {
        Pieces::new(self.replica.plan().clone(), self.replica.place())
    }

    /// Leaves placeholders in the module, and this rank's parts in a vault.
    fn part_with_parameters(&mut self) -> Result<()> {
        let ranks = self.place().world;
        if let Some(shards) = self.shards().filter(|shards| shards.count() % ranks != 0) {
            return Err(Error::Ddp(ddp::Error::Config {
                name: "micro_shards",
                value: shards.count().to_string(),
                expected: "a multiple of the world size at stage 3: parameters are gathered in each \
                           forward pass, of which all ranks must have as many",
            }));
        }
        let pieces = self.pieces();
        let mut parts = Vec::new();
        self.replica.load(|module, slots, _| {
            let device = shards::device(&module, slots);
            let module = module.map(&mut Cut {
                slots,
                pieces: &pieces,
                parts: None,
            });
            let mut own = Collect::new(slots, &pieces);
            let module = module.map(&mut own);
            parts = own.parts();
            Ok(module.map(&mut Empty {
                slots,
                device: &device,
            }))
        })?;
        let vault = Arc::new(Vault::new(pieces, self.replica.stream()?.clone(), parts));
        self.replica.lend_from(vault.clone())?;
        self.values = Values::Parts(vault);
        Ok(())
    }

    fn make_room(&mut self) -> Result<()> {
        self.replica.check_loans()?;
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
    /// At stages 1 and 2 the gathers go on when it has returned, in the order in which the forward pass
    /// uses the parameters, and each is waited for when one of its parameters is first looked at, by
    /// whatever way; with [`overlap`](ddp::DdpConfig::overlap) or
    /// [`comm_thread`](ddp::DdpConfig::comm_thread) off, and for parameters that Burn maps when they are
    /// saved or loaded, here.
    ///
    /// # Errors
    ///
    /// [`ddp::Error::State`] if there are no gradients; [`ddp::Error::ReplicasDiffer`]; the error of
    /// a collective, with which the module is lost. That of a gather which fails later is told by the
    /// next call; the parameters are zeros until then.
    ///
    /// # Cost
    ///
    /// Of the update 1/N, and one all-gather per bucket.
    pub fn step(&mut self, learning_rate: impl Into<ModuleLearningRate>) -> Result<()> {
        self.replica.check_loans()?;
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
        let pieces = self.pieces();
        let device = self.replica.device().clone();
        let buckets = means.buckets.into_iter().enumerate();
        let parts: Vec<_> = buckets
            .map(|(bucket, buffer)| {
                let start = match self.stage {
                    Stage::One => pieces.part(bucket).start,
                    Stage::Two | Stage::Three => 0,
                };
                (ddp::flat(buffer, &device), start)
            })
            .collect();
        let (optimizer, values) = (&mut self.optimizer, &mut self.values);
        let (failure, overlaps) = (self.replica.failure(), self.replica.overlaps());
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
            let on_host = device.clone().without_autodiff();
            let own: Option<Vec<_>> = match values {
                Values::Whole(_) => None,
                Values::Parts(vault) => {
                    let parts = vault.take().into_iter();
                    Some(parts.map(|part| ddp::flat(part, &on_host)).collect())
                }
            };
            let module = module.map(&mut Cut {
                slots,
                pieces: &pieces,
                parts: own.as_deref(),
            });
            drop(own);
            let module = optimizer.step(learning_rate, module, gradients);
            let mut own = Collect::new(slots, &pieces);
            let module = module.map(&mut own);
            match values {
                Values::Whole(flats) => {
                    // Its parameters are all replaced; none waits for it any more.
                    let old = flats.take().and_then(Arc::into_inner);
                    let old = old.map(Flats::into_tensors).unwrap_or_default();
                    let new = Flats::gather(&own, old, device.clone(), stream, failure);
                    if !overlaps {
                        new.wait_for_all()?;
                    }
                    let new = flats.insert(Arc::new(new));
                    Ok(module.map(&mut Fill::new(slots, &pieces, new, &device)))
                }
                Values::Parts(vault) => {
                    vault.put(own.parts());
                    Ok(module.map(&mut Empty {
                        slots,
                        device: &device,
                    }))
                }
            }
        })?;
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
    /// As there; [`ddp::Error::State`] at stage 3, where no two ranks hold the same.
    pub fn check_replicas(&mut self) -> Result<()> {
        self.refuse_parts("there are no replicas to compare at stage 3")?;
        Ok(self.replica.check_replicas()?)
    }

    fn refuse_parts(&self, why: &'static str) -> Result<()> {
        match self.values {
            Values::Whole(_) => Ok(()),
            Values::Parts(_) => Err(Error::Ddp(ddp::Error::State(why))),
        }
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
    /// # Errors
    ///
    /// [`ddp::Error::State`] at stage 3, where the module has no values that could be changed; that of
    /// a gather that is known to have failed.
    ///
    /// # Panics
    ///
    /// If `change` does; the module is lost then, and every later use of it panics.
    pub fn update(&mut self, change: impl FnOnce(M) -> M) -> Result<()> {
        self.refuse_parts(
            "the parameters are in parts at stage 3: take the module out with `into_module`, and \
             wrap it again",
        )?;
        self.replica.check_loans()?;
        // The next step writes every parameter anew.
        self.values = Values::Whole(None);
        self.replica.update(change);
        Ok(())
    }

    /// The module, with taps behind its parameters; see
    /// [`DistributedDataParallel::module`](ddp::DistributedDataParallel::module).
    pub fn module(&self) -> &M {
        self.replica.module()
    }

    /// The plain module, without taps, with all its parameters. At stage 3 a collective call, of one
    /// all-gather per bucket.
    ///
    /// # Errors
    ///
    /// That of a collective, now or before.
    pub fn into_module(mut self) -> Result<M> {
        self.replica.check_loans()?;
        let module = self.replica.module().clone().materialize();
        self.replica.check_loans()?;
        Ok(module)
    }

    /// Writes the model and the optimizer's state to one safetensors file, whole: `model.{path}`, and
    /// `optimizer.{path}.{field}` with its numbers in the metadata. A collective call; rank 0 writes, to
    /// a file beside `path` that takes its place in the end.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] on every rank if it cannot be written; the error of a collective.
    ///
    /// # Cost
    ///
    /// Each rank copies its pieces; rank 0 holds the largest tensor beside them, whole.
    pub fn save(&mut self, path: impl AsRef<Path>) -> Result<()> {
        self.replica.check_loans()?;
        let (pieces, slots) = (self.pieces(), self.replica.slots());
        let parts: Option<Vec<_>> = match &self.values {
            Values::Whole(_) => None,
            Values::Parts(vault) => {
                let parts = vault.copy().into_iter();
                let device = self.replica.device();
                Some(parts.map(|part| ddp::flat(part, device)).collect())
            }
        };
        let mut own = Collect::new(slots, &pieces);
        let cut = self.module().clone().map(&mut Cut {
            slots,
            pieces: &pieces,
            parts: parts.as_deref(),
        });
        drop(cut.map(&mut own));
        let own = Own::new(self.module(), slots, own.values, &self.optimizer)?;
        own.save(path.as_ref(), slots, &pieces, self.replica.stream()?)
    }

    /// Takes the model's values and the optimizer's state from a file that [`save`](Self::save) wrote, at
    /// any world size and stage. A collective call; every rank reads its part.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] on every rank if the file cannot be read or is of another model. If that
    /// is seen only while it is read, the module is lost.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        self.make_room()?;
        let pieces = self.pieces();
        let stream = self.replica.stream()?.clone();
        let mut saved = Saved::open(
            path,
            self.module(),
            self.replica.slots(),
            &self.kept,
            &stream,
        )?;
        let (optimizer, values) = (&mut self.optimizer, &mut self.values);
        let mut told = Ok(());
        let done = self.replica.load(|module, slots, _| {
            let ids = shards::ids(&module, slots);
            let mut read = || -> std::result::Result<M, String> {
                let text = |error: std::io::Error| error.to_string();
                *optimizer = saved.optimizer(optimizer, slots, &pieces, &ids)?;
                match values {
                    Values::Whole(flats) => {
                        *flats = None;
                        saved.fill(module.clone(), slots, true).map_err(text)
                    }
                    Values::Parts(vault) => {
                        let mut own = Collect::new(slots, &pieces);
                        for slot in 0..slots.len() {
                            let bytes = saved.piece(slot, slots, &pieces).map_err(text)?;
                            own.take_in(slot, bytes);
                        }
                        vault.put(own.parts());
                        saved.fill(module.clone(), slots, false).map_err(text)
                    }
                }
            };
            let read = read();
            let outcome = read.as_ref().map(drop).map_err(String::clone);
            told = checkpoint::all_read(path, outcome, &stream);
            match (&told, read) {
                (Ok(()), Ok(module)) => Ok(module),
                _ => {
                    // It is final on every rank, and none stops the others before they know why.
                    drop(stream.barrier().wait());
                    Err(ddp::Error::State("a checkpoint could not be read"))
                }
            }
        });
        told?;
        Ok(done?)
    }

    /// What this rank holds, by the formula and as counted.
    ///
    /// # Errors
    ///
    /// [`Error::Record`], if Burn's record of the optimizer is not what it was.
    ///
    /// # Cost
    ///
    /// A copy of this rank's optimizer state.
    pub fn memory_report(&self) -> Result<MemoryReport> {
        let pieces = self.pieces();
        let plan = pieces.plan();
        let bytes = |buffer: &Buffer| buffer.len() * buffer.dtype().bytes();
        let whole: usize = (0..plan.len())
            .map(|bucket| plan.gradients_in(bucket) * plan.dtype(bucket).bytes())
            .sum();
        let parameters = match &self.values {
            // Before the first step they are leaves of their own, of the same size.
            Values::Whole(flats) => flats.as_ref().map_or(whole, |flats| flats.bytes()),
            Values::Parts(vault) => vault.bytes(),
        };
        let held = self.held.iter().flat_map(|means| &means.buckets);
        let state = state::of(&self.optimizer)?;
        let measured = Memory {
            parameters,
            gradients: held.map(bytes).sum(),
            state: state.values().map(State::bytes).sum(),
        };
        let config = self.replica.config();
        let forecast = Forecast {
            stage: Some(self.stage),
            pieces: &pieces,
            slots: self.replica.slots(),
            kept: &self.kept,
            lent_again: &self.replica.lent_again(),
            ahead: self.stage == Stage::Three && self.replica.overlaps(),
            reduced: match (config.overlap, config.comm_thread) {
                (false, _) => Reduced::Afterwards,
                (true, true) => Reduced::Meanwhile,
                (true, false) => Reduced::AtOnce,
            },
        };
        Ok(forecast.report(measured))
    }

    /// The reports of all ranks; see [`memory_table`](crate::memory_table). A collective call.
    ///
    /// # Errors
    ///
    /// As [`memory_report`](Self::memory_report); that of the gathering.
    pub fn memory_reports(&self) -> Result<Vec<MemoryReport>> {
        let own = self.memory_report()?;
        let stream = self.replica.stream()?;
        let work = stream.run(move |communicator| communicator.all_gather_object(&own));
        Ok(work.wait()?)
    }

    /// Bytes of gathered buckets of parameters, in use and on their way: the most at a time so far. At
    /// stages 1 and 2, where parameters are whole, 0.
    pub fn most_gathered(&self) -> usize {
        self.replica.most_lent()
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
