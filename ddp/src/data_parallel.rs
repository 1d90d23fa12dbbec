//! DistributedDataParallel: replicas kept in step while the backward pass is still running.
use std::mem;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Gradients, Tensor, TensorData};
use collectives::{CommStream, Communicator, Place, Stats};

use crate::bucket::{BucketPlan, Caps};
use crate::buffers::{self, Which};
use crate::reducer::{Progress, Reduced, Reducer};
use crate::shards::{Shards, Sum};
use crate::slots::{self, Slots};
use crate::tap::{Line, Tap};
use crate::unpack;
use crate::{
    CommHook, DdpConfig, Error, Result, StepRecord, exact, exchange, norm, real, replicas,
};

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
        mut communicator: Communicator,
    ) -> Result<DistributedDataParallel<M>> {
        let made = self.caps().and_then(|caps| {
            let shards = self.shards(&communicator)?;
            let (module, slots) = slots::replicate(module, self, &mut communicator)?;
            Ok((caps, shards, module, slots))
        });
        let (caps, shards, module, slots) = match made {
            Ok(made) => made,
            Err(error) => {
                if !error.is_everyones() {
                    communicator.abort(error.to_string());
                }
                return Err(error);
            }
        };
        let line = Line::new(slots.len(), self.rung_stride);
        let taps: Vec<Tap> = (0..slots.len())
            .map(|slot| Tap::new(slot, line.clone()))
            .collect();
        let reverse: Vec<usize> = (0..slots.len()).rev().collect();
        let caps = caps.for_gradients(&slots.specs());
        let plan = BucketPlan::new(&slots.specs(), &reverse, caps);
        let device = module
            .devices()
            .first()
            .cloned()
            .unwrap_or_default()
            .without_autodiff();
        let place = communicator.place();
        let stream = match self.comm_thread {
            true => CommStream::new(communicator)?,
            false => CommStream::inline(communicator),
        };
        let mut reducer = Reducer::new(plan, slots.names(), stream, self.overlap)
            .with_norm(self.max_grad_norm > 0.0);
        if let Some(shards) = shards {
            reducer = reducer.with_shards(shards);
        }
        reducer.set_hook(self.comm_hook.make());
        Ok(DistributedDataParallel {
            config: *self,
            running_state: buffers::collect(&module, Which::Running),
            shards,
            module: Some(slots::tap(module, &slots, &taps)),
            changed: false,
            owned: false,
            slots,
            taps,
            line,
            device,
            place,
            caps,
            plan: reducer.plan().clone(),
            order: Order::Guessed,
            flats: Vec::new(),
            progress: reducer.progress(),
            state: State::Ready(Box::new(reducer)),
            averaged: false,
            record: StepRecord {
                rank: place.rank,
                ..StepRecord::default()
            },
            steps: 0,
        })
    }

    /// The tree of micro-shards, if bits are to be equal at every world size.
    fn shards(&self, communicator: &Communicator) -> Result<Option<Shards>> {
        if self.micro_shards == 0 {
            return Ok(None);
        }
        let place = communicator.place();
        if place.world > 1 && !communicator.config().deterministic {
            return Err(Error::Config {
                name: "deterministic",
                value: "false".to_owned(),
                expected: "with micro_shards it must be true, by \
                           `CommunicatorConfig::new().with_deterministic(true)`: the ranks' sums \
                           continue one tree",
            });
        }
        Shards::new(self.micro_shards, place).map(Some)
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
    config: DdpConfig,
    shards: Option<Shards>,
    /// BatchNorm's running state as all ranks had it last, in case a step is left out.
    running_state: Vec<TensorData>,
    /// Away only while the optimizer has it.
    module: Option<M>,
    /// Whether the module was changed since the slots were last found in it.
    changed: bool,
    /// Whether the taps know the module's leaves.
    owned: bool,
    slots: Slots,
    taps: Vec<Tap>,
    line: Arc<Line>,
    device: Device,
    place: Place,
    caps: Caps,
    plan: BucketPlan,
    order: Order,
    /// The last buckets, to be used again once nobody looks at them.
    flats: Vec<Tensor<1>>,
    progress: Progress,
    state: State,
    /// Whether a backward pass has come to its end.
    averaged: bool,
    record: StepRecord,
    /// Steps taken.
    steps: u64,
}

/// Where the order of the slots in the buckets comes from.
#[derive(Debug)]
enum Order {
    /// Visiting order reversed.
    Guessed,
    /// The arrival order of rank 0's first backward pass.
    Measured,
}

/// When the last backward pass began, and how long it took.
#[derive(Clone, Copy, Debug)]
struct Times {
    began: Instant,
    backward: Duration,
}

#[derive(Debug)]
enum State {
    Ready(Box<Reducer>),
    Failed(Error),
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
        let mut only = Some((loss, samples));
        self.pass(move |_| only.take().map(|(loss, samples)| (loss, samples, true)))
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
        mut loss: impl FnMut(&M, T) -> (Tensor<D>, usize),
    ) -> Result<GradientsParams> {
        let mut micro_batches = micro_batches.into_iter().peekable();
        self.pass(move |module| {
            let next = micro_batches.next()?;
            let last = micro_batches.peek().is_none();
            let (loss, samples) = loss(module, next);
            Some((loss, samples, last))
        })
    }

    /// A pass over what `next` gives: a loss, its samples, and whether it is the last.
    fn pass<const D: usize>(
        &mut self,
        next: impl FnMut(&M) -> Option<(Tensor<D>, usize, bool)>,
    ) -> Result<GradientsParams> {
        let mut reducer = self.take_reducer()?;
        for flat in self.flats.drain(..) {
            if let Some(buffer) = unpack::reclaim(flat) {
                reducer.recycle(buffer);
            }
        }
        let (mut reducer, ran) = match self.find_slots() {
            Ok(()) => self.run_micro_batches(reducer, next),
            Err(error) => (reducer, Err(error)),
        };
        let result = ran.and_then(|times| self.conclude(&mut reducer, times));
        self.forget();
        self.averaged |= result.is_ok();
        self.settle(reducer, result)
    }

    /// The reducer, with which every collective call begins. If it does not come back, because of
    /// a panic, the replica has failed.
    fn take_reducer(&mut self) -> Result<Box<Reducer>> {
        let failed = || State::Failed(Error::State("a collective call did not come to its end"));
        match mem::replace(&mut self.state, failed()) {
            State::Ready(reducer) => Ok(reducer),
            State::Failed(error) => {
                self.state = State::Failed(error.clone());
                Err(error)
            }
        }
    }

    /// Gives the reducer back, or keeps the first error and tells the other ranks.
    fn settle<R>(&mut self, reducer: Box<Reducer>, result: Result<R>) -> Result<R> {
        match &result {
            Ok(_) => self.state = State::Ready(reducer),
            Err(error) => {
                if !error.is_everyones() {
                    let reason = error.to_string();
                    drop(reducer.stream().run(move |communicator| {
                        communicator.abort(reason);
                        Ok(())
                    }));
                }
                self.state = State::Failed(error.clone());
            }
        }
        result
    }

    /// Runs every backward pass; the taps hand the gradients to the reducer.
    fn run_micro_batches<const D: usize>(
        &self,
        mut reducer: Box<Reducer>,
        mut next: impl FnMut(&M) -> Option<(Tensor<D>, usize, bool)>,
    ) -> (Box<Reducer>, Result<Times>) {
        loop {
            let Some((loss, samples, last)) = next(self.module()) else {
                // Not one micro-batch: zeros from this rank.
                let began = Instant::now();
                let begun = reducer.begin_without();
                let backward = Duration::ZERO;
                return (reducer, begun.map(|()| Times { began, backward }));
            };
            let began = Instant::now();
            let begun =
                mean_loss(&loss).and_then(|loss| reducer.begin_micro_batch(samples, loss, last));
            if let Err(error) = begun {
                return (reducer, Err(error));
            }
            let span = tracing::info_span!(target: "lockstep", "backward", rank = self.place.rank);
            self.line.plug(reducer);
            let leaves = span.in_scope(|| catch_unwind(AssertUnwindSafe(|| loss.backward())));
            let backward = began.elapsed();
            let (back, tap_error) = self.line.unplug();
            reducer = back;
            let leaves = match (leaves, tap_error) {
                (_, Some(error)) => Err(error),
                (Err(panic), None) => Err(Error::Backward(message(panic.as_ref()))),
                (Ok(leaves), None) => Ok(leaves),
            };
            if let Err(error) = leaves.and_then(|leaves| self.take_leaves(&mut reducer, leaves)) {
                return (reducer, Err(error));
            }
            // The next forward pass begins on the lowest rung.
            self.forget();
            if last {
                return (reducer, Ok(Times { began, backward }));
            }
        }
    }

    /// Waits for the means, and makes a record and gradients of them.
    fn conclude(&mut self, reducer: &mut Reducer, times: Times) -> Result<GradientsParams> {
        let span = tracing::info_span!(target: "lockstep", "wait", rank = self.place.rank);
        let mut reduced = span.in_scope(|| reducer.finish())?;
        let waited = times.began.elapsed().saturating_sub(times.backward);
        let inline = match reducer.stream().is_inline() {
            true => reduced
                .records
                .iter()
                .map(|b| b.end.min(times.backward).saturating_sub(b.start))
                .sum(),
            false => Duration::ZERO,
        };
        // A norm may overflow though its gradients do not; what then is to be scaled by?
        let finite = reduced.finite && reduced.norm.is_none_or(f64::is_finite);
        let skipped = self.config.skip_non_finite && !finite;
        let norm = reduced.norm.filter(|norm| norm.is_finite());
        if let Some(factor) = norm.and_then(|norm| norm::clip(norm, self.config.max_grad_norm)) {
            for (bucket, buffer) in reduced.buckets.iter_mut().enumerate() {
                buffer.scale(0..self.plan.gradients_in(bucket), factor);
            }
        }
        let unused = |slot: &usize| reduced.used[*slot] == 0;
        self.record = StepRecord {
            step: self.record.step + 1,
            rank: self.place.rank,
            loss: reduced.loss,
            samples: reduced.samples,
            micro_batches: reduced.micro_batches,
            partial_bytes: reduced.partial_bytes,
            grad_norm: reduced.norm,
            non_finite: mem::take(&mut reduced.non_finite),
            skipped,
            backward: times.backward,
            overlapped: self.config.overlap && !reducer.stream().is_inline(),
            exposed: waited + inline,
            buckets: mem::take(&mut reduced.records),
            unused: (0..self.slots.len())
                .filter(unused)
                .map(|slot| self.slots.name(slot).to_owned())
                .collect(),
        };
        let arrival = mem::take(&mut reduced.arrival);
        let gradients = self.unpack(reduced, skipped);
        self.measure(reducer, arrival)?;
        Ok(gradients)
    }

    /// Finds slots and leaves in a module that [`update`](Self::update) has changed.
    fn find_slots(&mut self) -> Result<()> {
        if let (Some(module), true) = (&self.module, mem::take(&mut self.changed)) {
            self.slots.find_again(module)?;
            if self.shards.is_some() {
                exact::refuse_inexact(module)?;
            }
        }
        if !mem::replace(&mut self.owned, true) {
            slots::own(self.module(), &self.slots, &self.taps);
        }
        Ok(())
    }

    /// Reduces, late, the gradients of parameters that were read around `val()`.
    fn take_leaves(&self, reducer: &mut Reducer, leaves: Gradients) -> Result<()> {
        slots::leaf_gradients(self.module(), &self.slots, &leaves, |slot, gradient| {
            if reducer.has(slot) {
                return Err(Error::LeafGradient {
                    parameter: self.slots.name(slot).to_owned(),
                });
            }
            reducer.ready(slot, gradient)
        })
    }

    /// Turns buckets into gradients: one flat tensor each, and a view of it per parameter; none
    /// for a step that is left out.
    fn unpack(&mut self, reduced: Reduced, skipped: bool) -> GradientsParams {
        let buckets = reduced.buckets.into_iter();
        self.flats = buckets
            .map(|buffer| unpack::flat(buffer, &self.device))
            .collect();
        if skipped {
            return GradientsParams::new();
        }
        let (slots, plan) = (&self.slots, &self.plan);
        unpack::gradients(self.module(), slots, plan, &reduced.used, &self.flats)
    }

    /// After the first step, lays the buckets out anew in the order in which rank 0's gradients
    /// arrived.
    fn measure(&mut self, reducer: &mut Reducer, arrival: Vec<usize>) -> Result<()> {
        // With micro-shards the loss must be summed in the type of the same bucket everywhere, and
        // what arrives first depends on which shards rank 0 has.
        let specs = self.slots.specs();
        let mixed = specs.iter().any(|slot| slot.dtype != specs[0].dtype);
        if self.shards.is_some() && mixed {
            return Ok(());
        }
        if let Order::Guessed = self.order {
            let order = reducer.agree(&self.complete(arrival))?;
            self.plan = BucketPlan::new(&self.slots.specs(), &order, self.caps);
            reducer.replan(self.plan.clone())?;
            self.order = Order::Measured;
        }
        Ok(())
    }

    /// `arrival`, followed by the slots that did not arrive, last first.
    fn complete(&self, mut arrival: Vec<usize>) -> Vec<usize> {
        for slot in (0..self.slots.len()).rev() {
            if !arrival.contains(&slot) {
                arrival.push(slot);
            }
        }
        arrival
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
        self.reducer()?;
        if !self.averaged {
            return Err(Error::State(
                "these gradients are no mean over the ranks: call `backward` of the wrapped module, \
                 with the loss, instead of `backward` of the loss",
            ));
        }
        let (tied, changed) = (self.slots.tied, self.changed);
        let span = tracing::info_span!(target: "lockstep", "optimizer", rank = self.place.rank);
        span.in_scope(|| {
            self.update(|module| {
                let module = optimizer.step(learning_rate, module, gradients);
                // The optimizer updates only the first of two parameters with one id.
                if tied { slots::tie(module) } else { module }
            });
        });
        // An optimizer leaves every id as it was.
        self.changed = changed;
        self.steps += 1;
        if self.config.broadcast_buffers && !self.running_state.is_empty() {
            if self.record.skipped {
                // The forward pass has taken in what was left out.
                let kept = self.running_state.clone();
                self.change(|module| buffers::restore(module, Which::Running, kept));
            } else {
                self.broadcast(Which::Running)?;
            }
        }
        let every = self.config.check_replicas_every;
        if every > 0 && self.steps.is_multiple_of(every) {
            self.check_replicas()?;
        }
        Ok(())
    }

    /// Replaces the module by one with the same leaves.
    fn change(&mut self, change: impl FnOnce(M) -> M) {
        if let Some(module) = self.module.take() {
            self.module = Some(change(module));
        }
    }

    /// Gives every rank rank 0's values of all that is not trained: BatchNorm's running state, that
    /// of layers of your own, frozen parameters, and those of whole numbers. A collective call.
    ///
    /// # Errors
    ///
    /// That of the broadcast.
    pub fn sync_buffers(&mut self) -> Result<()> {
        self.broadcast(Which::Untrained)
    }

    fn broadcast(&mut self, which: Which) -> Result<()> {
        let reducer = self.take_reducer()?;
        let Some(module) = self.module.take() else {
            return self.settle(reducer, Err(Error::State("the module is lost")));
        };
        let kept = module.clone();
        let result = buffers::broadcast(module, which, reducer.stream());
        let result = match result {
            Ok((module, values)) => {
                self.module = Some(module);
                if which == Which::Running {
                    self.running_state = values;
                }
                Ok(())
            }
            Err(error) => {
                self.module = Some(kept);
                Err(error)
            }
        };
        self.settle(reducer, result)
    }

    /// Compares the values of all replicas: a hash of every parameter. A collective call; it reads
    /// all parameters once.
    ///
    /// # Errors
    ///
    /// [`Error::ReplicasDiffer`] names the first parameter that differs and the ranks that do, the
    /// same on all ranks.
    pub fn check_replicas(&mut self) -> Result<()> {
        let reducer = self.take_reducer()?;
        let buffers = self.config.broadcast_buffers;
        let result = replicas::compare(self.module(), buffers, self.steps, reducer.stream());
        self.settle(reducer, result)
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
        let reducer = self.take_reducer()?;
        let first = self.shards.map_or(0, |shards| shards.own().start);
        let mut sum = Sum::default();
        let mut count = 0;
        for (means, samples) in parts {
            let weight = |mean: f64| {
                if samples == 0 {
                    0.0
                } else {
                    mean * samples as f64
                }
            };
            let leaf: Vec<f64> = means
                .into_iter()
                .map(weight)
                .chain([samples as f64])
                .collect();
            sum.push(first + count, leaf, |left, right| real::add(left, &right));
            count += 1;
        }
        let result = match self.shards {
            Some(shards) if count != shards.own().len() => Err(Error::MicroShards {
                call: "weighted_mean",
                rank: self.place.rank,
                due: shards.own().len(),
                got: count,
                shards: shards.count(),
            }),
            shards => {
                if count == 0 {
                    sum.push(0, vec![0.0; K + 1], |_, _| ());
                }
                let work = reducer
                    .stream()
                    .run(move |communicator| exchange::all_reduce(sum, shards, communicator));
                work.wait().map_err(Error::from)
            }
        };
        let means = result.and_then(|sums| match sums[K] {
            0.0 => Err(Error::NoSamples),
            samples => Ok(std::array::from_fn(|at| sums[at] / samples)),
        });
        self.settle(reducer, means)
    }

    /// Takes buckets through the ranks by `hook` from now on. A collective call: every rank
    /// registers the same one between the same steps.
    ///
    /// # Errors
    ///
    /// [`Error::ModelMismatch`] on every rank if the hooks' names differ; [`Error::Config`] with [`micro_shards`](DdpConfig::micro_shards), whose order is its own.
    pub fn register_comm_hook(&mut self, hook: Arc<dyn CommHook>) -> Result<()> {
        if self.shards.is_some() {
            return Err(Error::Config {
                name: "comm_hook",
                value: hook.name().to_owned(),
                expected: "none with micro_shards: their sums have an order of their own",
            });
        }
        let mut reducer = self.take_reducer()?;
        let text = format!("comm_hook: {}", hook.name());
        let work = reducer
            .stream()
            .run(move |communicator| Ok(slots::verify_text(text, 0..0, communicator)));
        let result = work.wait().map_err(Error::from).and_then(|same| same);
        if result.is_ok() {
            reducer.set_hook(hook);
        }
        self.settle(reducer, result)
    }

    /// How the global batch is cut into micro-shards, if it is.
    pub fn shards(&self) -> Option<Shards> {
        self.shards
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
        self.forget();
        if let Some(module) = self.module.take() {
            self.module = Some(change(module));
            self.changed = true;
            self.owned = false;
        }
    }

    /// The module, with taps behind its parameters. Outside [`backward`](Self::backward) they do
    /// nothing.
    pub fn module(&self) -> &M {
        self.module
            .as_ref()
            .expect("the module was lost in a change that panicked")
    }

    /// The plain module, without taps.
    pub fn into_module(mut self) -> M {
        let module = self
            .module
            .take()
            .expect("the module was lost in a change that panicked");
        module.materialize()
    }

    /// What the last step did; empty before the first.
    pub fn last_step(&self) -> &StepRecord {
        &self.record
    }

    /// Counts of this rank's collectives so far.
    pub fn stats(&self) -> Result<Stats> {
        Ok(self.reducer()?.stream().stats()?)
    }

    /// Where this rank stands.
    pub fn place(&self) -> Place {
        self.place
    }

    /// The layout of the buckets: a guess in the first step, measured from then on.
    pub fn plan(&self) -> &BucketPlan {
        &self.plan
    }

    /// A counter of the buckets reduced so far, for other threads to watch.
    pub fn progress(&self) -> Progress {
        self.progress.clone()
    }

    fn reducer(&self) -> Result<&Reducer> {
        match &self.state {
            State::Ready(reducer) => Ok(reducer),
            State::Failed(error) => Err(error.clone()),
        }
    }

    /// Lets go of every tapped tensor: the next forward pass makes its own.
    fn forget(&self) {
        self.taps.iter().for_each(Tap::forget);
        self.line.descend();
    }
}

impl<M: Module> Deref for DistributedDataParallel<M> {
    type Target = M;

    fn deref(&self) -> &M {
        self.module()
    }
}

fn mean_loss<const D: usize>(loss: &Tensor<D>) -> Result<f64> {
    let data = loss.clone().inner().into_data();
    match data.iter::<f64>().collect::<Vec<_>>()[..] {
        [value] => Ok(value),
        ref values => Err(Error::LossShape(values.len())),
    }
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_default()
}
