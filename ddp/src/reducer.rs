//! Turns "this gradient is ready" into all-reduces that run meanwhile. No Burn here.
//!
//! # Memory
//!
//! A pass takes one buffer per bucket, when its first gradient comes; together they are as large as
//! all gradients. They *are* the gradients afterwards: [`finish`](Reducer::finish) gives them away
//! and keeps none, and [`recycle`](Reducer::recycle) takes back what its user no longer needs.
//! Micro-batches are added in place; [micro-shards](Shards) hold up to log2 of their number more
//! buffers per bucket, the partial sums of their tree.
//!
//! Where a rank [keeps its part](Keep::Part), a bucket's buffer is free when the bucket has been
//! reduced, and the next bucket of its size takes it: the pass holds the parts, and the buckets
//! that are filling or under way.
use std::mem;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use collectives::{CommStream, Partition, Place, Work};

use crate::bucket::{BucketPlan, LIMB_BITS, LIMBS};
use crate::buffer::{Buffer, Gradient, Pool, Size};
use crate::hook::{AllReduce, CommHook};
use crate::norm;
use crate::parcel::{Arrived, Parcel, common};
use crate::real::Real;
use crate::record::BucketRecord;
use crate::shards::{Shards, Sum};
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
    stream: Arc<CommStream>,
    overlap: bool,
    shards: Option<Shards>,
    hook: Arc<dyn CommHook>,
    keep: Keep,
    wants_norm: bool,
    state: State,
    pool: Pool,
    progress: Progress,
}

/// What each rank gets of the means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keep {
    /// All of them: buckets are all-reduced.
    #[default]
    Whole,
    /// Of every bucket part r of the [partition](Partition) of its gradients, on rank r: buckets
    /// are reduce-scattered, half the bytes. The tails of the first and the last bucket go by
    /// themselves, and every rank learns at the end, by one more small call, whether the parts of
    /// all are numbers, and their norm. [Hooks](CommHook) are not asked.
    Part,
}

#[derive(Debug)]
enum State {
    Idle,
    Collecting(Pass),
}

/// One backward pass, or several that are reduced together.
#[derive(Debug)]
struct Pass {
    /// When the last micro-batch began.
    began: Instant,
    micro: MicroBatch,
    /// Micro-batches begun so far.
    micro_batches: usize,
    /// Samples and weighted loss of them.
    samples: usize,
    weighted_loss: f64,
    buckets: Vec<Bucket>,
    /// The bucket whose turn it is; those before it are on their way.
    next: usize,
    /// Per slot, the micro-batches with samples that used it.
    used: Vec<usize>,
    /// Whether the gradients of this one rank's one batch are the means already, so that weight and
    /// division, which round, are left out.
    alone: bool,
    /// Of this rank's gradients; a loss that is no number counts as one of them.
    size: Size,
    /// Bytes of partial sums that wait while the next shard is computed, at most.
    partial_bytes: usize,
    arrival: Vec<usize>,
    totals: Arc<OnceLock<Totals>>,
}

/// The one whose backward pass is running, or was the last to run.
#[derive(Debug)]
struct MicroBatch {
    samples: usize,
    weighted_loss: f64,
    /// Whether its buckets travel as they fill.
    last: bool,
    seen: Vec<bool>,
}

#[derive(Debug)]
enum Bucket {
    Filling {
        /// The sum of the micro-batches so far; of this shard alone where there are shards.
        /// None before the first gradient.
        values: Option<Buffer>,
        /// The shards before.
        sum: Sum<Buffer>,
        missing: usize,
        full: Instant,
    },
    Reducing {
        work: Work<Arrived>,
        full: Instant,
    },
}

/// What all ranks trained on.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) samples: u64,
    pub(crate) loss: f64,
}

/// What a backward pass came to, the same on all ranks except for the times.
#[derive(Clone, Debug)]
pub struct Reduced {
    /// Mean gradients in plan order, each bucket with its tail; or this rank's part of each,
    /// without one.
    pub buckets: Vec<Buffer>,
    /// Samples of all ranks.
    pub samples: u64,
    /// Mean loss over them.
    pub loss: f64,
    /// How many backward passes of all ranks used each slot.
    pub used: Vec<usize>,
    /// The ranks whose gradients or loss were no numbers.
    pub non_finite: Vec<usize>,
    /// Whether all means and the loss are numbers. If not and `non_finite` is empty, a sum over
    /// the ranks overflowed.
    pub finite: bool,
    /// Most bytes of partial sums that waited at one time.
    pub partial_bytes: usize,
    /// The norm over all means, if it was asked for.
    pub norm: Option<f64>,
    /// Backward passes of this rank.
    pub micro_batches: usize,
    /// Slots in the order in which their gradients arrived on this rank, in the last of them.
    pub arrival: Vec<usize>,
    /// What each bucket took; times count from the beginning of the last backward pass.
    pub records: Vec<BucketRecord>,
}

/// What a rank adds to the last element of the last tail if something is no number, or so large that a
/// sum may be none. Beside it each
/// adds 1, which shows whether a hook has summed the tail: up to 4096 ranks or shards.
const FLAG: f64 = 8192.0;

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
            stream: Arc::new(stream),
            overlap,
            shards: None,
            hook: Arc::new(AllReduce),
            keep: Keep::Whole,
            wants_norm: false,
            state: State::Idle,
            pool: Pool::default(),
            progress: Progress::default(),
        }
    }

    /// Adds in the tree over `shards`: each micro-batch is then the next shard of this rank.
    ///
    /// The communicator must be [deterministic](collectives::CommunicatorConfig::deterministic),
    /// so that the ranks' sums continue the tree.
    pub fn with_shards(self, shards: Shards) -> Self {
        Self {
            shards: Some(shards),
            ..self
        }
    }

    /// Leaves each rank with what `keep` says.
    pub fn with_keep(self, keep: Keep) -> Self {
        Self { keep, ..self }
    }

    /// Computes the norm over all means too.
    pub fn with_norm(self, wanted: bool) -> Self {
        Self {
            wants_norm: wanted,
            ..self
        }
    }

    /// Takes buckets through the ranks by `hook`, from the next pass on. With shards it is not
    /// asked: their order is their own.
    pub fn set_hook(&mut self, hook: Arc<dyn CommHook>) {
        self.hook = hook;
    }

    /// Opens a backward pass over this rank's `samples`, whose mean loss is `loss`.
    ///
    /// Gradients are weighted by `samples`. With 0 samples this rank contributes exact zeros,
    /// whatever arrives.
    ///
    /// # Errors
    ///
    /// [`Error::State`] if a pass is still open, [`Error::Config`] if `samples` is not below 2^48.
    pub fn begin(&mut self, samples: usize, loss: f64) -> Result<()> {
        match self.state {
            State::Idle => self.begin_micro_batch(samples, loss, true),
            State::Collecting(_) => Err(Error::State("a backward pass is still open")),
        }
    }

    /// Opens a pass with its first micro-batch, or goes on to the next. Nothing travels before the
    /// `last`.
    ///
    /// # Errors
    ///
    /// As [`begin`](Self::begin), if the last has begun; [`Error::MicroShards`] for one too many.
    pub fn begin_micro_batch(&mut self, samples: usize, loss: f64, last: bool) -> Result<()> {
        let slots = self.plan.slots();
        if let State::Idle = self.state {
            self.state = State::Collecting(self.open());
        } else {
            self.lay_aside()?;
        }
        let Place { rank, world } = self.stream.place();
        let plain = self.keep == Keep::Part || self.hook.is_plain();
        let alone = world == 1 && self.shards.is_none() && plain;
        let pass = self.state.pass()?;
        let total = pass.samples.saturating_add(samples);
        if total as u64 >> (LIMBS * LIMB_BITS) != 0 {
            return Err(Error::Config {
                name: "samples",
                value: total.to_string(),
                expected: "below 2^48",
            });
        }
        pass.samples = total;
        pass.micro_batches += 1;
        pass.alone = alone && last && pass.micro_batches == 1;
        if let Some(shards) = self.shards {
            let (due, begun) = (shards.own().len(), pass.micro_batches);
            if begun > due || (last && begun < due) {
                let shards = shards.count();
                return Err(Error::MicroShards {
                    call: "accumulate",
                    rank,
                    due,
                    got: begun,
                    shards,
                });
            }
        }
        let weighted_loss = match samples {
            0 => 0.0,
            _ => loss * samples as f64,
        };
        pass.weighted_loss += weighted_loss;
        if samples > 0 && !loss.is_finite() {
            pass.size = Size::NoNumber;
        }
        pass.began = Instant::now();
        pass.arrival.clear();
        pass.micro = MicroBatch {
            samples,
            weighted_loss,
            last,
            seen: vec![false; slots],
        };
        Ok(())
    }

    /// Opens a pass to which this rank has nothing to add.
    ///
    /// # Errors
    ///
    /// As [`begin`](Self::begin); [`Error::MicroShards`] if there are shards.
    pub fn begin_without(&mut self) -> Result<()> {
        if let Some(shards) = self.shards {
            return Err(Error::MicroShards {
                call: "accumulate",
                rank: self.stream.place().rank,
                due: shards.own().len(),
                got: 0,
                shards: shards.count(),
            });
        }
        self.begin(0, 0.0)?;
        self.state.pass()?.micro_batches = 0;
        Ok(())
    }

    fn open(&mut self) -> Pass {
        let began = Instant::now();
        let plan = &self.plan;
        let buckets = (0..plan.len())
            .map(|bucket| Bucket::Filling {
                values: None,
                sum: Sum::default(),
                missing: plan.slots_in(bucket).len(),
                full: began,
            })
            .collect();
        Pass {
            began,
            micro: MicroBatch {
                samples: 0,
                weighted_loss: 0.0,
                last: false,
                seen: Vec::new(),
            },
            micro_batches: 0,
            samples: 0,
            weighted_loss: 0.0,
            buckets,
            next: 0,
            used: vec![0; plan.slots()],
            alone: false,
            size: Size::Modest,
            partial_bytes: 0,
            arrival: Vec::with_capacity(plan.slots()),
            totals: Arc::default(),
        }
    }

    /// Ends a micro-batch that is not the last.
    fn lay_aside(&mut self) -> Result<()> {
        let pass = self.state.pass()?;
        if pass.micro.last {
            return Err(Error::State("a backward pass is still open"));
        }
        if let Some(shards) = self.shards {
            let shard = shards.own().start + pass.micro_batches - 1;
            for index in 0..pass.buckets.len() {
                let Bucket::Filling { values, .. } = &mut pass.buckets[index] else {
                    return Err(Error::State("a bucket left before the last micro-batch"));
                };
                let leaf = values.take();
                let mut leaf =
                    leaf.unwrap_or_else(|| take(&self.pool, &self.plan, self.keep, index));
                pass.seal(&mut leaf, index, &self.plan, true);
                pass.push(index, shard, leaf, &self.pool)?;
            }
        }
        let mut waiting = 0;
        for (index, bucket) in pass.buckets.iter_mut().enumerate() {
            if let Bucket::Filling { missing, sum, .. } = bucket {
                *missing = self.plan.slots_in(index).len();
                waiting += sum.len() * self.plan.bytes(index);
            }
        }
        pass.partial_bytes = pass.partial_bytes.max(waiting);
        Ok(())
    }

    /// Takes the gradient of `slot`, at most once per backward pass: one copy into its bucket.
    ///
    /// # Errors
    ///
    /// [`Error::ReadyTwice`], [`Error::GradientMismatch`], [`Error::State`].
    pub fn ready(&mut self, slot: usize, gradient: Gradient<'_>) -> Result<()> {
        let (bucket, range) = self.plan.locate(slot);
        let parameter = || self.names[slot].clone();
        let pass = self.state.pass()?;
        let Bucket::Filling {
            values,
            missing,
            full,
            ..
        } = &mut pass.buckets[bucket]
        else {
            let parameter = parameter();
            return Err(Error::ReadyTwice { parameter });
        };
        if mem::replace(&mut pass.micro.seen[slot], true) {
            let parameter = parameter();
            return Err(Error::ReadyTwice { parameter });
        }
        // A stand-in for a missing batch does not count as use.
        let samples = pass.micro.samples;
        let onto = self.shards.is_none() && pass.used[slot] > 0;
        let len = range.len();
        let weight = match pass.alone {
            true => samples.min(1),
            false => samples,
        };
        let values = values.get_or_insert_with(|| take(&self.pool, &self.plan, self.keep, bucket));
        let Some(size) = values.take_in(range, gradient, weight, onto) else {
            return Err(Error::GradientMismatch {
                parameter: parameter(),
                expected: format!("{len} x {}", self.plan.dtype(bucket).name()),
                got: gradient.describe(),
            });
        };
        pass.size = pass.size.max(size);
        pass.used[slot] += usize::from(samples > 0);
        pass.arrival.push(slot);
        *missing -= 1;
        *full = Instant::now();
        if *missing == 0 {
            let rank = self.stream.place().rank;
            tracing::info!(target: "lockstep", rank, bucket, "ready");
        }
        if self.overlap && pass.micro.last {
            self.start_while(|missing| missing == 0)?;
        }
        Ok(())
    }

    /// Whether the gradient of `slot` has arrived in the open backward pass.
    pub fn has(&self, slot: usize) -> bool {
        matches!(&self.state, State::Collecting(pass) if pass.micro.seen[slot])
    }

    /// Reduces what is left, waits for all, and gives the means away.
    ///
    /// A slot that was never ready counts as zero on this rank.
    ///
    /// # Errors
    ///
    /// That of the first bucket that failed; [`Error::NoSamples`] if no rank had any.
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
        let mut squares = vec![0.0; self.plan.slots()];
        let (mut digests, mut counts) = (Vec::new(), Vec::new());
        let mut finite = true;
        for (index, bucket) in pass.buckets.into_iter().enumerate() {
            let Bucket::Reducing { work, full } = bucket else {
                return Err(Error::State("a bucket was left behind"));
            };
            let arrived = work.wait()?;
            let since = |instant: Instant| instant.saturating_duration_since(pass.began);
            records.push(BucketRecord {
                elements: self.plan.elements(index),
                bytes: self.plan.bytes(index),
                ready: since(full),
                start: since(arrived.start),
                end: since(arrived.end),
                slots: self.plan.slots_in(index).len(),
                algorithm: arrived.algorithm,
            });
            match self.keep {
                Keep::Whole => {
                    for (&slot, of_slot) in self.plan.slots_in(index).iter().zip(arrived.squares) {
                        squares[slot] = of_slot;
                    }
                }
                Keep::Part => digests.extend(arrived.squares),
            }
            finite &= arrived.finite;
            buckets.push(arrived.values);
            counts = arrived.counts;
        }
        if let Keep::Part = self.keep {
            self.pool.clear();
            finite = self.judge(finite, digests, &mut squares)?;
        }
        let totals = pass.totals.get().filter(|totals| totals.samples > 0);
        let agrees = self.keep == Keep::Part || self.hook.agrees();
        let none = match agrees {
            true => Error::NoSamples,
            false => Error::State(
                "this rank had no sample in this step, and the hook takes no mean over ranks",
            ),
        };
        let Totals { samples, loss } = *totals.ok_or(none)?;
        let flags = counts.pop().unwrap_or_default();
        let Place { world, .. } = self.stream.place();
        if self.shards.is_none() && agrees && flags % FLAG != world as f64 {
            let hook = self.hook.name();
            return Err(Error::HookLeftTail { hook });
        }
        let non_finite = match flags >= FLAG {
            false => Vec::new(),
            true => {
                // A sum may have overflowed.
                let means = |(bucket, means): (usize, &Buffer)| match self.keep {
                    Keep::Whole => means.is_finite(0..self.plan.gradients_in(bucket)),
                    Keep::Part => true,
                };
                finite &= buckets.iter().enumerate().all(means);
                self.name_non_finite(pass.size < Size::NoNumber)?
            }
        };
        let used = counts.into_iter().map(|count| count as usize).collect();
        Ok(Reduced {
            buckets,
            samples,
            loss,
            used,
            finite: finite && loss.is_finite() && non_finite.is_empty(),
            non_finite,
            norm: self.wants_norm.then(|| norm::global(squares)),
            micro_batches: pass.micro_batches,
            partial_bytes: pass.partial_bytes,
            arrival: pass.arrival,
            records,
        })
    }

    /// Whether the parts of all ranks are numbers, given whether this one's are; fills in the
    /// `squares` of every slot, if they are wanted, from the digests of all.
    fn judge(&self, finite: bool, digests: Vec<f64>, squares: &mut [f64]) -> Result<bool> {
        let world = self.stream.place().world;
        // The slots in the order in which they travelled, and each rank's part of them.
        let mut cuts: Vec<(usize, Vec<Range<usize>>)> = Vec::new();
        for index in 0..self.plan.len() {
            let parts = Partition::new(self.plan.gradients_in(index), world);
            for &slot in squares_in(&self.plan, index, self.wants_norm) {
                let range = self.plan.locate(slot).1;
                let own = |rank| {
                    let held = common(&range, &parts.range(rank));
                    held.start - range.start..held.end - range.start
                };
                cuts.push((slot, (0..world).map(own).collect()));
            }
        }
        let len = |slot: usize| self.plan.locate(slot).1.len();
        let count = |rank: usize| {
            let of_slot =
                |(slot, owns): &(usize, Vec<_>)| norm::digest_len(&owns[rank], len(*slot));
            1 + cuts.iter().map(of_slot).sum::<usize>()
        };
        let counts: Vec<usize> = (0..world).map(count).collect();
        let all = vec![0.0; counts.iter().sum()];
        let own = [vec![f64::from(u8::from(finite))], digests].concat();
        let all = self.stream.all_gather_v(own, counts.clone(), all).wait()?;
        let mut rest = &all[..];
        let mut of_rank: Vec<&[f64]> = Vec::new();
        for count in counts {
            let (digests, others) = rest.split_at(count);
            of_rank.push(digests);
            rest = others;
        }
        let finite = of_rank.iter().all(|digests| digests[0] == 1.0);
        of_rank
            .iter_mut()
            .for_each(|digests| *digests = &digests[1..]);
        for (slot, owns) in cuts {
            let mut parts = Vec::new();
            for (own, digests) in owns.into_iter().zip(&mut of_rank) {
                let (part, others) = digests.split_at(norm::digest_len(&own, len(slot)));
                parts.push((own, part));
                *digests = others;
            }
            squares[slot] = norm::squares_of_digests(parts, len(slot));
        }
        Ok(finite)
    }

    /// Asks every rank whether its own gradients were numbers; all ranks know that some were not.
    fn name_non_finite(&self, finite: bool) -> Result<Vec<usize>> {
        let place = self.stream.place();
        if self.keep == Keep::Whole && !self.hook.agrees() {
            return Ok(if finite { vec![] } else { vec![place.rank] });
        }
        let work = self.stream.run(move |communicator| {
            let mut strange = vec![0u8; place.world];
            communicator.all_gather(&[u8::from(!finite)], &mut strange)?;
            Ok(strange)
        });
        let strange = work.wait()?;
        Ok((0..place.world).filter(|&rank| strange[rank] > 0).collect())
    }

    /// Takes back a buffer, to be used by a coming backward pass if it fits a bucket.
    pub fn recycle(&mut self, buffer: Buffer) {
        self.pool.give(buffer);
    }

    /// Agrees with all ranks on rank 0's `order` of the slots.
    ///
    /// # Errors
    ///
    /// That of the broadcast.
    pub fn agree(&self, order: &[usize]) -> Result<Vec<usize>> {
        let mut order: Vec<u64> = order.iter().map(|&slot| slot as u64).collect();
        let work = self.stream.run(move |communicator| {
            communicator.broadcast(&mut order, 0)?;
            Ok(order)
        });
        Ok(work.wait()?.into_iter().map(|slot| slot as usize).collect())
    }

    /// Uses `plan` from now on.
    ///
    /// # Errors
    ///
    /// [`Error::State`] within a backward pass.
    pub fn replan(&mut self, plan: BucketPlan) -> Result<()> {
        if let State::Collecting(_) = self.state {
            return Err(Error::State("buckets cannot change within a backward pass"));
        }
        self.pool.clear();
        self.plan = plan;
        Ok(())
    }

    /// The layout in use.
    pub fn plan(&self) -> &BucketPlan {
        &self.plan
    }

    /// The tree in which micro-shards are added, if they are.
    pub fn shards(&self) -> Option<Shards> {
        self.shards
    }

    /// A counter of the buckets reduced so far, for other threads to watch.
    pub fn progress(&self) -> Progress {
        self.progress.clone()
    }

    /// The stream that the buckets travel on.
    pub fn stream(&self) -> &Arc<CommStream> {
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
                ..
            } = bucket
            && due(*missing)
        {
            let (index, full) = (pass.next, *full);
            let values = values.take();
            let mut values =
                values.unwrap_or_else(|| take(&self.pool, &self.plan, self.keep, index));
            pass.seal(&mut values, index, &self.plan, self.shards.is_some());
            let parts = match self.shards {
                None => vec![values],
                Some(shards) => {
                    let shard = shards.own().end - 1;
                    pass.push(index, shard, values, &self.pool)?;
                    pass.take_parts(index, shards, &self.pool)?
                }
            };
            let is_last = index == self.plan.len() - 1;
            let parcel = Parcel {
                parts,
                gradients: self.plan.gradients_in(index),
                keep: self.keep,
                totals_at: (index == 0).then(|| self.plan.totals()),
                totals: pass.totals.clone(),
                counts_at: is_last.then(|| self.plan.counts()),
                divides: !pass.alone,
                checks: self.keep == Keep::Part || !self.hook.is_plain(),
                squares_of: squares_in(&self.plan, index, self.wants_norm)
                    .iter()
                    .map(|&slot| self.plan.locate(slot).1)
                    .collect(),
                shards: self.shards,
                hook: self.hook.clone(),
                pool: self.pool.clone(),
            };
            let progress = self.progress.clone();
            let (rank, bytes) = (self.stream.place().rank, self.plan.bytes(index));
            let work = self.stream.run(move |communicator| {
                let span =
                    tracing::info_span!(target: "lockstep", "bucket", rank, bucket = index, bytes);
                let arrived = span.in_scope(|| parcel.travel(communicator))?;
                progress.0.fetch_add(1, Ordering::Release);
                Ok(arrived)
            });
            pass.buckets[index] = Bucket::Reducing { work, full };
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

impl Pass {
    /// Completes the buffer of a bucket: zeros for what did not come, and the tail. A `leaf` is
    /// one micro-shard, else it is all micro-batches so far.
    fn seal(&self, values: &mut Buffer, index: usize, plan: &BucketPlan, leaf: bool) {
        for &slot in plan.slots_in(index) {
            let came = match leaf {
                true => self.micro.seen[slot],
                false => self.used[slot] > 0,
            };
            if !came {
                values.fill(plan.locate(slot).1, 0.0);
            }
        }
        if index == 0 {
            let (samples, loss) = match leaf {
                true => (self.micro.samples, self.micro.weighted_loss),
                false => (self.samples, self.weighted_loss),
            };
            Totals::write(values, plan.totals(), samples, loss);
        }
        if index == plan.len() - 1 {
            for (slot, at) in plan.used().enumerate() {
                let used = match leaf {
                    true => usize::from(self.micro.seen[slot] && self.micro.samples > 0),
                    false => self.used[slot],
                };
                values.fill(at..at + 1, used as f64);
            }
            let at = plan.non_finite();
            let flag = match self.size {
                Size::Modest => 0.0,
                Size::Huge | Size::NoNumber => FLAG,
            };
            values.fill(at..at + 1, 1.0 + flag);
        }
    }

    /// Adds the leaf of a micro-shard to the tree of a bucket.
    fn push(&mut self, index: usize, shard: usize, leaf: Buffer, pool: &Pool) -> Result<()> {
        let Bucket::Filling { sum, .. } = &mut self.buckets[index] else {
            return Err(Error::State("a bucket left before its last micro-shard"));
        };
        sum.push(shard, leaf, |left, right| {
            left.add(&right);
            pool.give(right);
        });
        Ok(())
    }

    /// What this rank sends of a bucket's tree: the closed sum, or its blocks.
    fn take_parts(&mut self, index: usize, shards: Shards, pool: &Pool) -> Result<Vec<Buffer>> {
        let Bucket::Filling { sum, .. } = &mut self.buckets[index] else {
            return Err(Error::State("a bucket left before its last micro-shard"));
        };
        let sum = mem::take(sum);
        if !shards.is_closed() {
            return Ok(sum.into_values());
        }
        let closed = sum.finish(|left, right| {
            left.add(&right);
            pool.give(right);
        });
        Ok(closed.into_iter().collect())
    }
}

/// The slots of a bucket whose squares are `wanted`.
fn squares_in(plan: &BucketPlan, bucket: usize, wanted: bool) -> &[usize] {
    match wanted {
        true => plan.slots_in(bucket),
        false => &[],
    }
}

/// Memory for a bucket of `plan`, with old values in it.
fn take(pool: &Pool, plan: &BucketPlan, keep: Keep, bucket: usize) -> Buffer {
    let (dtype, len) = (plan.dtype(bucket), plan.elements(bucket));
    match keep {
        Keep::Whole => pool.take(dtype, len),
        // One memory for buckets with and without a tail.
        Keep::Part => pool.take_room(dtype, len, plan.totals().len() + plan.counts().len()),
    }
}

impl Totals {
    pub(crate) fn read<T: Real>(at: &[T]) -> Self {
        let limb = |limb: usize| (at[limb].to_f64() as u64) << (limb * LIMB_BITS);
        let samples = (0..LIMBS).map(limb).sum::<u64>();
        let loss = at[LIMBS].to_f64() / samples as f64;
        Self {
            samples,
            // Whose bits a NaN keeps depends on who was added first.
            loss: if loss.is_nan() { f64::NAN } else { loss },
        }
    }

    fn write(values: &mut Buffer, range: Range<usize>, samples: usize, weighted_loss: f64) {
        let at = range.start;
        for limb in 0..LIMBS {
            let bits = (samples >> (limb * LIMB_BITS)) & ((1 << LIMB_BITS) - 1);
            values.fill(at + limb..at + limb + 1, bits as f64);
        }
        values.fill(at + LIMBS..at + LIMBS + 1, weighted_loss);
    }
}
