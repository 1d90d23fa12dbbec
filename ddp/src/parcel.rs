//! A bucket on its way: summed over the ranks, then divided, on the communication thread.
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use collectives::Communicator;

use crate::buffer::{Buffer, Pool};
use crate::exchange;
use crate::hook::{BucketSums, CommHook, Values};
use crate::norm;
use crate::real::{self, Real};
use crate::reducer::{Keep, Totals};
use crate::shards::Shards;

/// What goes to the communication thread.
#[derive(Debug)]
pub(crate) struct Parcel {
    /// What this rank has added: one buffer, or its blocks where shards do not close.
    pub(crate) parts: Vec<Buffer>,
    /// Gradient elements, in front of the tail.
    pub(crate) gradients: usize,
    /// What this rank gets of them.
    pub(crate) keep: Keep,
    /// Where the sample total lies, in the first bucket.
    pub(crate) totals_at: Option<Range<usize>>,
    pub(crate) totals: Arc<OnceLock<Totals>>,
    /// Where the counts lie, in the last bucket.
    pub(crate) counts_at: Option<Range<usize>>,
    /// Whether sums are to become means.
    pub(crate) divides: bool,
    /// Whether these may be no numbers though what this rank has added is modest.
    pub(crate) checks: bool,
    /// The slots whose squares are wanted.
    pub(crate) squares_of: Vec<Range<usize>>,
    pub(crate) shards: Option<Shards>,
    pub(crate) hook: Arc<dyn CommHook>,
    /// Where memory goes that is no longer needed.
    pub(crate) pool: Pool,
}

/// What comes back.
#[derive(Debug)]
pub(crate) struct Arrived {
    /// Means, and the tail as it was summed; or this rank's part of the means.
    pub(crate) values: Buffer,
    /// Whether they are numbers, if that was to be checked.
    pub(crate) finite: bool,
    /// Sums of squares of the slots asked for; of a part, its digests.
    pub(crate) squares: Vec<f64>,
    /// The sums of the counts, of the last bucket.
    pub(crate) counts: Vec<f64>,
    pub(crate) algorithm: String,
    pub(crate) start: Instant,
    pub(crate) end: Instant,
}

impl Parcel {
    /// Takes the bucket through the ranks.
    pub(crate) fn travel(
        mut self,
        communicator: &mut Communicator,
    ) -> collectives::Result<Arrived> {
        let start = Instant::now();
        let mut others = std::mem::take(&mut self.parts);
        let mut values = others.remove(0);
        let algorithm;
        let mut divided = !self.divides;
        if let Some(shards) = self.shards.filter(|shards| !shards.is_closed()) {
            algorithm = "blocks".to_owned();
            match &mut values {
                Buffer::F32(values) => {
                    let others = others.iter().filter_map(Buffer::as_f32);
                    self.sum_blocks(values, others, shards, communicator)?;
                }
                Buffer::F64(values) => {
                    let others = others.iter().filter_map(Buffer::as_f64);
                    self.sum_blocks(values, others, shards, communicator)?;
                }
            }
        } else {
            let view = match &mut values {
                Buffer::F32(values) => Values::F32(values),
                Buffer::F64(values) => Values::F64(values),
            };
            let at = self.totals_at.clone();
            let mut sums = BucketSums::new(view, self.gradients, at, &self.totals);
            match self.keep {
                Keep::Whole if divided => sums.all_reduce(communicator)?,
                Keep::Whole => self.hook.reduce(&mut sums, communicator)?,
                Keep::Part => sums.reduce_scatter(communicator)?,
            }
            divided |= sums.divided;
            let route = communicator.last_route().filter(|_| self.hook.agrees());
            algorithm = route.map_or_else(|| "none".to_owned(), |route| route.to_string());
        }
        others.into_iter().for_each(|other| self.pool.give(other));
        let own = match self.keep {
            Keep::Whole => 0..self.gradients,
            Keep::Part => communicator.part(self.gradients),
        };
        let (finite, squares) = match &mut values {
            Buffer::F32(values) => finish(values, own.clone(), divided, &self),
            Buffer::F64(values) => finish(values, own.clone(), divided, &self),
        };
        let counts_at = self.counts_at.clone().unwrap_or_default();
        let counts = counts_at.map(|at| values.at(at)).collect();
        if let Keep::Part = self.keep {
            let part = values.part(own);
            self.pool.give(std::mem::replace(&mut values, part));
        }
        Ok(Arrived {
            values,
            finite,
            squares,
            counts,
            algorithm,
            start,
            end: Instant::now(),
        })
    }

    /// Sums where shards do not close to one vector a rank.
    fn sum_blocks<'a, T: Real>(
        &self,
        first: &mut [T],
        others: impl Iterator<Item = &'a [T]> + Clone,
        shards: Shards,
        communicator: &mut Communicator,
    ) -> collectives::Result<()> {
        if let Keep::Whole = self.keep {
            return exchange::all_reduce_blocks(first, others, shards, communicator);
        }
        let (gradients, tail) = first.split_at_mut(self.gradients);
        if !tail.is_empty() {
            let tails = others.clone().map(|other| &other[self.gradients..]);
            exchange::all_reduce_blocks(tail, tails, shards, communicator)?;
        }
        let others = others.map(|other| &other[..self.gradients]);
        exchange::reduce_scatter_blocks(gradients, others, shards, communicator)
    }
}

/// Divides a bucket's sums, as far as they are this rank's `own` and not `divided`, by the sample
/// total; looks whether all is numbers, and squares what is to be squared.
///
/// The first bucket brings the total; the stream is first in, first out, so the others find it.
fn finish<T: Real>(
    values: &mut [T],
    own: Range<usize>,
    divided: bool,
    parcel: &Parcel,
) -> (bool, Vec<f64>) {
    if let Some(at) = parcel.totals_at.clone() {
        parcel.totals.get_or_init(|| Totals::read(&values[at]));
    }
    let samples = parcel.totals.get().map_or(0, |totals| totals.samples);
    let means = &mut values[own.clone()];
    if samples > 0 && !divided {
        real::divide(means, T::from_f64(samples as f64));
    }
    let finite = !parcel.checks || real::are_numbers(means);
    let slots = parcel.squares_of.iter().cloned();
    let squares = match parcel.keep {
        Keep::Whole => slots.map(|slot| norm::squares(&values[slot])).collect(),
        Keep::Part => {
            let mut digests = Vec::new();
            for slot in slots {
                let held = common(&slot, &own);
                let within = held.start - slot.start..held.end - slot.start;
                norm::digest(&values[held], within, slot.len(), &mut digests);
            }
            digests
        }
    };
    (finite, squares)
}

/// What two ranges share; where they share nothing, an empty range at an end of the first.
pub(crate) fn common(slot: &Range<usize>, own: &Range<usize>) -> Range<usize> {
    let start = own.start.clamp(slot.start, slot.end);
    start..own.end.clamp(start, slot.end)
}
