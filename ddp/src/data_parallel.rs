//! DistributedDataParallel: replicas kept in step while the backward pass is still running.
use std::mem;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use burn::backend::TensorMetadata;
use burn::lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Device, Gradients, Tensor, TensorData};
use collectives::{CommStream, Communicator, Place, Stats};
use serde::{Deserialize, Serialize};

use crate::bucket::{BucketPlan, Caps};
use crate::reducer::{Buffer, Gradient, Progress, Reduced, Reducer};
use crate::slots::{self, Slots};
use crate::tap::{Line, Tap};
use crate::{Error, Result, StepRecord};

/// How replicas exchange gradients. MB means 2^20 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DdpConfig {
    /// Cap of a bucket; 0 reduces every parameter on its own.
    pub bucket_cap_mb: f64,
    /// Cap of the first bucket, small so that communication starts early.
    pub first_bucket_mb: f64,
    /// Whether buckets are reduced while the backward pass runs, or all after it.
    pub overlap: bool,
    /// Depth from one rung to the next; more than the operations between the first uses of two
    /// parameters that follow each other. 0 takes the rungs out: gradients stay right, the
    /// overlap is gone.
    pub rung_stride: usize,
}

/// Twice the deepest layer seen (attention, about 30 operations between two parameters).
const RUNG_STRIDE: usize = 64;

impl Default for DdpConfig {
    fn default() -> Self {
        Self { bucket_cap_mb: 25.0, first_bucket_mb: 1.0, overlap: true, rung_stride: RUNG_STRIDE }
    }
}

impl DdpConfig {
    /// The defaults: 25 MB buckets after a first of 1 MB, overlapped.
    ///
    /// ```
    /// let config = ddp::DdpConfig::new().with_bucket_cap_mb(0.5).with_overlap(false);
    /// assert_eq!((config.bucket_cap_mb, config.first_bucket_mb), (0.5, 1.0));
    /// ```
    pub fn new() -> Self {
        Self::default()
    }

    /// Caps buckets at `mb`.
    pub fn with_bucket_cap_mb(self, mb: f64) -> Self {
        Self { bucket_cap_mb: mb, ..self }
    }

    /// Caps the first bucket at `mb`.
    pub fn with_first_bucket_mb(self, mb: f64) -> Self {
        Self { first_bucket_mb: mb, ..self }
    }

    /// Overlaps communication with the backward pass, or not.
    pub fn with_overlap(self, overlap: bool) -> Self {
        Self { overlap, ..self }
    }

    /// Sets the depth between rungs.
    pub fn with_rung_stride(self, stride: usize) -> Self {
        Self { rung_stride: stride, ..self }
    }

    /// Makes this rank's replica of `module`. A collective call: every rank makes its own, at the
    /// same point, from a module of the same structure; all start from rank 0's values.
    ///
    /// The replica has leaves of its own, also when ranks pass clones of one module.
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
                // The others are waiting in the verification, or will.
                communicator.abort(error.to_string());
                return Err(error);
            }
        };
        let line = Line::new(slots.len(), self.rung_stride);
        let taps: Vec<Tap> = (0..slots.len()).map(|slot| Tap::new(slot, line.clone())).collect();
        let reverse: Vec<usize> = (0..slots.len()).rev().collect();
        let plan = BucketPlan::new(&slots.specs(), &reverse, caps);
        let device = module.devices().first().cloned().unwrap_or_default().inner();
        let place = communicator.place();
        let reducer = Reducer::new(plan, slots.names(), CommStream::new(communicator), self.overlap);
        Ok(DistributedDataParallel {
            module: Some(slots::tap(module, &slots, &taps)),
            slots,
            taps,
            line,
            device,
            place,
            caps,
            order: Order::Guessed,
            flats: Vec::new(),
            progress: reducer.progress(),
            state: State::Ready(reducer),
            record: StepRecord::default(),
        })
    }

    fn caps(&self) -> Result<Caps> {
        let bytes = |name, mb: f64| {
            if mb.is_finite() && mb >= 0.0 {
                Ok((mb * f64::from(1 << 20)) as usize)
            } else {
                let expected = "a number of MB, 0 or more";
                Err(Error::Config { name, value: mb.to_string(), expected })
            }
        };
        Ok(Caps {
            first_bytes: bytes("first_bucket_mb", self.first_bucket_mb)?,
            bucket_bytes: bytes("bucket_cap_mb", self.bucket_cap_mb)?,
        })
    }
}

/// One rank's replica of a module; it derefs to the module, whose methods work as ever.
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
    slots: Slots,
    taps: Vec<Tap>,
    line: std::sync::Arc<Line>,
    device: Device,
    place: Place,
    caps: Caps,
    order: Order,
    /// The last buckets, to be used again once nobody looks at them.
    flats: Vec<Tensor<1>>,
    progress: Progress,
    state: State,
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
    Ready(Reducer),
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
        let mut reducer = match mem::replace(&mut self.state, failed()) {
            State::Ready(reducer) => reducer,
            State::Failed(error) => {
                self.state = State::Failed(error.clone());
                return Err(error);
            }
        };
        let result = self.reduce(&mut reducer, loss, samples);
        self.forget();
        match result {
            Ok(gradients) => {
                self.state = State::Ready(reducer);
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
        reducer: &mut Reducer,
        loss: Tensor<D>,
        samples: usize,
    ) -> Result<GradientsParams> {
        let value = loss.clone().inner().into_data();
        let value = match value.iter::<f64>().collect::<Vec<_>>()[..] {
            [value] => value,
            ref other => return Err(Error::LossShape(other.len())),
        };
        for flat in self.flats.drain(..) {
            if let Some(buffer) = reclaim(flat) {
                reducer.recycle(buffer);
            }
        }
        reducer.begin(samples, value)?;
        let began = Instant::now();
        let leaves = self.run_backward(reducer, loss)?;
        let backward = began.elapsed();
        let slots = &self.slots;
        slots::leaf_gradients(self.deref(), slots, &leaves, |slot, gradient: Gradient<'_>| {
            if reducer.has(slot) {
                return Err(Error::LeafGradient { parameter: slots.name(slot).to_owned() });
            }
            reducer.ready(slot, gradient)
        })?;
        drop(leaves);
        let reduced = reducer.finish()?;
        self.record = StepRecord {
            loss: reduced.loss,
            samples: reduced.samples,
            backward,
            exposed: began.elapsed().saturating_sub(backward),
            unused: (0..slots.len())
                .filter(|&slot| reduced.used[slot] == 0)
                .map(|slot| slots.name(slot).to_owned())
                .collect(),
            buckets: reduced.records.clone(),
        };
        let arrival = reduced.arrival.clone();
        let gradients = self.unpack(reducer.plan(), reduced);
        if let Order::Guessed = self.order {
            let order = reducer.agree(&self.complete(arrival))?;
            reducer.replan(BucketPlan::new(&self.slots.specs(), &order, self.caps))?;
            self.order = Order::Measured;
        }
        Ok(gradients)
    }

    /// Burn's backward pass, with the taps plugged into `reducer`.
    fn run_backward<const D: usize>(
        &self,
        reducer: &mut Reducer,
        loss: Tensor<D>,
    ) -> Result<Gradients> {
        todo!()
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
}
