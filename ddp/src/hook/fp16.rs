//! Half the bytes: gradients travel as IEEE half precision.
use collectives::{Communicator, f16};

use super::{BucketSums, CommHook, compress};

/// Sends gradients as IEEE half precision: half the bytes of f32 and 11 bits of mantissa, so that
/// each mean is off by up to 2^-12 of its size for what each rank sends, and once more for what
/// comes back. Above 65,504 a gradient overflows, which shows as a step that is left out, and below
/// 2^-24 it vanishes. A rank sends its part of the mean times the world size: its own gradient, or
/// up to world size times that if it has more than its share of the samples. Ranks' numbers are
/// summed in f32. The tail, with the counts and the loss, travels as it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fp16Compress;

impl CommHook for Fp16Compress {
    fn name(&self) -> &'static str {
        "fp16"
    }

    fn reduce(
        &self,
        bucket: &mut BucketSums<'_>,
        communicator: &mut Communicator,
    ) -> collectives::Result<()> {
        compress(bucket, communicator, f16::from_f64, f16::to_f64)
    }
}
