//! Which numbers are this rank's: part r of every bucket belongs to rank r.
//!
//! Of each parameter a rank so has one piece, a range of its elements, which may be empty. Every
//! bucket is cut anew, so that all ranks work on each, and no number is padding.
use std::ops::Range;

use collectives::{Partition, Place};
use ddp::BucketPlan;

/// The cut of every bucket over the ranks.
#[derive(Clone, Debug)]
pub(crate) struct Pieces {
    plan: BucketPlan,
    place: Place,
}

/// One rank's piece of a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) bucket: usize,
    /// Where it lies in the rank's part of the bucket.
    pub(crate) in_part: Range<usize>,
    /// Which of the parameter's elements it is.
    pub(crate) in_slot: Range<usize>,
}

impl Pieces {
    pub(crate) fn new(plan: BucketPlan, place: Place) -> Self {
        Self { plan, place }
    }

    pub(crate) fn plan(&self) -> &BucketPlan {
        &self.plan
    }

    /// The part of `bucket` that belongs to `rank`.
    pub(crate) fn part_of(&self, rank: usize, bucket: usize) -> Range<usize> {
        Partition::new(self.plan.gradients_in(bucket), self.place.world).range(rank)
    }

    /// This rank's part.
    pub(crate) fn part(&self, bucket: usize) -> Range<usize> {
        self.part_of(self.place.rank, bucket)
    }

    pub(crate) fn place(&self) -> Place {
        self.place
    }

    /// This rank's piece of a slot.
    pub(crate) fn of(&self, slot: usize) -> Piece {
        self.of_rank(self.place.rank, slot)
    }

    /// The piece of `rank`.
    pub(crate) fn of_rank(&self, rank: usize, slot: usize) -> Piece {
        let (bucket, range) = self.plan.locate(slot);
        let part = self.part_of(rank, bucket);
        let start = part.start.clamp(range.start, range.end);
        let end = part.end.clamp(start, range.end);
        // Of a slot that lies beside the part nothing is left, wherever that nothing lies.
        let in_part = match start == end {
            true => 0..0,
            false => start - part.start..end - part.start,
        };
        Piece {
            bucket,
            in_part,
            in_slot: start - range.start..end - range.start,
        }
    }
}

impl Piece {
    pub(crate) fn len(&self) -> usize {
        self.in_slot.len()
    }
}

#[cfg(test)]
mod tests {
    use ddp::{Caps, Float, SlotSpec};

    use super::*;

    #[test]
    fn the_ranks_pieces_make_up_every_parameter_and_every_part() {
        let lens = [0, 1, 3, 10, 5, 64, 7, 2];
        let slots = lens.map(|len| SlotSpec {
            len,
            dtype: Float::F32,
        });
        let order: Vec<usize> = (0..lens.len()).rev().collect();
        for cap in [0, 40, 200, 1000] {
            let caps = Caps {
                first_bytes: cap,
                bucket_bytes: cap,
            };
            let plan = BucketPlan::new(&slots, &order, caps);
            for world in 1..=9 {
                let of = |rank| Pieces::new(plan.clone(), Place { rank, world });
                for (slot, len) in lens.into_iter().enumerate() {
                    let mut next = 0;
                    for rank in 0..world {
                        let piece = of(rank).of(slot);
                        assert_eq!(piece.in_part.len(), piece.len());
                        if piece.len() > 0 {
                            assert_eq!(piece.in_slot.start, next);
                            next = piece.in_slot.end;
                        }
                    }
                    assert_eq!(next, len);
                }
                for rank in 0..world {
                    for bucket in 0..plan.len() {
                        let covered = plan.slots_in(bucket).iter();
                        let covered: usize = covered.map(|&slot| of(rank).of(slot).len()).sum();
                        assert_eq!(covered, of(rank).part(bucket).len());
                    }
                }
            }
        }
    }
}
