//! A bucket on its way: summed over the ranks, then divided, on the communication thread.
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use collectives::Communicator;

use crate::buffer::Buffer;
use crate::exchange;
use crate::hook::{BucketSums, CommHook, Values};
use crate::norm;
use crate::real::Real;
use crate::reducer::Totals;
use crate::shards::Shards;

/// What goes to the communication thread.
#[derive(Debug)]
pub(crate) struct Parcel {
    /// What this rank has added: one buffer, or its blocks where shards do not close.
    pub(crate) parts: Vec<Buffer>,
    /// Gradient elements, in front of the tail.
    pub(crate) gradients: usize,
    /// Where the sample total lies, in the first bucket.
    pub(crate) totals_at: Option<Range<usize>>,
    pub(crate) totals: Arc<OnceLock<Totals>>,
    /// Whether sums are to become means.
    pub(crate) divides: bool,
    /// The slots whose squares are wanted.
    pub(crate) squares_of: Vec<Range<usize>>,
    pub(crate) shards: Option<Shards>,
    pub(crate) hook: Arc<dyn CommHook>,
}

/// What comes back.
#[derive(Debug)]
pub(crate) struct Arrived {
    /// Means, and the tail as it was summed.
    pub(crate) values: Buffer,
    /// Memory that is no longer needed.
    pub(crate) spare: Vec<Buffer>,
    /// Whether all means are numbers.
    pub(crate) finite: bool,
    /// Sums of squares of the slots asked for.
    pub(crate) squares: Vec<f64>,
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
        let mut spare = std::mem::take(&mut self.parts);
        let mut values = spare.remove(0);
        let algorithm;
        if let Some(shards) = self.shards.filter(|shards| !shards.is_closed()) {
            algorithm = "blocks".to_owned();
            match &mut values {
                Buffer::F32(values) => {
                    let others = spare.iter().filter_map(Buffer::as_f32);
                    exchange::all_reduce_blocks(values, others, shards, communicator)?;
                }
                Buffer::F64(values) => {
                    let others = spare.iter().filter_map(Buffer::as_f64);
                    exchange::all_reduce_blocks(values, others, shards, communicator)?;
                }
            }
        } else {
            let view = match &mut values {
                Buffer::F32(values) => Values::F32(values),
                Buffer::F64(values) => Values::F64(values),
            };
            let at = self.totals_at.clone();
            let mut sums = BucketSums::new(view, self.gradients, at, &self.totals);
            self.hook.reduce(&mut sums, communicator)?;
            let route = communicator.last_route().filter(|_| self.hook.agrees());
            algorithm = route.map_or_else(|| "none".to_owned(), |route| route.to_string());
        }
        let (finite, squares) = match &mut values {
            Buffer::F32(values) => finish(values, &self),
            Buffer::F64(values) => finish(values, &self),
        };
        Ok(Arrived {
            values,
            spare,
            finite,
            squares,
            algorithm,
            start,
            end: Instant::now(),
        })
    }
}

/// Divides a bucket's sums by the sample total.
///
/// The first bucket brings the total; the stream is first in, first out, so the others find it.
fn finish<T: Real>(values: &mut [T], parcel: &Parcel) -> (bool, Vec<f64>) {
    if let Some(at) = parcel.totals_at.clone() {
        parcel.totals.get_or_init(|| Totals::read(&values[at]));
    }
    let samples = parcel.totals.get().map_or(0, |totals| totals.samples);
    let mut strange = 0u32;
    if samples > 0 {
        let samples = match parcel.divides {
            true => T::from_f64(samples as f64),
            false => T::from_f64(1.0),
        };
        for value in &mut values[..parcel.gradients] {
            *value /= samples;
            strange |= u32::from(!value.is_number());
        }
    }
    let squares = parcel.squares_of.iter().cloned();
    let squares = squares.map(|slot| norm::squares(&values[slot])).collect();
    (strange == 0, squares)
}
