//! The global norm of the gradients, in an order that depends on the parameters alone.
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
    fn only_norms_above_the_limit_are_clipped() {
        assert_eq!(clip(0.5, 1.0), None);
        assert_eq!(clip(4.0, 1.0), Some(1.0 / 4.000_001));
        assert_eq!(clip(0.0, 1.0), None);
    }
}
