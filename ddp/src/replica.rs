//! One rank's module, whose gradients are reduced as they arrive.
//!
//! What is done with the means is somebody else's affair: [`DistributedDataParallel`] hands them to
//! an optimizer on every rank, the crate `zero` steps each rank's part of them.
//!
//! [`DistributedDataParallel`]: crate::DistributedDataParallel
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::tensor::{Device, Gradients, Tensor, TensorData};
use collectives::{CommStream, Communicator, Place, Stats};

use crate::bucket::{BucketPlan, Caps};
use crate::buffers::{self, Which};
use crate::loan::{Failure, Lender, Pass};
use crate::reducer::{Keep, Progress, Reduced, Reducer};
use crate::shards::{Shards, Sum};
use crate::slots::{self, Slots};
use crate::tap::{Line, Tap};
use crate::{
    Buffer, CommHook, DdpConfig, Error, Result, StepRecord, exact, exchange, norm, real, replicas,
};

/// What a [`Replica`] does beyond its [`DdpConfig`].
#[derive(Clone, Debug, Default)]
pub struct Terms {
    /// What this rank gets of the means.
    pub keep: Keep,
    /// When the buckets are laid out for good.
    pub order: Order,
    /// What else must be the same on all ranks, a line each.
    pub signature: String,
}

/// Where the order of the slots in the buckets comes from. Until it is known it is guessed: visiting
/// order reversed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// The order in which gradients arrived in rank 0's first backward pass: right, and known when
    /// that pass is over.
    #[default]
    Arrival,
    /// The order in which rank 0's first forward pass used the parameters, reversed: nearly as good,
    /// and known before a bucket is filled, for those who let something depend on the layout.
    Use,
    /// The guess is right, and known from the beginning.
    Visiting,
}

/// The mean gradients of a pass.
#[derive(Debug)]
pub struct Means {
    /// In plan order, each bucket with its tail, or this rank's part of each without one. Scaled
    /// down already if their norm was above [`max_grad_norm`](DdpConfig::max_grad_norm).
    pub buckets: Vec<Buffer>,
    /// How many backward passes of all ranks used each slot.
    pub used: Vec<usize>,
    /// Whether all ranks leave this step out.
    pub skipped: bool,
}

impl DdpConfig {
    /// Makes this rank's replica of `module`, on `terms`; [`init`](Self::init) is this and a
    /// [`DistributedDataParallel`](crate::DistributedDataParallel) around it. A collective call.
    ///
    /// ```
    /// use burn::{module::Param, tensor::{Device, Tensor}};
    /// use collectives::{CommunicatorConfig, launch};
    /// use ddp::{DdpConfig, Keep, Terms};
    ///
    /// let parts = launch::spawn(2, &CommunicatorConfig::new(), |communicator| {
    ///     let device = Device::flex().autodiff();
    ///     let weight = Param::from_tensor(Tensor::<1>::ones([4], &device));
    ///     let terms = Terms { keep: Keep::Part, ..Terms::default() };
    ///     let mut replica = DdpConfig::new().replica(weight, communicator, terms)?;
    ///     let loss = replica.module().val().sum();
    ///     let means = replica.backward(loss, 1)?;
    ///     Ok::<_, ddp::Error>(means.buckets[0].as_f32().unwrap().to_vec())
    /// })?;
    /// assert_eq!(parts, [[1.0, 1.0], [1.0, 1.0]]);
    /// # Ok::<(), collectives::launch::LaunchError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`init`](Self::init).
    pub fn replica<M: Module>(
        &self,
        module: M,
        mut communicator: Communicator,
        terms: Terms,
    ) -> Result<Replica<M>> {
        let made = self.caps().and_then(|caps| {
            let shards = self.shards(&communicator)?;
            let signature = format!("{}\n{}", self.signature(), terms.signature);
            let signature = signature.trim_end();
            let exact = self.micro_shards > 0;
            let (module, slots) = slots::replicate(module, signature, exact, &mut communicator)?;
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
            .with_keep(terms.keep)
            .with_norm(self.max_grad_norm > 0.0);
        if let Some(shards) = shards {
            reducer = reducer.with_shards(shards);
        }
        reducer.set_hook(self.comm_hook.make());
        Ok(Replica {
            config: *self,
            keep: terms.keep,
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
            order: terms.order,
            is_settled: terms.order == Order::Visiting,
            progress: reducer.progress(),
            state: State::Ready(Box::new(reducer)),
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

/// One rank's module, with taps behind its parameters that hand the gradients to a reducer.
///
/// Made by [`DdpConfig::replica`]. After any error every later call returns it again.
#[derive(Debug)]
pub struct Replica<M: Module> {
    config: DdpConfig,
    keep: Keep,
    shards: Option<Shards>,
    /// BatchNorm's running state as all ranks had it last, in case a step is left out.
    running_state: Vec<TensorData>,
    /// Away only while it is being changed.
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
    /// Whether the plan is laid out for good.
    is_settled: bool,
    progress: Progress,
    state: State,
    record: StepRecord,
    /// Steps taken.
    steps: u64,
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

impl<M: Module> Replica<M> {
    /// Runs the backward pass and returns the means over the samples of all ranks; see
    /// [`DistributedDataParallel::backward`](crate::DistributedDataParallel::backward).
    ///
    /// # Errors
    ///
    /// As there.
    pub fn backward<const D: usize>(&mut self, loss: Tensor<D>, samples: usize) -> Result<Means> {
        let mut only = Some((loss, samples));
        self.pass(move |_| only.take().map(|(loss, samples)| (loss, samples, true)))
    }

    /// Runs one backward pass for each of `micro_batches` and reduces once; see
    /// [`DistributedDataParallel::accumulate`](crate::DistributedDataParallel::accumulate).
    ///
    /// # Errors
    ///
    /// As there.
    pub fn accumulate<T, const D: usize>(
        &mut self,
        micro_batches: impl IntoIterator<Item = T>,
        mut loss: impl FnMut(&M, T) -> (Tensor<D>, usize),
    ) -> Result<Means> {
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
    ) -> Result<Means> {
        let reducer = self.take_reducer()?;
        let (mut reducer, ran) = match self.find_slots() {
            Ok(()) => self.run_micro_batches(reducer, next),
            Err(error) => (reducer, Err(error)),
        };
        let result = ran.and_then(|times| self.conclude(&mut reducer, times));
        self.forget();
        self.settle(reducer, result)
    }

    /// The reducer, with which every collective call begins. If it does not come back, because of
    /// a panic, the replica has failed; so it has if a value could not be had that came late.
    fn take_reducer(&mut self) -> Result<Box<Reducer>> {
        let failed = || State::Failed(Error::State("a collective call did not come to its end"));
        match mem::replace(&mut self.state, failed()) {
            State::Ready(reducer) => match self.line.failure().told() {
                None => Ok(reducer),
                Some(error) => self.settle(reducer, Err(error)),
            },
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
        &mut self,
        mut reducer: Box<Reducer>,
        mut next: impl FnMut(&M) -> Option<(Tensor<D>, usize, bool)>,
    ) -> (Box<Reducer>, Result<Times>) {
        loop {
            let found = next(self.module());
            self.own();
            if let Err(error) = self.lay_out_by_use(&mut reducer) {
                return (reducer, Err(error));
            }
            let Some((loss, samples, last)) = found else {
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
            if let Some(error) = self.line.failure().told() {
                return (reducer, Err(error));
            }
            self.line.settle(Pass::Backward);
            self.line.plug(reducer);
            let leaves = span.in_scope(|| catch_unwind(AssertUnwindSafe(|| loss.backward())));
            let backward = began.elapsed();
            let (back, tap_error) = self.line.unplug();
            reducer = back;
            let tap_error = tap_error.or_else(|| self.line.failure().told());
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

    /// Waits for the means, makes a record of them, and scales them down if they are too large.
    fn conclude(&mut self, reducer: &mut Reducer, times: Times) -> Result<Means> {
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
                let gradients = match self.keep {
                    Keep::Whole => self.plan.gradients_in(bucket),
                    Keep::Part => buffer.len(),
                };
                buffer.scale(0..gradients, factor);
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
        let Reduced {
            buckets,
            used,
            arrival,
            ..
        } = reduced;
        if !self.is_settled {
            self.lay_out(reducer, arrival)?;
        }
        Ok(Means {
            buckets,
            used,
            skipped,
        })
    }

    /// Finds the slots in a module that [`update`](Self::update) has changed.
    fn find_slots(&mut self) -> Result<()> {
        if let (Some(module), true) = (&self.module, mem::take(&mut self.changed)) {
            self.slots.find_again(module)?;
            if self.shards.is_some() {
                exact::refuse_inexact(module)?;
            }
        }
        Ok(())
    }

    /// Shows the taps the leaves that are there.
    fn own(&mut self) {
        if !self.owned {
            self.owned = slots::own(self.module(), &self.slots, &self.taps);
        }
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

    /// Lays the buckets out in the order of rank 0's first forward pass, if that is wanted.
    fn lay_out_by_use(&mut self, reducer: &mut Reducer) -> Result<()> {
        if self.is_settled || self.order != Order::Use {
            return Ok(());
        }
        let mut uses = self.line.uses();
        uses.reverse();
        self.lay_out(reducer, uses)
    }

    /// Lays the buckets out anew, once and for all, in the order in which rank 0's gradients arrive.
    fn lay_out(&mut self, reducer: &mut Reducer, arrival: Vec<usize>) -> Result<()> {
        self.is_settled = true;
        // With micro-shards the loss must be summed in the type of the same bucket everywhere, and
        // what arrives first depends on which shards rank 0 has.
        let specs = self.slots.specs();
        let mixed = specs.iter().any(|slot| slot.dtype != specs[0].dtype);
        if self.shards.is_some() && mixed {
            return Ok(());
        }
        let order = reducer.agree(&self.complete(arrival))?;
        self.plan = BucketPlan::new(&specs, &order, self.caps);
        reducer.replan(self.plan.clone())
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

    /// Replaces the module by what `change` makes of it, as an optimizer does: other values, the
    /// same parameters. `change` may use the stream, alike on all ranks, and leave parameters that are
    /// [uninitialized](burn::module::Param::uninitialized) until their values have come, of which those
    /// with one id share one. A collective call where there are buffers to send or replicas to compare; see
    /// [`broadcast_buffers`](DdpConfig::broadcast_buffers) and
    /// [`check_replicas_every`](DdpConfig::check_replicas_every).
    ///
    /// # Errors
    ///
    /// That of `change`, with which the module is lost; [`Error::ReplicasDiffer`]; the error of a
    /// collective.
    pub fn step(&mut self, change: impl FnOnce(M, &Slots, &CommStream) -> Result<M>) -> Result<()> {
        // Before `change`, which may leave values on their way: none need wait for them here.
        if self.config.broadcast_buffers && !self.running_state.is_empty() {
            if self.record.skipped {
                // The forward pass has taken in what was left out.
                let kept = self.running_state.clone();
                self.change(|module| buffers::restore(module, Which::Running, kept));
            } else {
                self.broadcast(Which::Running)?;
            }
        }
        self.rewrite(change)?;
        self.steps += 1;
        let every = self.config.check_replicas_every;
        if every > 0 && self.steps.is_multiple_of(every) {
            self.check_replicas()?;
        }
        Ok(())
    }

    /// As [`step`](Self::step), of which it is the middle: for values that come from elsewhere.
    /// Nothing is sent, compared or counted as a step, and no step that is left out later goes back
    /// behind it.
    ///
    /// # Errors
    ///
    /// That of `change`, after which the module is what it was and nothing trains it.
    pub fn load(&mut self, change: impl FnOnce(M, &Slots, &CommStream) -> Result<M>) -> Result<()> {
        // What the last forward pass left in the layers would come over what is loaded.
        drop(self.module.as_ref().map(M::valid));
        let kept = self.module.clone();
        if let Err(error) = self.rewrite(change) {
            // What is lost to training can still be looked at.
            self.module = self.module.take().or(kept);
            return Err(error);
        }
        self.running_state = buffers::collect(self.module(), Which::Running);
        Ok(())
    }

    fn rewrite(&mut self, change: impl FnOnce(M, &Slots, &CommStream) -> Result<M>) -> Result<()> {
        let reducer = self.take_reducer()?;
        let changed = self.changed;
        let span = tracing::info_span!(target: "lockstep", "optimizer", rank = self.place.rank);
        let mut result = Ok(());
        let module = self.module.take();
        self.forget();
        self.owned = false;
        span.in_scope(|| {
            match module.map(|module| change(module, &self.slots, reducer.stream())) {
                Some(Ok(module)) => {
                    // An optimizer updates only the first of two parameters with one id.
                    let tied = self.slots.tied;
                    self.module = Some(if tied { slots::tie(module) } else { module });
                }
                Some(Err(error)) => result = Err(error),
                None => result = Err(Error::State("the module is lost")),
            }
        });
        // An optimizer leaves every id as it was.
        self.changed = changed;
        self.settle(reducer, result)
    }

    /// Replaces the module by one with the same leaves.
    fn change(&mut self, change: impl FnOnce(M) -> M) {
        if let Some(module) = self.module.take() {
            let before = buffers::collect(&module, Which::Running);
            self.module = Some(change(module));
            self.renew_running_state(before);
        }
    }

    /// As [`DistributedDataParallel::sync_buffers`](crate::DistributedDataParallel::sync_buffers).
    ///
    /// # Errors
    ///
    /// As there.
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
                self.running_state = match which {
                    Which::Running => values,
                    Which::Untrained => buffers::collect(self.module(), Which::Running),
                };
                Ok(())
            }
            Err(error) => {
                self.module = Some(kept);
                Err(error)
            }
        };
        self.settle(reducer, result)
    }

    /// As [`DistributedDataParallel::check_replicas`](crate::DistributedDataParallel::check_replicas).
    ///
    /// # Errors
    ///
    /// As there.
    pub fn check_replicas(&mut self) -> Result<()> {
        let reducer = self.take_reducer()?;
        let buffers = self.config.broadcast_buffers;
        let result = replicas::compare(self.module(), buffers, self.steps, reducer.stream());
        self.settle(reducer, result)
    }

    /// As [`DistributedDataParallel::weighted_mean`](crate::DistributedDataParallel::weighted_mean).
    ///
    /// # Errors
    ///
    /// As there.
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

    /// As [`DistributedDataParallel::register_comm_hook`](crate::DistributedDataParallel::register_comm_hook).
    ///
    /// # Errors
    ///
    /// As there.
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

    /// As [`DistributedDataParallel::update`](crate::DistributedDataParallel::update).
    ///
    /// # Panics
    ///
    /// As there.
    pub fn update(&mut self, change: impl FnOnce(M) -> M) {
        self.forget();
        if let Some(module) = self.module.take() {
            self.module = Some(change(module));
            self.changed = true;
            self.owned = false;
        }
    }

    /// What a change has set stays, though a step be left out; what a forward pass has set does not.
    fn renew_running_state(&mut self, before: Vec<TensorData>) {
        let after = buffers::collect(self.module(), Which::Running);
        if [before.len(), after.len()] != [self.running_state.len(); 2] {
            self.running_state = after;
            return;
        }
        let changes = before.iter().zip(after);
        for (kept, (before, after)) in self.running_state.iter_mut().zip(changes) {
            if *before != after {
                *kept = after;
            }
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

    /// The parameters that are trained.
    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    /// The device of the module, without autodiff.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The settings it was made with.
    pub fn config(&self) -> &DdpConfig {
        &self.config
    }

    /// Takes the values of all trained parameters from `lender` from now on, a bucket at a time,
    /// whenever they are used; the module may hold placeholders of the same shapes. The layout of
    /// the buckets must be [settled](Order::Visiting).
    ///
    /// # Errors
    ///
    /// [`Error::State`] if the layout may still change.
    pub fn lend_from(&mut self, lender: Arc<dyn Lender>) -> Result<()> {
        if self.order != Order::Visiting {
            return Err(Error::State(
                "values are lent by buckets that do not change",
            ));
        }
        let ahead = self.overlaps();
        self.line.lend_from(lender, self.plan.clone(), ahead);
        Ok(())
    }

    /// Per bucket, whether backward passes borrow its values from the [`Lender`]; empty while none has.
    pub fn lent_again(&self) -> Vec<bool> {
        self.line.lent_again()
    }

    /// Whether collectives go on while this thread does something else.
    pub fn overlaps(&self) -> bool {
        self.config.overlap && self.config.comm_thread
    }

    /// The most bytes of values that were lent, or on their way to be, at a time.
    pub fn most_lent(&self) -> usize {
        self.line.most_lent()
    }

    /// Where the error goes of a value that comes late; every later call returns it.
    pub fn failure(&self) -> Failure {
        self.line.failure().clone()
    }

    /// Whether all values could be had that were lent or came late. If not, that is final.
    ///
    /// # Errors
    ///
    /// The error of the first, or the one with which the replica failed.
    pub fn check_loans(&mut self) -> Result<()> {
        let reducer = self.take_reducer()?;
        self.settle(reducer, Ok(()))
    }

    /// Takes back memory that means lay in.
    pub fn recycle(&mut self, buffer: Buffer) {
        if let State::Ready(reducer) = &mut self.state {
            reducer.recycle(buffer);
        }
    }

    /// The stream that the buckets travel on.
    ///
    /// # Errors
    ///
    /// The error with which the replica failed.
    pub fn stream(&self) -> Result<&Arc<CommStream>> {
        Ok(self.reducer()?.stream())
    }

    /// Whether it still works.
    ///
    /// # Errors
    ///
    /// The error with which it failed.
    pub fn check(&self) -> Result<()> {
        self.reducer().map(drop)
    }

    fn reducer(&self) -> Result<&Reducer> {
        match (&self.state, self.line.failure().told()) {
            (State::Failed(error), _) => Err(error.clone()),
            (State::Ready(_), Some(error)) => Err(error),
            (State::Ready(reducer), None) => Ok(reducer),
        }
    }

    /// Lets go of every tapped tensor: the next forward pass makes its own.
    fn forget(&self) {
        self.taps.iter().for_each(Tap::forget);
        self.line.descend();
        self.line.settle(Pass::Forward);
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
