//! What becomes of a bucket on its way through the ranks.
mod all_reduce;
mod bf16;
mod fp16;
mod noop;

use std::fmt::Debug;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use collectives::{Communicator, Element, ReduceOp};
use serde::{Deserialize, Serialize};

pub use all_reduce::AllReduce;
pub use bf16::Bf16Compress;
pub use fp16::Fp16Compress;
pub use noop::Noop;

use crate::real::{self, Real};
use crate::reducer::Totals;

/// Takes each bucket through the ranks, on the communication thread.
///
/// In come sums over the samples of this rank: gradients, and behind them a short tail of counts
/// and losses. Out go the sums over all ranks, of both; the division by the sample total is done
/// afterwards. Every rank runs the same hook on the same buckets in the same order.
pub trait CommHook: Debug + Send + Sync {
    /// Its name in records and error messages.
    fn name(&self) -> &'static str;

    /// Replaces this rank's sums by those over all ranks.
    ///
    /// # Errors
    ///
    /// That of the collective that failed.
    fn reduce(
        &self,
        bucket: &mut BucketSums<'_>,
        communicator: &mut Communicator,
    ) -> collectives::Result<()>;

    /// Whether all ranks come out with the same sums, to the bit. False only where nothing is sent.
    fn agrees(&self) -> bool {
        true
    }

    /// Whether it gives one rank alone the very numbers that it took. False unless said.
    fn is_plain(&self) -> bool {
        false
    }
}

/// The hooks of this crate, by the names they have in settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Hook {
    /// [`AllReduce`]: sums as they are.
    #[default]
    AllReduce,
    /// [`Bf16Compress`]: half the bytes, 8 bits of mantissa.
    Bf16,
    /// [`Fp16Compress`]: half the bytes, 11 bits of mantissa, up to 65,504.
    Fp16,
    /// [`Noop`]: nothing is sent; to measure with.
    Noop,
}

impl Hook {
    /// The hook of that name.
    ///
    /// ```
    /// assert_eq!(ddp::Hook::Bf16.make().name(), "bf16");
    /// ```
    pub fn make(self) -> Arc<dyn CommHook> {
        match self {
            Self::AllReduce => Arc::new(AllReduce),
            Self::Bf16 => Arc::new(Bf16Compress),
            Self::Fp16 => Arc::new(Fp16Compress),
            Self::Noop => Arc::new(Noop),
        }
    }
}

/// A bucket as a [`CommHook`] sees it: sums over samples, of this rank or of all.
#[derive(Debug)]
pub struct BucketSums<'a> {
    values: Values<'a>,
    gradients: usize,
    totals_at: Option<Range<usize>>,
    totals: &'a OnceLock<Totals>,
    /// Whether the gradients are means already.
    pub(crate) divided: bool,
}

/// Numbers of either type.
#[derive(Debug)]
pub enum Values<'a> {
    /// 32 bits each.
    F32(&'a mut [f32]),
    /// 64 bits each.
    F64(&'a mut [f64]),
}

impl<'a> BucketSums<'a> {
    pub(crate) fn new(
        values: Values<'a>,
        gradients: usize,
        totals_at: Option<Range<usize>>,
        totals: &'a OnceLock<Totals>,
    ) -> Self {
        Self {
            values,
            gradients,
            totals_at,
            totals,
            divided: false,
        }
    }

    /// The gradients, without the tail.
    pub fn gradients(&mut self) -> Values<'_> {
        match &mut self.values {
            Values::F32(values) => Values::F32(&mut values[..self.gradients]),
            Values::F64(values) => Values::F64(&mut values[..self.gradients]),
        }
    }

    /// Sums gradients and tail over the ranks, in one call.
    ///
    /// # Errors
    ///
    /// That of the all-reduce.
    pub fn all_reduce(&mut self, communicator: &mut Communicator) -> collectives::Result<()> {
        self.sum_from(0, communicator)
    }

    /// As [`all_reduce`](Self::all_reduce), and where the samples of all ranks are known makes means
    /// of the sums on the way: each rank divides what it sums, before it is spread.
    pub(crate) fn all_reduce_to_means(
        &mut self,
        communicator: &mut Communicator,
    ) -> collectives::Result<()> {
        let samples = self.totals.get().map_or(0, |totals| totals.samples);
        if samples == 0 {
            return self.all_reduce(communicator);
        }
        fn means<T: Real>(
            values: &mut [T],
            gradients: usize,
            samples: u64,
            communicator: &mut Communicator,
        ) -> collectives::Result<()> {
            let samples = T::from_f64(samples as f64);
            communicator.all_reduce_then(values, ReduceOp::Sum, |start, sums| {
                let gradients = gradients.saturating_sub(start).min(sums.len());
                real::divide(&mut sums[..gradients], samples);
            })
        }
        let gradients = self.gradients;
        self.divided = true;
        match &mut self.values {
            Values::F32(values) => means(values, gradients, samples, communicator),
            Values::F64(values) => means(values, gradients, samples, communicator),
        }
    }

    /// Sums the tail alone, as wide as it is: counts must be exact. Nothing to do without a tail,
    /// which only the first and the last bucket have.
    ///
    /// # Errors
    ///
    /// That of the all-reduce.
    pub fn all_reduce_tail(&mut self, communicator: &mut Communicator) -> collectives::Result<()> {
        let len = match &self.values {
            Values::F32(values) => values.len(),
            Values::F64(values) => values.len(),
        };
        match len > self.gradients {
            true => self.sum_from(self.gradients, communicator),
            false => Ok(()),
        }
    }

    /// Sums the tail for every rank, and the gradients so that each rank has the sums of its part.
    pub(crate) fn reduce_scatter(
        &mut self,
        communicator: &mut Communicator,
    ) -> collectives::Result<()> {
        self.all_reduce_tail(communicator)?;
        match self.gradients() {
            Values::F32(values) => communicator.reduce_scatter(values, ReduceOp::Sum).map(drop),
            Values::F64(values) => communicator.reduce_scatter(values, ReduceOp::Sum).map(drop),
        }
    }

    /// Samples of all ranks: known once the first bucket's tail has been summed, and so in every
    /// later bucket from the start.
    pub fn samples(&self) -> u64 {
        let read = || match (&self.values, &self.totals_at) {
            (Values::F32(values), Some(at)) => Totals::read(&values[at.clone()]),
            (Values::F64(values), Some(at)) => Totals::read(&values[at.clone()]),
            (_, None) => Totals::default(),
        };
        self.totals.get().copied().unwrap_or_else(read).samples
    }

    fn sum_from(
        &mut self,
        start: usize,
        communicator: &mut Communicator,
    ) -> collectives::Result<()> {
        match &mut self.values {
            Values::F32(values) => communicator.all_reduce(&mut values[start..], ReduceOp::Sum),
            Values::F64(values) => communicator.all_reduce(&mut values[start..], ReduceOp::Sum),
        }
    }
}

/// Sums gradients through a narrower type; the tail as it is.
///
/// What travels is each rank's part of the mean times the world size, which for a rank with its share
/// of the samples is its gradient: sums over many samples would leave a narrow range above, and
/// parts of a mean below. The ranks' numbers are summed
/// wide and rounded once, whatever the algorithm.
fn compress<H: Element + Copy>(
    bucket: &mut BucketSums<'_>,
    communicator: &mut Communicator,
    narrow: impl Fn(f64) -> H,
    widen: impl Fn(H) -> f64,
) -> collectives::Result<()> {
    fn through<T: Real, H: Element + Copy>(
        values: &mut [T],
        samples: f64,
        communicator: &mut Communicator,
        narrow: impl Fn(f64) -> H,
        widen: impl Fn(H) -> f64,
    ) -> collectives::Result<()> {
        let scale = communicator.world_size() as f64 / samples;
        let short = values.iter().map(|value| narrow(value.to_f64() * scale));
        let mut short: Vec<H> = short.collect();
        communicator.all_reduce(&mut short, ReduceOp::Mean)?;
        for (value, mean) in values.iter_mut().zip(short) {
            *value = T::from_f64(widen(mean) * samples);
        }
        Ok(())
    }
    bucket.all_reduce_tail(communicator)?;
    // Without a sample in the world there is no mean, and the pass ends in an error.
    let samples = bucket.samples().max(1) as f64;
    match bucket.gradients() {
        Values::F32(values) => through(values, samples, communicator, narrow, widen),
        Values::F64(values) => through(values, samples, communicator, narrow, widen),
    }
}
