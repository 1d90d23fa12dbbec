//! Which rows each rank trains on.
//!
//! The g-th global batch holds the same rows for every world size; the ranks share it out.
use collectives::{Partition, Place};

use crate::shards::Shards;
use crate::{Error, Result};

/// Deals the rows of a data set, global batch by global batch.
///
/// Every row is dealt once per epoch: the last global batch may be short, nothing is repeated to
/// fill it. Each global batch is cut over the ranks in balanced, contiguous parts. All ranks get
/// the same number of batches; a rank whose part is empty gets the batch's first row as a
/// stand-in with `samples = 0`, so that its forward pass has something to run on and its gradient
/// counts for nothing.
///
/// ```
/// use collectives::Place;
/// use ddp::DistributedSampler;
///
/// let place = Place { rank: 1, world: 2 };
/// let mut sampler = DistributedSampler::new(5, 4, place)?;
/// let batches: Vec<_> = sampler.epoch().collect();
/// assert_eq!((batches[0].rows.as_slice(), batches[0].samples), ([2, 3].as_slice(), 2));
/// assert_eq!((batches[1].rows.as_slice(), batches[1].samples), ([4].as_slice(), 0));
/// # Ok::<(), ddp::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct DistributedSampler {
    rows: usize,
    global_batch: usize,
    place: Place,
    shards: Option<Shards>,
    seed: Option<u64>,
    next_epoch: u64,
}

/// This rank's part of one global batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Rows to run forward on, at least one.
    pub rows: Vec<usize>,
    /// How many of them count: all, or 0 when the one row is a stand-in.
    pub samples: usize,
    /// Rows of each micro-shard, where there are any.
    shards: Vec<usize>,
}

impl Batch {
    fn new(rows: &[usize], stand_in: usize) -> Self {
        Self {
            rows: match rows {
                [] => vec![stand_in],
                rows => rows.to_vec(),
            },
            samples: rows.len(),
            shards: Vec::new(),
        }
    }

    /// This rank's [micro-shards](DistributedSampler::with_micro_shards) of the batch, in order:
    /// each with at least a stand-in to run on. Without micro-shards, the batch itself.
    pub fn micro_shards(&self) -> Vec<Self> {
        if self.shards.is_empty() {
            return vec![self.clone()];
        }
        self.pieces(self.shards.iter().copied())
    }

    /// The batch in `pieces` micro-batches, balanced, the larger first; at least one row each, so
    /// fewer pieces where rows are few.
    ///
    /// ```
    /// use collectives::Place;
    /// let alone = Place { rank: 0, world: 1 };
    /// let mut sampler = ddp::DistributedSampler::new(5, 5, alone)?;
    /// let batch = sampler.epoch().next().unwrap();
    /// let sizes: Vec<_> = batch.micro_batches(2).iter().map(|piece| piece.samples).collect();
    /// assert_eq!(sizes, [3, 2]);
    /// # Ok::<(), ddp::Error>(())
    /// ```
    pub fn micro_batches(&self, pieces: usize) -> Vec<Self> {
        let pieces = pieces.clamp(1, self.samples.max(1));
        let cut = Partition::new(self.samples, pieces);
        self.pieces((0..pieces).map(|piece| cut.range(piece).len()))
    }

    fn pieces(&self, lens: impl Iterator<Item = usize>) -> Vec<Self> {
        let mut rest = &self.rows[..self.samples];
        lens.map(|len| {
            let (piece, others) = rest.split_at(len);
            rest = others;
            Self::new(piece, self.rows[0])
        })
        .collect()
    }
}

impl DistributedSampler {
    /// Deals `rows` rows in their own order, `global_batch` of them per step over all ranks.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if `rows` or `global_batch` is 0.
    pub fn new(rows: usize, global_batch: usize, place: Place) -> Result<Self> {
        for (name, value) in [("rows", rows), ("global_batch", global_batch)] {
            if value == 0 {
                let (value, expected) = (value.to_string(), "at least 1");
                return Err(Error::Config {
                    name,
                    value,
                    expected,
                });
            }
        }
        Ok(Self {
            rows,
            global_batch,
            place,
            shards: None,
            seed: None,
            next_epoch: 0,
        })
    }

    /// Cuts every global batch into `shards` balanced micro-shards first, and deals the ranks runs
    /// of those: which rows make up a shard does not depend on the world size. 0 cuts nothing.
    ///
    /// ```
    /// use collectives::Place;
    /// use ddp::DistributedSampler;
    ///
    /// let place = Place { rank: 1, world: 2 };
    /// let mut sampler = DistributedSampler::new(8, 8, place)?.with_micro_shards(4)?;
    /// let batch = sampler.epoch().next().unwrap();
    /// let shards: Vec<_> = batch.micro_shards().into_iter().map(|shard| shard.rows).collect();
    /// assert_eq!(shards, [[4, 5], [6, 7]]);
    /// # Ok::<(), ddp::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if there are fewer shards than ranks.
    pub fn with_micro_shards(self, shards: usize) -> Result<Self> {
        let shards = match shards {
            0 => None,
            _ => Some(Shards::new(shards, self.place)?),
        };
        Ok(Self { shards, ..self })
    }

    /// Shuffles every epoch anew, by a permutation that is a function of `(seed, epoch)` alone.
    pub fn with_shuffle(self, seed: u64) -> Self {
        Self {
            seed: Some(seed),
            ..self
        }
    }

    /// Deals the rows in their own order, every epoch.
    pub fn without_shuffle(self) -> Self {
        Self { seed: None, ..self }
    }

    /// The next call of [`epoch`](Self::epoch) deals epoch `epoch`. To resume within it, `skip`
    /// the batches already done.
    pub fn set_epoch(&mut self, epoch: u64) {
        self.next_epoch = epoch;
    }

    /// Steps of one epoch, the same on all ranks.
    pub fn steps(&self) -> usize {
        self.rows.div_ceil(self.global_batch)
    }

    /// This rank's batches of the next epoch, the first of which is epoch 0.
    pub fn epoch(&mut self) -> impl Iterator<Item = Batch> + use<> {
        let epoch = self.next_epoch;
        self.next_epoch += 1;
        let order: Vec<usize> = match self.seed {
            Some(seed) => shuffled(self.rows, seed, epoch),
            None => (0..self.rows).collect(),
        };
        let (global_batch, place, shards) = (self.global_batch, self.place, self.shards);
        (0..self.steps()).map(move |step| {
            let end = order.len().min((step + 1) * global_batch);
            let global = &order[step * global_batch..end];
            let Some(shards) = shards else {
                let part = Partition::new(global.len(), place.world).range(place.rank);
                return Batch::new(&global[part], global[0]);
            };
            let cut = Partition::new(global.len(), shards.count());
            let lens = shards.own().map(|shard| cut.range(shard).len());
            Batch {
                shards: lens.collect(),
                ..Batch::new(&global[cut.span(shards.own())], global[0])
            }
        })
    }
}

/// Fisher and Yates' shuffle, drawing from SplitMix64.
fn shuffled(rows: usize, seed: u64, epoch: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..rows).collect();
    // Mixed first, so that neighbouring seeds and epochs do not walk the same stream.
    let mut random = SplitMix64(mix(mix(seed) ^ epoch));
    for last in (1..rows).rev() {
        order.swap(last, random.below(last + 1));
    }
    order
}

/// SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014,
/// with the constants of Vigna's public-domain <https://prng.di.unimi.it/splitmix64.c>.
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Below `bound`, by the high half of a product; its bias, under bound / 2^64, is not corrected.
    fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }
}

fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::SplitMix64;

    /// First outputs of Vigna's splitmix64.c started at 1234567.
    #[test]
    fn the_generator_is_splitmix64() {
        let mut random = SplitMix64(1_234_567);
        let expected = [
            6457827717110365317,
            3203168211198807973,
            9817491932198370423,
        ];
        assert_eq!(expected.map(|_| random.next()), expected);
    }
}
