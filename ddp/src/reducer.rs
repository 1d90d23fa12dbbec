//! Turns "this gradient is ready" into all-reduces that run meanwhile. No Burn here.
//!
//! # Memory
//!
//! [`begin`](Reducer::begin) takes one buffer per bucket, together as large as all gradients.
//! They *are* the gradients afterwards: [`finish`](Reducer::finish) gives them away and keeps
//! none, and [`recycle`](Reducer::recycle) takes back what its user no longer needs.
use std::mem;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use collectives::{CommStream, Communicator, Element, ReduceOp, Work};

use crate::bucket::{BucketPlan, Float, LIMB_BITS, LIMBS};
use crate::record::BucketRecord;
use crate::{Error, Result};

/// Collects gradients into buckets and reduces each bucket as it fills.
///
/// Buckets start in plan order on every rank, whatever order they fill in, so ranks whose
/// backward passes differ still agree. Each bucket goes to the stream by ownership: while it is
/// being reduced nobody can write to it.
///
/// ```
/// use collectives::{CommStream, CommunicatorConfig, launch};
/// use ddp::{BucketPlan, Caps, Float, Gradient, Reducer, SlotSpec};
///
/// let slots = [SlotSpec { len: 2, dtype: Float::F32 }];
/// let plan = BucketPlan::new(&slots, &[0], Caps { first_bytes: 0, bucket_bytes: 0 });
/// let means = launch::spawn(2, &CommunicatorConfig::new(), |communicator| {
///     let gradient = [communicator.rank() as f32, 4.0];
///     let stream = CommStream::new(communicator)?;
///     let mut reducer = Reducer::new(plan.clone(), vec!["w".into()], stream, true);
///     reducer.begin(1, 0.5)?;
///     reducer.ready(0, Gradient::F32(&gradient))?;
///     let reduced = reducer.finish()?;
///     assert_eq!((reduced.samples, reduced.loss), (2, 0.5));
///     Ok::<_, ddp::Error>(reduced.buckets[0].as_f32().unwrap()[..2].to_vec())
/// })?;
/// assert_eq!(means, [[0.5, 4.0], [0.5, 4.0]]);
/// # Ok::<(), collectives::launch::LaunchError>(())
/// ```
#[derive(Debug)]
pub struct Reducer {
    plan: BucketPlan,
    names: Vec<String>,
    stream: CommStream,
    overlap: bool,
    state: State,
    spare: Vec<Buffer>,
    progress: Progress,
}

#[derive(Debug)]
enum State {
    Idle,
    Collecting(Pass),
}

/// One backward pass.
#[derive(Debug)]
struct Pass {
    began: Instant,
    samples: usize,
    loss: f64,
    buckets: Vec<Bucket>,
    /// The bucket whose turn it is; those before it are on their way.
    next: usize,
    seen: Vec<bool>,
    arrival: Vec<usize>,
    totals: Arc<OnceLock<Totals>>,
}

#[derive(Debug)]
enum Bucket {
    Filling {
        values: Buffer,
        missing: usize,
        full: Instant,
    },
    Reducing {
        work: Work<Done>,
        full: Instant,
    },
}

#[derive(Debug)]
struct Done {
    values: Buffer,
    start: Instant,
    end: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Totals {
    samples: u64,
    loss: f64,
}

/// A gradient as the backward pass hands it over.
#[derive(Clone, Copy, Debug)]
pub enum Gradient<'a> {
    /// Of an f32 parameter.
    F32(&'a [f32]),
    /// Of an f64 parameter.
    F64(&'a [f64]),
}

/// The memory of one bucket.
#[derive(Clone, Debug, PartialEq)]
pub enum Buffer {
    /// Of f32 parameters.
    F32(Vec<f32>),
    /// Of f64 parameters.
    F64(Vec<f64>),
}

/// What a backward pass came to, the same on all ranks except for the times.
#[derive(Clone, Debug)]
pub struct Reduced {
    /// Mean gradients in plan order, each bucket with its tail.
    pub buckets: Vec<Buffer>,
    /// Samples of all ranks.
    pub samples: u64,
    /// Mean loss over them.
    pub loss: f64,
    /// How many ranks used each slot.
    pub used: Vec<usize>,
    /// Slots in the order in which their gradients arrived on this rank.
    pub arrival: Vec<usize>,
    /// What each bucket took; times count from `begin`.
    pub records: Vec<BucketRecord>,
}

/// Counts the buckets reduced so far, for any thread to watch.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<AtomicUsize>);

impl Progress {
    /// Buckets whose mean has arrived, since the reducer was made.
    pub fn reduced(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }
}

impl Reducer {
    /// Reduces the buckets of `plan` on `stream`; `names` are the slots' names, for errors.
    ///
    /// Without `overlap` nothing starts before [`finish`](Self::finish).
    pub fn new(plan: BucketPlan, names: Vec<String>, stream: CommStream, overlap: bool) -> Self {
        Self {
            plan,
            names,
            stream,
            overlap,
            state: State::Idle,
            spare: Vec::new(),
            progress: Progress::default(),
        }
    }

    /// Opens a backward pass over this rank's `samples`, whose mean loss is `loss`.
    ///
    /// Gradients are weighted by `samples`. With 0 samples this rank contributes exact zeros,
    /// whatever arrives.
    pub fn begin(&mut self, samples: usize, loss: f64) -> Result<()> {
        if let State::Collecting(_) = self.state {
            return Err(Error::State("a backward pass is still open"));
        }
        if samples as u64 >> (LIMBS * LIMB_BITS) != 0 {
            let (name, expected) = ("samples", "below 2^48");
            return Err(Error::Config {
                name,
                value: samples.to_string(),
                expected,
            });
        }
        let began = Instant::now();
        let mut spare = mem::take(&mut self.spare);
        let buckets = (0..self.plan.len())
            .map(|bucket| Bucket::Filling {
                values: Buffer::take(
                    &mut spare,
                    self.plan.dtype(bucket),
                    self.plan.elements(bucket),
                ),
                missing: self.plan.slots_in(bucket).len(),
                full: began,
            })
            .collect();
        self.state = State::Collecting(Pass {
            began,
            samples,
            loss,
            buckets,
            next: 0,
            seen: vec![false; self.plan.slots()],
            arrival: Vec::with_capacity(self.plan.slots()),
            totals: Arc::default(),
        });
        Ok(())
    }

    /// Takes the gradient of `slot`, at most once per backward pass: one copy into its bucket.
    pub fn ready(&mut self, slot: usize, gradient: Gradient<'_>) -> Result<()> {
        let (bucket, range) = self.plan.locate(slot);
        let parameter = || self.names[slot].clone();
        let pass = self.state.pass()?;
        let Bucket::Filling {
            values,
            missing,
            full,
        } = &mut pass.buckets[bucket]
        else {
            let parameter = parameter();
            return Err(Error::ReadyTwice { parameter });
        };
        if mem::replace(&mut pass.seen[slot], true) {
            let parameter = parameter();
            return Err(Error::ReadyTwice { parameter });
        }
        match (&mut *values, gradient) {
            (Buffer::F32(values), Gradient::F32(gradient)) if gradient.len() == range.len() => {
                weigh(&mut values[range], gradient, pass.samples);
            }
            (Buffer::F64(values), Gradient::F64(gradient)) if gradient.len() == range.len() => {
                weigh(&mut values[range], gradient, pass.samples);
            }
            _ => {
                return Err(Error::GradientMismatch {
                    parameter: parameter(),
                    expected: format!("{} x {}", range.len(), self.plan.dtype(bucket).name()),
                    got: gradient.describe(),
                });
            }
        }
        pass.arrival.push(slot);
        *missing -= 1;
        *full = Instant::now();
        if self.overlap {
            self.start_while(|missing| missing == 0)?;
        }
        Ok(())
    }

    /// Whether the gradient of `slot` has arrived in the open backward pass.
    pub fn has(&self, slot: usize) -> bool {
        matches!(&self.state, State::Collecting(pass) if pass.seen[slot])
    }

    /// Reduces what is left, waits for all, and gives the means away.
    ///
    /// A slot that was never ready counts as zero on this rank. An error is that of the first
    /// bucket that failed; [`Error::NoSamples`] if no rank had any.
    pub fn finish(&mut self) -> Result<Reduced> {
        let now = Instant::now();
        for bucket in &mut self.state.pass()?.buckets {
            if let Bucket::Filling {
                missing: 1.., full, ..
            } = bucket
            {
                *full = now;
            }
        }
        self.start_while(|_| true)?;
        let State::Collecting(pass) = mem::replace(&mut self.state, State::Idle) else {
            return Err(Error::State("no backward pass is open"));
        };
        let (mut buckets, mut records) = (Vec::new(), Vec::new());
        for (index, bucket) in pass.buckets.into_iter().enumerate() {
            let Bucket::Reducing { work, full } = bucket else {
                return Err(Error::State("a bucket was left behind"));
            };
            let done = work.wait()?;
            let since = |instant: Instant| instant.saturating_duration_since(pass.began);
            records.push(BucketRecord {
                elements: self.plan.elements(index),
                bytes: self.plan.bytes(index),
                ready: since(full),
                start: since(done.start),
                end: since(done.end),
                slots: self.plan.slots_in(index).len(),
            });
            buckets.push(done.values);
        }
        let totals = pass
            .totals
            .get()
            .copied()
            .filter(|totals| totals.samples > 0);
        let Totals { samples, loss } = totals.ok_or(Error::NoSamples)?;
        let last = &buckets[buckets.len() - 1];
        let used = self.plan.used().map(|at| last.at(at) as usize).collect();
        Ok(Reduced {
            buckets,
            samples,
            loss,
            used,
            arrival: pass.arrival,
            records,
        })
    }

    /// Takes back a buffer, to be used by a coming backward pass if it fits a bucket.
    pub fn recycle(&mut self, buffer: Buffer) {
        self.spare.push(buffer);
    }

    /// Agrees with all ranks on rank 0's `order` of the slots.
    pub fn agree(&self, order: &[usize]) -> Result<Vec<usize>> {
        let mut order: Vec<u64> = order.iter().map(|&slot| slot as u64).collect();
        let work = self.stream.run(move |communicator| {
            communicator.broadcast(&mut order, 0)?;
            Ok(order)
        });
        Ok(work.wait()?.into_iter().map(|slot| slot as usize).collect())
    }

    /// Uses `plan` from now on. Fails within a backward pass.
    pub fn replan(&mut self, plan: BucketPlan) -> Result<()> {
        if let State::Collecting(_) = self.state {
            return Err(Error::State("buckets cannot change within a backward pass"));
        }
        self.spare.clear();
        self.plan = plan;
        Ok(())
    }

    /// The layout in use.
    pub fn plan(&self) -> &BucketPlan {
        &self.plan
    }

    /// A counter of the buckets reduced so far, for other threads to watch.
    pub fn progress(&self) -> Progress {
        self.progress.clone()
    }

    /// The stream that the buckets travel on.
    pub fn stream(&self) -> &CommStream {
        &self.stream
    }

    /// Starts the buckets next in turn, up to the first that is not `due`.
    fn start_while(&mut self, due: impl Fn(usize) -> bool) -> Result<()> {
        let pass = self.state.pass()?;
        while let Some(bucket) = pass.buckets.get_mut(pass.next)
            && let Bucket::Filling {
                values,
                missing,
                full,
            } = bucket
            && due(*missing)
        {
            let (index, full) = (pass.next, *full);
            let mut values = mem::replace(values, Buffer::F32(Vec::new()));
            for &slot in self.plan.slots_in(index) {
                if !pass.seen[slot] {
                    values.fill(self.plan.locate(slot).1, 0.0);
                }
            }
            if index == 0 {
                write_totals(
                    &mut values,
                    self.plan.totals().start,
                    pass.samples,
                    pass.loss,
                );
            }
            if index == self.plan.len() - 1 {
                for (at, &seen) in self.plan.used().zip(&pass.seen) {
                    // A stand-in for a missing batch does not count as use.
                    values.fill(at..at + 1, f64::from(u8::from(seen && pass.samples > 0)));
                }
            }
            let totals = pass.totals.clone();
            let totals_at = (index == 0).then(|| self.plan.totals().start);
            let gradients = self.plan.gradients_in(index);
            let progress = self.progress.clone();
            let work = self.stream.run(move |communicator| {
                let start = Instant::now();
                match &mut values {
                    Buffer::F32(values) => {
                        mean(communicator, values, gradients, totals_at, &totals)
                    }
                    Buffer::F64(values) => {
                        mean(communicator, values, gradients, totals_at, &totals)
                    }
                }?;
                progress.0.fetch_add(1, Ordering::Release);
                Ok(Done {
                    values,
                    start,
                    end: Instant::now(),
                })
            });
            *bucket = Bucket::Reducing { work, full };
            pass.next += 1;
        }
        Ok(())
    }
}

impl State {
    fn pass(&mut self) -> Result<&mut Pass> {
        match self {
            Self::Collecting(pass) => Ok(pass),
            Self::Idle => Err(Error::State("no backward pass is open")),
        }
    }
}

impl Gradient<'_> {
    fn describe(self) -> String {
        match self {
            Self::F32(values) => format!("{} x f32", values.len()),
            Self::F64(values) => format!("{} x f64", values.len()),
        }
    }
}

impl Buffer {
    /// The values, if they are f32.
    pub fn as_f32(&self) -> Option<&[f32]> {
        match self {
            Self::F32(values) => Some(values),
            Self::F64(_) => None,
        }
    }

    /// The values, if they are f64.
    pub fn as_f64(&self) -> Option<&[f64]> {
        match self {
            Self::F64(values) => Some(values),
            Self::F32(_) => None,
        }
    }

    /// A spare buffer of that type and length, with old values in it, or a new one of zeros.
    fn take(spare: &mut Vec<Buffer>, dtype: Float, len: usize) -> Self {
        let fits = |buffer: &Buffer| match buffer {
            Self::F32(values) => dtype == Float::F32 && values.len() == len,
            Self::F64(values) => dtype == Float::F64 && values.len() == len,
        };
        match (spare.iter().position(fits), dtype) {
            (Some(at), _) => spare.swap_remove(at),
            (None, Float::F32) => Self::F32(vec![0.0; len]),
            (None, Float::F64) => Self::F64(vec![0.0; len]),
        }
    }

    fn fill(&mut self, range: std::ops::Range<usize>, value: f64) {
        match self {
            Self::F32(values) => values[range].fill(value as f32),
            Self::F64(values) => values[range].fill(value),
        }
    }

    fn at(&self, index: usize) -> f64 {
        match self {
            Self::F32(values) => values[index].into(),
            Self::F64(values) => values[index],
        }
    }
}

/// f32 or f64.
trait Real: Element + Copy + std::ops::Mul<Output = Self> + std::ops::DivAssign {
    fn from_f64(value: f64) -> Self;
    fn to_f64(self) -> f64;
}

impl Real for f32 {
    fn from_f64(value: f64) -> Self {
        value as f32
    }

    fn to_f64(self) -> f64 {
        self.into()
    }
}

impl Real for f64 {
    fn from_f64(value: f64) -> Self {
        value
    }

    fn to_f64(self) -> f64 {
        self
    }
}

/// Copies `gradient`, a mean over `samples`, as a sum over them.
fn weigh<T: Real>(values: &mut [T], gradient: &[T], samples: usize) {
    match samples {
        // The gradient of a stand-in may be NaN, and NaN x 0 is NaN.
        0 => values.fill(T::from_f64(0.0)),
        1 => values.copy_from_slice(gradient),
        _ => {
            let weight = T::from_f64(samples as f64);
            for (value, &gradient) in values.iter_mut().zip(gradient) {
                *value = gradient * weight;
            }
        }
    }
}

fn write_totals(values: &mut Buffer, at: usize, samples: usize, loss: f64) {
    for limb in 0..LIMBS {
        let bits = (samples >> (limb * LIMB_BITS)) & ((1 << LIMB_BITS) - 1);
        values.fill(at + limb..at + limb + 1, bits as f64);
    }
    let weighted = if samples == 0 {
        0.0
    } else {
        loss * samples as f64
    };
    values.fill(at + LIMBS..at + LIMBS + 1, weighted);
}

/// Sums a bucket over the ranks and divides its gradients by the sample total.
///
/// The first bucket brings the total; the stream is first in, first out, so the others find it.
fn mean<T: Real>(
    communicator: &mut Communicator,
    values: &mut [T],
    gradients: usize,
    totals_at: Option<usize>,
    totals: &OnceLock<Totals>,
) -> collectives::Result<()> {
    communicator.all_reduce(values, ReduceOp::Sum)?;
    if let Some(at) = totals_at {
        let limb = |limb: usize| (values[at + limb].to_f64() as u64) << (limb * LIMB_BITS);
        let samples = (0..LIMBS).map(limb).sum::<u64>();
        let loss = values[at + LIMBS].to_f64() / samples as f64;
        totals.get_or_init(|| Totals { samples, loss });
    }
    let total = totals.get().map_or(0, |totals| totals.samples);
    if total > 0 {
        let total = T::from_f64(total as f64);
        for value in &mut values[..gradients] {
            *value /= total;
        }
    }
    Ok(())
}
