//! DistributedDataParallel: replicas kept in step while the backward pass is still running.
use std::ops::Deref;
use std::sync::Arc;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::Tensor;
use collectives::{Communicator, Place, Stats};

use crate::bucket::BucketPlan;
use crate::reducer::Progress;
use crate::replica::{Means, Replica, Terms};
use crate::shards::Shards;
use crate::slots::Slots;
use crate::{CommHook, DdpConfig, Error, Result, StepRecord, unpack};

impl DdpConfig {
    /// Makes this rank's replica of `module`. A collective call: every rank makes its own, at the
    /// same point, from a module of the same structure; all start from rank 0's values.
    ///
    /// The replica has leaves of its own, also when ranks pass clones of one module. Clones are the
    /// way to a start that can be repeated: Burn's seed belongs to the process, so threads that
    /// seed and draw at the same time mix their draws. Seed and make the module once before
    /// [`spawn`](collectives::launch::spawn), and pass `module.clone()` on each rank.
    ///
    /// # Errors
    ///
    /// [`Error::ModelMismatch`] on every rank if the modules or bucket caps differ;
    /// [`Error::UnsupportedDtype`], [`Error::Reparameterized`], [`Error::ManyDevices`],
    /// [`Error::Config`] for what cannot be wrapped; else the error of a collective.
    ///
    /// # Cost
    ///
    /// One all-gather of a hash, one broadcast of all parameters, in pieces of 4 MB.
    pub fn init<M: Module>(
        &self,
        module: M,
        communicator: Communicator,
    ) -> Result<DistributedDataParallel<M>> {
        Ok(DistributedDataParallel {
            replica: self.replica(module, communicator, Terms::default())?,
            flats: Vec::new(),
            averaged: false,
        })
    }
}

/// One rank's replica of a module; it derefs to the module, whose methods work as ever.
///
/// Made by [`DdpConfig::init`]. A step is `forward`, [`backward`](Self::backward) and
/// [`step`](Self::step); [`last_step`](Self::last_step) then has the loss over all ranks, the
/// buckets and their times, [`stats`](Self::stats) the bytes. To evaluate on one rank, use
/// a clone of [`module`](Self::module): the others wait at most the time-out for their next step.
///
/// # Memory
///
/// The buckets, together as large as all gradients, *are* the gradients that
/// [`backward`](Self::backward) returns: views, not copies. Besides them a backward pass holds the
/// one gradient being copied. When the optimizer has let go of the views the buckets stay
/// allocated for the next pass.
#[derive(Debug)]
pub struct DistributedDataParallel<M: Module> {
    replica: Replica<M>,
    /// The last buckets, to be used again once nobody looks at them.
    flats: Vec<Tensor<1>>,
    /// Whether a backward pass has come to its end.
    averaged: bool,
}

impl<M: Module> DistributedDataParallel<M> {
    /// Runs the backward pass and returns the mean gradients over the samples of all ranks.
    ///
    /// `loss` is the mean over this rank's `samples`; all ranks may have different numbers of
    /// them. A rank with none passes a stand-in's loss and 0: it contributes exact zeros, whatever
    /// the stand-in's gradients are. A parameter that no rank used gets no gradient, so that the
    /// optimizer leaves it alone; one that some ranks used gets their sum over the total count.
    ///
    /// A collective call: every rank makes it once per step. Gradients are returned, not
    /// accumulated: two calls before one step give two means, and each forward pass must be
    /// followed by its backward pass before the next, or share one. For several backward passes
    /// with one reduction there is [`accumulate`](Self::accumulate).
    ///
    /// If a gradient of any rank is no number, every rank gets none at all, so that all leave out
    /// the same step; [`last_step`](Self::last_step) names the ranks. With
    /// [`max_grad_norm`](DdpConfig::max_grad_norm) gradients whose norm is above it are scaled down.
    ///
    /// # Errors
    ///
    /// The first error of a tap, of Burn's backward pass, or of a collective. It is final: the
    /// other ranks are told, and later calls return it again.
    ///
    /// # Cost
    ///
    /// One all-reduce per bucket, most of it hidden behind Burn's backward pass.
    pub fn backward<const D: usize>(
        &mut self,
        loss: Tensor<D>,
        samples: usize,
    ) -> Result<GradientsParams> {
        self.reclaim()?;
        let plan = self.plan().clone();
        let means = self.replica.backward(loss, samples)?;
        Ok(self.unpack(means, &plan))
    }

    /// Runs one backward pass for each of `micro_batches`, one after the other, and reduces once:
    /// returns the mean gradients over all their samples, of all ranks.
    ///
    /// `loss` gives each micro-batch's mean loss and its samples; ranks may have different numbers
    /// of micro-batches, or none. Only the last one's backward pass overlaps communication. As
    /// every step, this one is decided here: there is no mode to remember, and a rest of fewer
    /// micro-batches is one more call.
    ///
    /// ```
    /// # use burn::module::Param;
    /// # use burn::tensor::{Device, Tensor};
    /// # use collectives::{CommunicatorConfig, launch};
    /// # use ddp::DdpConfig;
    /// let micro_batches = [1.0, 2.0, 3.0, 4.0, 5.0];
    /// let means = launch::spawn(2, &CommunicatorConfig::new(), |communicator| {
    ///     let device = Device::flex().autodiff();
    ///     let weight = Param::from_tensor(Tensor::<1>::zeros([1], &device));
    ///     let mut weight = DdpConfig::new().init(weight, communicator)?;
    ///     let mut means = Vec::new();
    ///     for group in micro_batches.chunks(2) {
    ///         let loss = |weight: &Param<Tensor<1>>, factor| (weight.val() * factor, 1);
    ///         let gradients = weight.accumulate(group.iter().copied(), loss)?;
    ///         means.push(gradients.get::<1>(weight.id).unwrap().into_scalar::<f32>());
    ///     }
    ///     Ok::<_, ddp::Error>(means)
    /// })?;
    /// assert_eq!(means, [[1.5, 3.5, 5.0], [1.5, 3.5, 5.0]]);
    /// # Ok::<(), collectives::launch::LaunchError>(())
    /// ```
    ///
    /// # The same bits at every world size
    ///
    /// With [`micro_shards`](DdpConfig::micro_shards) the micro-batches are this rank's shards of
    /// the global batch, as [`Batch::micro_shards`](crate::Batch::micro_shards) has them, each once
    /// and in order. Losses, gradients and so weights are then those of any other world size, to
    /// the bit; [`Shards`] says how. It takes up to log2 of a rank's shards more buffers per bucket.
    ///
    /// # Errors
    ///
    /// As [`backward`](Self::backward); [`Error::MicroShards`] if there are more or fewer than this
    /// rank's shards.
    ///
    /// # Panics
    ///
    /// If `loss` does; the other ranks are told.
    pub fn accumulate<T, const D: usize>(
        &mut self,
        micro_batches: impl IntoIterator<Item = T>,
        loss: impl FnMut(&M, T) -> (Tensor<D>, usize),
    ) -> Result<GradientsParams> {
        self.reclaim()?;
        let plan = self.plan().clone();
        let means = self.replica.accumulate(micro_batches, loss)?;
        Ok(self.unpack(means, &plan))
    }

    /// Gives the last buckets back, as far as nobody looks at them any more.
    fn reclaim(&mut self) -> Result<()> {
        self.replica.check()?;
        for flat in self.flats.drain(..) {
            if let Some(buffer) = unpack::reclaim(flat) {
                self.replica.recycle(buffer);
            }
        }
        Ok(())
    }

    /// Turns buckets into gradients: one flat tensor each, and a view of it per parameter; none
    /// for a step that is left out. The plan is that of the pass, which may have been the last
    /// with it.
    fn unpack(&mut self, means: Means, plan: &BucketPlan) -> GradientsParams {
        self.averaged = true;
        let buckets = means.buckets.into_iter();
        self.flats = buckets
            .map(|buffer| unpack::flat(buffer, self.replica.device()))
            .collect();
        match means.skipped {
            true => GradientsParams::new(),
            false => unpack::gradients(&self.replica, plan, &means.used, &self.flats),
        }
    }

    /// Lets the optimizer update the module with the gradients of [`backward`](Self::backward).
    ///
    /// Each rank has an optimizer of its own; equal gradients keep the replicas equal. A collective
    /// call where there are buffers to send or replicas to compare; see
    /// [`broadcast_buffers`](DdpConfig::broadcast_buffers) and
    /// [`check_replicas_every`](DdpConfig::check_replicas_every).
    ///
    /// # Errors
    ///
    /// [`Error::State`] if this replica's [`backward`](Self::backward) has never run: gradients of
    /// `loss.backward()` are this rank's alone, and the replicas would part. Such gradients in a later
    /// step are not seen. [`Error::ReplicasDiffer`]; the error of a collective.
    pub fn step(
        &mut self,
        learning_rate: impl Into<ModuleLearningRate>,
        optimizer: &mut ModuleOptimizer,
        gradients: GradientsParams,
    ) -> Result<()> {
        self.replica.check()?;
        if !self.averaged {
            return Err(Error::State(
                "these gradients are no mean over the ranks: call `backward` of the wrapped module, \
                 with the loss, instead of `backward` of the loss",
            ));
        }
        self.replica
            .step(|module, _, _| Ok(optimizer.step(learning_rate, module, gradients)))
    }

    /// Gives every rank rank 0's values of all that is not trained: BatchNorm's running state, that
    /// of layers of your own, frozen parameters, and those of whole numbers. A collective call.
    ///
    /// # Errors
    ///
    /// That of the broadcast.
    pub fn sync_buffers(&mut self) -> Result<()> {
        self.replica.sync_buffers()
    }

    /// Compares the values of all replicas: a hash of every parameter. A collective call; it reads
    /// all parameters once.
    ///
    /// # Errors
    ///
    /// [`Error::ReplicasDiffer`] names the first parameter that differs and the ranks that do, the
    /// same on all ranks.
    pub fn check_replicas(&mut self) -> Result<()> {
        self.replica.check_replicas()
    }

    /// Means over the samples of all ranks: of an accuracy, say. Each of `parts` is the means over
    /// some of this rank's samples, and their number. A collective call of one small all-reduce.
    ///
    /// With [`micro_shards`](DdpConfig::micro_shards) there is one part for each micro-shard of this
    /// rank, and the bits are the same at every world size. A test set is cut like a batch:
    /// [`Shards::own`] has the shards of this rank, and a part may be empty.
    ///
    /// ```
    /// # use burn::module::Param;
    /// # use burn::tensor::{Device, Tensor};
    /// # use collectives::{CommunicatorConfig, launch};
    /// # use ddp::DdpConfig;
    /// let accuracy = launch::spawn(2, &CommunicatorConfig::new(), |communicator| {
    ///     let device = Device::flex().autodiff();
    ///     let model = Param::from_tensor(Tensor::<1>::zeros([1], &device));
    ///     let mut model = DdpConfig::new().init(model, communicator)?;
    ///     // 3 of 4 right on rank 0, 0 of 1 on rank 1.
    ///     let (right, rows) = [(0.75, 4), (0.0, 1)][model.place().rank];
    ///     let [accuracy] = model.weighted_mean([([right], rows)])?;
    ///     Ok::<_, ddp::Error>(accuracy)
    /// })?;
    /// assert_eq!(accuracy, [0.6, 0.6]);
    /// # Ok::<(), collectives::launch::LaunchError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::NoSamples`] on every rank if no rank had any; [`Error::MicroShards`] if there are
    /// micro-shards and this rank has more or fewer; that of the all-reduce. All are final.
    pub fn weighted_mean<const K: usize>(
        &mut self,
        parts: impl IntoIterator<Item = ([f64; K], usize)>,
    ) -> Result<[f64; K]> {
        self.replica.weighted_mean(parts)
    }

    /// Takes buckets through the ranks by `hook` from now on. A collective call: every rank
    /// registers the same one between the same steps.
    ///
    /// # Errors
    ///
    /// [`Error::ModelMismatch`] on every rank if the hooks' names differ; [`Error::Config`] with
    /// [`micro_shards`](DdpConfig::micro_shards), whose order is its own.
    pub fn register_comm_hook(&mut self, hook: Arc<dyn CommHook>) -> Result<()> {
        self.replica.register_comm_hook(hook)
    }

    /// How the global batch is cut into micro-shards, if it is.
    pub fn shards(&self) -> Option<Shards> {
        self.replica.shards()
    }

    /// Replaces the module by what `change` makes of it: freeze a layer, load a record.
    ///
    /// Every rank makes the same change. Parameters that stop requiring a gradient are from then
    /// on unused. One with a new id, as from a record, takes the place of the one it replaces. One
    /// that was not trained before cannot be from now on: the next
    /// [`backward`](Self::backward) says so.
    ///
    /// # Panics
    ///
    /// If `change` does; the module is lost then, and every later use of it panics.
    pub fn update(&mut self, change: impl FnOnce(M) -> M) {
        self.replica.update(change);
    }

    /// The module, with taps behind its parameters. Outside [`backward`](Self::backward) they do
    /// nothing.
    pub fn module(&self) -> &M {
        self.replica.module()
    }

    /// The plain module, without taps.
    pub fn into_module(self) -> M {
        self.replica.into_module()
    }

    /// What the last step did; empty before the first.
    pub fn last_step(&self) -> &StepRecord {
        self.replica.last_step()
    }

    /// Counts of this rank's collectives so far.
    pub fn stats(&self) -> Result<Stats> {
        self.replica.stats()
    }

    /// Where this rank stands.
    pub fn place(&self) -> Place {
        self.replica.place()
    }

    /// The parameters that are trained.
    pub fn slots(&self) -> &Slots {
        self.replica.slots()
    }

    /// The layout of the buckets: a guess in the first step, measured from then on.
    pub fn plan(&self) -> &BucketPlan {
        self.replica.plan()
    }

    /// A counter of the buckets reduced so far, for other threads to watch.
    pub fn progress(&self) -> Progress {
        self.replica.progress()
    }
}

impl<M: Module> Deref for DistributedDataParallel<M> {
    type Target = M;

    fn deref(&self) -> &M {
        self.module()
    }
}
