//! The global norm of the gradients, in an order that depends on the parameters alone.
//!
//! Where each rank holds a part, it says of its part what the others need to go on in that same
//! order, a [`digest`]: sums over whole blocks, as far up the tree as they go, and the elements of
//! the blocks that a cut goes through. That is less than two blocks and 2 log2 of the whole ones.
use std::ops::Range;

use crate::real::Real;
use crate::shards::Sum;

/// Elements that are summed straight on, in [`LANES`] at a time. A constant, and no tuning knob: it
/// is part of the order of the sum.
const BLOCK: usize = 1024;

/// Independent sums within a block, as many as keep a core's adders busy.
const LANES: usize = 8;

/// The sum of squares, in f64: blocks of [`BLOCK`] elements, then the tree over blocks. The square
/// of an f32 is exact.
pub(crate) fn squares<T: Real>(values: &[T]) -> f64 {
    let mut sum = Sum::default();
    for (at, block) in values.chunks(BLOCK).enumerate() {
        sum.push(at, squares_of_block(block), |left, right| *left += right);
    }
    sum.finish(|left, right| *left += right).unwrap_or(0.0)
}

fn squares_of_block<T: Real>(block: &[T]) -> f64 {
    let square = |value: &T| value.to_f64() * value.to_f64();
    let (rows, rest) = block.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for row in rows {
        for (lane, value) in lanes.iter_mut().zip(row) {
            *lane += square(value);
        }
    }
    lanes.iter().sum::<f64>() + rest.iter().map(square).sum::<f64>()
}

/// How a part of a parameter lies to its blocks.
struct Cut {
    /// Elements of the block that the part begins in the middle of.
    head: Range<usize>,
    /// Whole blocks.
    blocks: Range<usize>,
    /// Elements of the block that it leaves unfinished.
    tail: Range<usize>,
}

impl Cut {
    /// Of the part `own` of a parameter of `len` elements.
    fn new(own: &Range<usize>, len: usize) -> Self {
        let first = own.start.div_ceil(BLOCK);
        let end = match own.end == len {
            true => len.div_ceil(BLOCK),
            false => own.end / BLOCK,
        };
        if end <= first {
            return Self {
                head: own.clone(),
                blocks: 0..0,
                tail: own.end..own.end,
            };
        }
        Self {
            head: own.start..first * BLOCK,
            blocks: first..end,
            tail: (end * BLOCK).min(own.end)..own.end,
        }
    }

    /// The nodes of the tree that the whole blocks come to.
    fn nodes(&self) -> Vec<Range<usize>> {
        let mut sum = Sum::default();
        for block in self.blocks.clone() {
            sum.push(block, (), |(), ()| ());
        }
        sum.blocks()
    }
}

/// Appends to `digest` what stands for the squares of `values`, the part `own` of a parameter of
/// `len` elements.
pub(crate) fn digest<T: Real>(values: &[T], own: Range<usize>, len: usize, digest: &mut Vec<f64>) {
    let cut = Cut::new(&own, len);
    let of = |range: Range<usize>| &values[range.start - own.start..range.end - own.start];
    let mut sum = Sum::default();
    for block in cut.blocks.clone() {
        let block_values = of(block * BLOCK..((block + 1) * BLOCK).min(len));
        let squares = squares_of_block(block_values);
        sum.push(block, squares, |left, right| *left += right);
    }
    digest.extend(of(cut.head).iter().map(|value| value.to_f64()));
    digest.extend(sum.into_values());
    digest.extend(of(cut.tail).iter().map(|value| value.to_f64()));
}

/// How long the digest of the part `own` is.
pub(crate) fn digest_len(own: &Range<usize>, len: usize) -> usize {
    let cut = Cut::new(own, len);
    cut.head.len() + cut.nodes().len() + cut.tail.len()
}

/// The squares of a parameter of `len` elements, the same to the bit as [`squares`] of it, from the
/// digests of its parts, in order.
pub(crate) fn squares_of_digests<'a>(
    digests: impl IntoIterator<Item = (Range<usize>, &'a [f64])>,
    len: usize,
) -> f64 {
    let add = |left: &mut f64, right| *left += right;
    let mut sum = Sum::default();
    let (mut unfinished, mut block) = (Vec::new(), 0);
    for (own, digest) in digests {
        let cut = Cut::new(&own, len);
        let nodes = cut.nodes();
        let (head, rest) = digest.split_at(cut.head.len());
        let (sums, tail) = rest.split_at(nodes.len());
        // A part in the middle of a block may end there too, so the head may not complete it.
        for (elements, whole) in [(head, nodes), (tail, Vec::new())] {
            for &element in elements {
                unfinished.push(element);
                if unfinished.len() == BLOCK.min(len - block * BLOCK) {
                    sum.push(block, squares_of_block(&unfinished), add);
                    unfinished.clear();
                    block += 1;
                }
            }
            for (node, &squares) in whole.into_iter().zip(sums) {
                block = node.end;
                sum.push_block(node, squares, add);
            }
        }
    }
    sum.finish(add).unwrap_or(0.0)
}

/// The norm over all parameters, given the squares of each in visiting order.
pub(crate) fn global(squares: impl IntoIterator<Item = f64>) -> f64 {
    let mut sum = Sum::default();
    for (at, squares) in squares.into_iter().enumerate() {
        sum.push(at, squares, |left, right| *left += right);
    }
    sum.finish(|left, right| *left += right)
        .unwrap_or(0.0)
        .sqrt()
}

/// What gradients of that norm are multiplied by so that it is at most `most`; PyTorch's
/// `clip_grad_norm_`, down to its 1e-6.
pub(crate) fn clip(norm: f64, most: f64) -> Option<f64> {
    let factor = most / (norm + 1e-6);
    (factor < 1.0).then_some(factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_are_summed_exactly() {
        for len in [0, 1, 7, 8, 1023, 1024, 1025, 5000] {
            let values: Vec<f32> = (0..len).map(|at| (at % 100) as f32).collect();
            let expected: u64 = (0..len).map(|at| (at as u64 % 100).pow(2)).sum();
            assert_eq!(squares(&values), expected as f64);
        }
        assert_eq!(global([9.0, 0.0, 16.0]), 5.0);
    }

    #[test]
    fn digests_of_parts_give_the_bits_of_the_whole() {
        for len in [0, 1, 3, 1000, 1024, 1025, 2500, 7 * 1024, 12_345] {
            let values: Vec<f32> = (0..len)
                .map(|at| ((at * 7919) % 1000) as f32 / 999.0)
                .collect();
            for parts in 1..=9 {
                let cut = collectives::Partition::new(len, parts);
                let digests: Vec<_> = (0..parts)
                    .map(|part| {
                        let own = cut.range(part);
                        let mut of_part = Vec::new();
                        digest(&values[own.clone()], own.clone(), len, &mut of_part);
                        assert_eq!(of_part.len(), digest_len(&own, len));
                        assert!(of_part.len() < 2 * BLOCK + 8);
                        (own, of_part)
                    })
                    .collect();
                let digests = digests.iter().map(|(own, of)| (own.clone(), &of[..]));
                let together = squares_of_digests(digests, len);
                assert_eq!(
                    together.to_bits(),
                    squares(&values).to_bits(),
                    "{len} in {parts}"
                );
            }
        }
    }

    #[test]
    fn only_norms_above_the_limit_are_clipped() {
        assert_eq!(clip(0.5, 1.0), None);
        assert_eq!(clip(4.0, 1.0), Some(1.0 / 4.000_001));
        assert_eq!(clip(0.0, 1.0), None);
    }
}
