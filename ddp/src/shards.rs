//! One order of every sum, whatever the number of ranks: pure arithmetic, no Burn.
//!
//! A global batch is cut into V *micro-shards* that do not depend on the world size, and their sums
//! are added in the tree T(1) = leaf, T(n) = T(p) + T(n - p), p the largest power of two below n.
//! Rank r computes a run of shards and adds what it can; the ranks' sums continue the same tree. The
//! numbers are those of a single process to the bit: floating-point addition is a function of its
//! operands, so equal trees over equal leaves give equal sums.
//!
//! The split is that of Merkle trees in RFC 6962, section 2.1. Its nodes are the blocks
//! `[m 2^j, min((m + 1) 2^j, V))`, which is why aligned blocks are never wrong to add.
use std::ops::Range;

use collectives::{Partition, Place};

use crate::{Error, Result};

/// Which micro-shards of every global batch each rank computes: balanced runs, in rank order.
///
/// ```
/// use collectives::Place;
/// use ddp::Shards;
///
/// let shards = Shards::new(8, Place { rank: 1, world: 4 })?;
/// assert_eq!((shards.own(), shards.is_closed()), (2..4, true));
/// // Three ranks hold 3, 3 and 2 of 8: the tree has no node over the shards 0, 1 and 2.
/// let shards = Shards::new(8, Place { rank: 1, world: 3 })?;
/// assert_eq!((shards.own(), shards.is_closed()), (3..6, false));
/// assert_eq!(shards.blocks_of(1), [3..4, 4..6]);
/// # Ok::<(), ddp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shards {
    count: usize,
    place: Place,
}

impl Shards {
    /// Cuts `count` shards over the ranks.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] if there are fewer shards than ranks: a rank must have something to add.
    pub fn new(count: usize, place: Place) -> Result<Self> {
        if count < place.world {
            return Err(Error::Config {
                name: "micro_shards",
                value: count.to_string(),
                expected: "at least one for each rank, or 0 for none",
            });
        }
        Ok(Self { count, place })
    }

    /// V: the shards of a global batch.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The shards of this rank.
    pub fn own(&self) -> Range<usize> {
        self.of(self.place.rank)
    }

    /// The shards of `rank`.
    pub fn of(&self, rank: usize) -> Range<usize> {
        Partition::new(self.count, self.place.world).range(rank)
    }

    /// Whether each rank's shards close to one sum: their own tree is a node of the whole one, so
    /// that one vector a rank is enough. So it is if V / N is a power of two.
    ///
    /// If not, ranks exchange their [aligned blocks](Self::blocks_of) instead.
    pub fn is_closed(&self) -> bool {
        self.closes(0..self.place.world)
    }

    /// Whether the tree over these ranks' sums is the tree over their shards.
    fn closes(&self, ranks: Range<usize>) -> bool {
        if ranks.len() == 1 {
            return true;
        }
        let middle = ranks.start + split(ranks.len());
        let shards = self.of(ranks.start).start..self.of(ranks.end - 1).end;
        self.of(middle).start == shards.start + split(shards.len())
            && self.closes(ranks.start..middle)
            && self.closes(middle..ranks.end)
    }

    /// The fewest aligned blocks `[m 2^j, (m + 1) 2^j)` that make up the shards of `rank`: at most
    /// 2 log2 of their number, each a node of the tree.
    pub fn blocks_of(&self, rank: usize) -> Vec<Range<usize>> {
        let mut sum = Sum::default();
        for shard in self.of(rank) {
            sum.push(shard, (), |(), ()| ());
        }
        sum.blocks()
    }

    /// Partial sums of each bucket that wait, at most, while `rank` computes its next shard: up to
    /// log2 of its shards. So many times its buckets' bytes it holds beside them.
    ///
    /// ```
    /// let shards = |count| ddp::Shards::new(count, collectives::Place { rank: 0, world: 1 });
    /// assert_eq!(shards(1)?.partial_sums(0), 0);
    /// assert_eq!(shards(8)?.partial_sums(0), 3);
    /// # Ok::<(), ddp::Error>(())
    /// ```
    pub fn partial_sums(&self, rank: usize) -> usize {
        let own = self.of(rank);
        let mut sum = Sum::default();
        let waiting = (own.start..own.end.saturating_sub(1)).map(|shard| {
            sum.push(shard, (), |(), ()| ());
            sum.len()
        });
        waiting.max().unwrap_or(0)
    }

    /// Vectors that `rank` sends for each bucket: one, or its blocks.
    pub fn vectors_of(&self, rank: usize) -> usize {
        match self.is_closed() {
            true => 1,
            false => self.blocks_of(rank).len(),
        }
    }
}

/// The largest power of two below `n`, which is at least 2.
fn split(n: usize) -> usize {
    1 << (usize::BITS - 1 - (n - 1).leading_zeros())
}

/// A sum that is being made: the parts of T(V) that can be added so far.
///
/// A binary counter, as of one who adds as he goes and keeps at most one part of each size:
/// log2 of the leaves pushed, rounded up, and the leaf that comes.
#[derive(Debug)]
pub(crate) struct Sum<V>(Vec<Part<V>>);

/// A node of the tree: the sum of the leaves from `start` on, 2^`level` of them.
#[derive(Debug)]
struct Part<V> {
    start: usize,
    level: u32,
    value: V,
}

impl<V> Default for Sum<V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<V> Sum<V> {
    /// Adds the leaf `at`, the one after the last; `add` adds its second argument to its first.
    pub(crate) fn push(&mut self, at: usize, value: V, add: impl FnMut(&mut V, V)) {
        self.push_block(at..at + 1, value, add);
    }

    /// Adds a whole aligned block.
    pub(crate) fn push_block(
        &mut self,
        block: Range<usize>,
        value: V,
        mut add: impl FnMut(&mut V, V),
    ) {
        let mut right = Part {
            start: block.start,
            level: block.len().ilog2(),
            value,
        };
        while let Some(mut left) = self.0.pop_if(|left| left.is_left_twin_of(&right)) {
            add(&mut left.value, right.value);
            left.level += 1;
            right = left;
        }
        self.0.push(right);
    }

    /// Closes the right edge: left plus rest, from the right. None if nothing was pushed.
    pub(crate) fn finish(mut self, mut add: impl FnMut(&mut V, V)) -> Option<V> {
        let mut rest = self.0.pop()?.value;
        while let Some(mut left) = self.0.pop() {
            add(&mut left.value, rest);
            rest = left.value;
        }
        Some(rest)
    }

    /// Parts that wait for their twin.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// What each part covers.
    pub(crate) fn blocks(&self) -> Vec<Range<usize>> {
        let covers = |part: &Part<V>| part.start..part.start + (1 << part.level);
        self.0.iter().map(covers).collect()
    }

    /// The parts' values, from the left.
    pub(crate) fn into_values(self) -> Vec<V> {
        self.0.into_iter().map(|part| part.value).collect()
    }
}

impl<V> Part<V> {
    fn is_left_twin_of(&self, right: &Self) -> bool {
        self.level == right.level
            && self.start + (1 << self.level) == right.start
            && (self.start >> self.level).is_multiple_of(2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tree as text, by its definition.
    fn tree(leaves: Range<usize>) -> String {
        match leaves.len() {
            1 => leaves.start.to_string(),
            n => {
                let middle = leaves.start + split(n);
                let (left, right) = (tree(leaves.start..middle), tree(middle..leaves.end));
                format!("({left}+{right})")
            }
        }
    }

    fn add(left: &mut String, right: String) {
        *left = format!("({left}+{right})");
    }

    fn sum_of(shards: Range<usize>) -> Sum<String> {
        let mut sum = Sum::default();
        for shard in shards {
            sum.push(shard, shard.to_string(), add);
        }
        sum
    }

    #[test]
    fn ranks_add_up_to_the_tree_of_one_process_for_every_cut() {
        for count in 1..=64 {
            for world in 1..=count {
                let shards = |rank| Shards::new(count, Place { rank, world }).unwrap();
                let mut over_ranks = Sum::default();
                let mut over_blocks = Sum::default();
                for rank in 0..world {
                    let own = sum_of(shards(rank).own());
                    assert_eq!(own.blocks(), shards(rank).blocks_of(rank));
                    for (block, value) in own.blocks().into_iter().zip(own.into_values()) {
                        over_blocks.push_block(block, value, add);
                    }
                    let closed = sum_of(shards(rank).own()).finish(add).unwrap();
                    over_ranks.push(rank, closed, add);
                }
                let whole = tree(0..count);
                assert_eq!(over_blocks.finish(add).unwrap(), whole);
                let closed = over_ranks.finish(add).unwrap() == whole;
                assert_eq!(shards(0).is_closed(), closed, "{count} over {world}");
            }
        }
    }

    #[test]
    fn even_cuts_close_exactly_if_each_rank_has_a_power_of_two() {
        for world in 2..=64 {
            for each in 1..=64 {
                let place = Place { rank: 0, world };
                let shards = Shards::new(world * each, place).unwrap();
                assert_eq!(shards.is_closed(), each.is_power_of_two());
            }
        }
    }
}
