//! Buckets: gradients that travel together. Pure layout, no memory.
//!
//! Some facts ride along behind the gradients, so that they cost no collective of their own: the
//! sample total and the weighted loss in the tail of the first bucket, and in the tail of the last
//! one count per slot, of the backward passes that used it, and one of those that met something
//! that is no number.
use std::ops::Range;

/// Element type of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Float {
    /// 32 bits.
    F32,
    /// 64 bits.
    F64,
}

impl Float {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// `f32` or `f64`.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
        }
    }
}

/// Size of one slot: a parameter whose gradient is reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotSpec {
    /// Elements.
    pub len: usize,
    /// Element type.
    pub dtype: Float,
}

/// How full a bucket may get, in bytes of gradient. 0 puts every slot in a bucket of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Cap of the first bucket, so that the first all-reduce starts early.
    pub first_bytes: usize,
    /// Cap of the others; the first bucket obeys it too.
    pub bucket_bytes: usize,
}

/// Buckets that a model should fill at least: the last one is full only when the backward pass is
/// over, so one bucket for a whole model hides nothing.
///
/// 784-1024-1024-10 (7.1 MB of gradients) on 2 ranks and 2 cores, 2026-11-30: in 2 buckets, of which
/// the second was 7.1 MB, 37 % of the all-reduce time lay inside the backward pass; in 3, 54 %.
const FEWEST: usize = 4;

impl Caps {
    /// These caps for gradients of these `slots`: not above a quarter of them all, unless that would
    /// leave no room beside the largest, whose bias should travel with it.
    pub fn for_gradients(self, slots: &[SlotSpec]) -> Self {
        let bytes = |slot: &SlotSpec| slot.len * slot.dtype.bytes();
        let all: usize = slots.iter().map(bytes).sum();
        let largest = slots.iter().map(bytes).max().unwrap_or(0);
        let fair = all
            .div_ceil(FEWEST)
            .max(largest.saturating_add(self.first_bytes));
        Self {
            bucket_bytes: self.bucket_bytes.min(fair),
            ..self
        }
    }
}

/// Which slot goes into which bucket, and where in it.
///
/// A function of its arguments alone, so equal on all ranks. Slots are packed in the given order;
/// one bucket of each element type is open, and closes when the next slot of that type would not
/// fit. A slot larger than the cap gets a bucket of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketPlan {
    buckets: Vec<Layout>,
    places: Vec<(usize, Range<usize>)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Layout {
    dtype: Float,
    slots: Vec<usize>,
    elements: usize,
}

/// Elements in the tail of the first bucket: the limbs of the sample count, and the loss.
pub(crate) const TOTALS: usize = LIMBS + 1;

/// A sample count travels as this many limbs of [`LIMB_BITS`] bits.
pub(crate) const LIMBS: usize = 4;

/// Sums of 12-bit limbs over up to 4096 ranks stay below 2^24, so f32 carries them exactly.
pub(crate) const LIMB_BITS: usize = 12;

impl BucketPlan {
    /// Packs `slots` in `order`, which names each slot once.
    ///
    /// There is always at least one bucket, since the tails need one.
    ///
    /// # Panics
    ///
    /// If `order` is not a permutation of the slots.
    ///
    /// ```
    /// use ddp::{BucketPlan, Caps, Float, SlotSpec};
    /// let slots = [10, 20, 30].map(|len| SlotSpec { len, dtype: Float::F32 });
    /// let caps = Caps { first_bytes: 4 * 30, bucket_bytes: 4 * 100 };
    /// let plan = BucketPlan::new(&slots, &[2, 1, 0], caps);
    /// assert_eq!(plan.len(), 2);
    /// assert_eq!(plan.locate(2), (0, 0..30));
    /// assert_eq!(plan.locate(0), (1, 20..30));
    /// ```
    pub fn new(slots: &[SlotSpec], order: &[usize], caps: Caps) -> Self {
        assert_eq!(order.len(), slots.len(), "the order names every slot once");
        let mut places = vec![None; slots.len()];
        let mut buckets: Vec<Layout> = Vec::new();
        for &slot in order {
            let SlotSpec { len, dtype } = slots[slot];
            let cap = |index| match index {
                0 => caps.first_bytes.min(caps.bucket_bytes),
                _ => caps.bucket_bytes,
            };
            let open = buckets.iter().rposition(|open| open.dtype == dtype);
            let open = open.filter(|&open| {
                let cap = cap(open);
                cap > 0 && (buckets[open].elements + len) * dtype.bytes() <= cap
            });
            let index = open.unwrap_or_else(|| {
                buckets.push(Layout {
                    dtype,
                    slots: Vec::new(),
                    elements: 0,
                });
                buckets.len() - 1
            });
            let bucket = &mut buckets[index];
            let range = bucket.elements..bucket.elements + len;
            bucket.elements = range.end;
            bucket.slots.push(slot);
            let place = places[slot].replace((index, range));
            assert!(place.is_none(), "the order names slot {slot} twice");
        }
        if buckets.is_empty() {
            buckets.push(Layout {
                dtype: Float::F32,
                slots: Vec::new(),
                elements: 0,
            });
        }
        let places = places.into_iter().flatten().collect();
        Self { buckets, places }
    }

    /// Number of buckets, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "there is always a bucket")]
    pub fn len(&self) -> usize {
        self.buckets.len()
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.places.len()
    }

    /// The bucket of `slot`, and the slot's range in it.
    pub fn locate(&self, slot: usize) -> (usize, Range<usize>) {
        self.places[slot].clone()
    }

    /// The slots of `bucket`, in the order in which they lie in it.
    pub fn slots_in(&self, bucket: usize) -> &[usize] {
        &self.buckets[bucket].slots
    }

    /// Element type of `bucket`.
    pub fn dtype(&self, bucket: usize) -> Float {
        self.buckets[bucket].dtype
    }

    /// Gradient elements in `bucket`, without its tail.
    pub fn gradients_in(&self, bucket: usize) -> usize {
        self.buckets[bucket].elements
    }

    /// Elements of `bucket` as it is reduced: gradients and tail.
    pub fn elements(&self, bucket: usize) -> usize {
        let first = if bucket == 0 { TOTALS } else { 0 };
        let last = if bucket == self.len() - 1 {
            self.slots() + 1
        } else {
            0
        };
        self.buckets[bucket].elements + first + last
    }

    /// Elements of each bucket as it is reduced, the first to be reduced first.
    pub fn buckets(&self) -> Vec<usize> {
        (0..self.len())
            .map(|bucket| self.elements(bucket))
            .collect()
    }

    /// Bytes of `bucket` as it is reduced.
    pub fn bytes(&self, bucket: usize) -> usize {
        self.elements(bucket) * self.dtype(bucket).bytes()
    }

    /// Where the sample total and the weighted loss lie in the first bucket.
    pub fn totals(&self) -> Range<usize> {
        let start = self.buckets[0].elements;
        start..start + TOTALS
    }

    /// Where the last bucket counts, per slot, the backward passes that used it.
    pub fn used(&self) -> Range<usize> {
        let end = self.non_finite();
        end - self.slots()..end
    }

    /// Both counts together.
    pub(crate) fn counts(&self) -> Range<usize> {
        self.used().start..self.elements(self.len() - 1)
    }

    /// Where the last bucket counts those with a gradient or a loss that is no number, or so large that
    /// a sum may be none.
    pub fn non_finite(&self) -> usize {
        self.elements(self.len() - 1) - 1
    }
}
