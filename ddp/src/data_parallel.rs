//! DistributedDataParallel: replicas kept in step while the backward pass is still running.
use std::mem;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use burn::backend::TensorMetadata;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};
use collectives::{CommStream, Communicator, Place, Stats};

use crate::bucket::{BucketPlan, Caps};
use crate::reducer::{Buffer, Progress, Reduced, Reducer};
use crate::slots::{self, Slots};
use crate::tap::{Line, Tap};
use crate::{CommThread, DdpConfig, Error, Result, StepRecord};

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
            let settings = format!("{} {}", self.first_bucket_mb, self.bucket_cap_mb);
            let settings = format!("first_bucket_mb, bucket_cap_mb: {settings}");
            let (module, slots) = slots::replicate(module, &settings, &mut communicator)?;
            Ok((caps, module, slots))
        });
        let (caps, module, slots) = match made {
            Ok(made) => made,
            Err(error) => {
                // Every rank knows of a mismatch; of the rest only this one may.
                if !matches!(error, Error::ModelMismatch { .. }) {
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
        let plan = BucketPlan::new(&slots.specs(), &reverse, caps);
        let device = module
            .devices()
            .first()
            .cloned()
            .unwrap_or_default()
            .without_autodiff();
        let place = communicator.place();
        let stream = match self.comm_thread {
            CommThread::Auto | CommThread::Always => CommStream::new(communicator)?,
            CommThread::Never => CommStream::inline(communicator),
        };
        let reducer = Reducer::new(plan, slots.names(), stream, self.overlap);
        Ok(DistributedDataParallel {
            module: Some(slots::tap(module, &slots, &taps)),
            changed: false,
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
            record: StepRecord::default(),
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
    /// Away only while the optimizer has it.
    module: Option<M>,
    /// Whether the module was changed since the slots were last found in it.
    changed: bool,
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
}

/// Where the order of the slots in the buckets comes from.
#[derive(Debug)]
enum Order {
    /// Visiting order reversed.
    Guessed,
    /// The arrival order of rank 0's first backward pass.
    Measured,
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
    /// followed by its backward pass before the next, or share one.
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
        let failed = || State::Failed(Error::State("a backward pass did not come to its end"));
        let reducer = match mem::replace(&mut self.state, failed()) {
            State::Ready(reducer) => reducer,
            State::Failed(error) => {
                self.state = State::Failed(error.clone());
                return Err(error);
            }
        };
        let (reducer, result) = self.reduce(reducer, loss, samples);
        self.forget();
        match result {
            Ok(gradients) => {
                self.state = State::Ready(reducer);
                self.averaged = true;
                Ok(gradients)
            }
            Err(error) => {
                let reason = error.to_string();
                drop(reducer.stream().run(move |communicator| {
                    communicator.abort(reason);
                    Ok(())
                }));
                self.state = State::Failed(error.clone());
                Err(error)
            }
        }
    }

    fn reduce<const D: usize>(
        &mut self,
        mut reducer: Box<Reducer>,
        loss: Tensor<D>,
        samples: usize,
    ) -> (Box<Reducer>, Result<GradientsParams>) {
        for flat in self.flats.drain(..) {
            if let Some(buffer) = reclaim(flat) {
                reducer.recycle(buffer);
            }
        }
        if let Err(error) = self.find_slots() {
            return (reducer, Err(error));
        }
        let began = Instant::now();
        if let Err(error) = mean_loss(&loss).and_then(|loss| reducer.begin(samples, loss)) {
            return (reducer, Err(error));
        }
        self.line.plug(reducer);
        let leaves = catch_unwind(AssertUnwindSafe(|| loss.backward()));
        let backward = began.elapsed();
        let (mut reducer, tap_error) = self.line.unplug();
        let leaves = match (leaves, tap_error) {
            (_, Some(error)) => Err(error),
            (Err(panic), None) => Err(Error::Backward(message(panic.as_ref()))),
            (Ok(leaves), None) => Ok(leaves),
        };
        let reduced = leaves.and_then(|leaves| {
            self.take_leaves(&mut reducer, leaves)?;
            reducer.finish()
        });
        let exposed = began.elapsed().saturating_sub(backward);
        let gradients = reduced.and_then(|reduced| {
            self.record = StepRecord {
                loss: reduced.loss,
                samples: reduced.samples,
                backward,
                exposed,
                buckets: reduced.records.clone(),
                unused: (0..self.slots.len())
                    .filter(|&slot| reduced.used[slot] == 0)
                    .map(|slot| self.slots.name(slot).to_owned())
                    .collect(),
            };
            let arrival = reduced.arrival.clone();
            let gradients = self.unpack(reduced);
            self.measure(&mut reducer, arrival)?;
            Ok(gradients)
        });
        (reducer, gradients)
    }

    /// Finds the slots in a module that [`update`](Self::update) has changed.
    fn find_slots(&mut self) -> Result<()> {
        match (&self.module, mem::take(&mut self.changed)) {
            (Some(module), true) => self.slots.find_again(module),
            _ => Ok(()),
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

    /// Turns buckets into gradients: one flat tensor each, and a view of it per parameter.
    fn unpack(&mut self, reduced: Reduced) -> GradientsParams {
        self.flats = reduced
            .buckets
            .into_iter()
            .map(|buffer| flat(buffer, &self.device))
            .collect();
        let mut views = Views {
            slots: &self.slots,
            plan: &self.plan,
            used: &reduced.used,
            flats: &self.flats,
            gradients: GradientsParams::new(),
        };
        self.module().visit(&mut views);
        views.gradients
    }

    /// After the first step, lays the buckets out anew in the order in which rank 0's gradients
    /// arrived.
    fn measure(&mut self, reducer: &mut Reducer, arrival: Vec<usize>) -> Result<()> {
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
    /// Each rank has an optimizer of its own; equal gradients keep the replicas equal.
    ///
    /// # Errors
    ///
    /// [`Error::State`] if this replica's [`backward`](Self::backward) has never run: gradients of
    /// `loss.backward()` are this rank's alone, and the replicas would part. Such gradients in a later
    /// step are not seen.
    pub fn step(
        &mut self,
        learning_rate: impl Into<ModuleLearningRate>,
        optimizer: &mut ModuleOptimizer,
        gradients: GradientsParams,
    ) -> Result<()> {
        if !self.averaged {
            return Err(Error::State(
                "these gradients are no mean over the ranks: call `backward` of the wrapped module, \
                 with the loss, instead of `backward` of the loss",
            ));
        }
        let (tied, changed) = (self.slots.tied, self.changed);
        self.update(|module| {
            let module = optimizer.step(learning_rate, module, gradients);
            // The optimizer updates only the first of two parameters with one id.
            if tied { slots::tie(module) } else { module }
        });
        // An optimizer leaves every id as it was.
        self.changed = changed;
        Ok(())
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

fn flat(buffer: Buffer, device: &Device) -> Tensor<1> {
    match buffer {
        Buffer::F32(values) => {
            let len = values.len();
            Tensor::from_data(TensorData::new(values, [len]), (device, DType::F32))
        }
        Buffer::F64(values) => {
            let len = values.len();
            Tensor::from_data(TensorData::new(values, [len]), (device, DType::F64))
        }
    }
}

/// The memory of a flat tensor, if no gradient looks at it any more.
fn reclaim(flat: Tensor<1>) -> Option<Buffer> {
    let flat = flat.into_dispatch();
    if !flat.kind.can_mut() {
        return None;
    }
    let data = Tensor::<1>::from_dispatch(flat).into_data();
    match data.dtype() {
        DType::F32 => data.try_into_vec().ok().map(Buffer::F32),
        DType::F64 => data.try_into_vec().ok().map(Buffer::F64),
        _ => None,
    }
}

struct Views<'a> {
    slots: &'a Slots,
    plan: &'a BucketPlan,
    used: &'a [usize],
    flats: &'a [Tensor<1>],
    gradients: GradientsParams,
}

impl ModuleVisitor for Views<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(slot) = self
            .slots
            .find(param.id)
            .filter(|&slot| self.used[slot] > 0)
        else {
            return;
        };
        let (bucket, range) = self.plan.locate(slot);
        let gradient = self.flats[bucket]
            .clone()
            .slice([range])
            .reshape(param.dims());
        self.gradients.register::<D>(param.id, gradient);
    }
}
