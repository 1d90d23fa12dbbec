//! Half the bytes: gradients travel as IEEE half precision.
use collectives::{Communicator, f16};

use super::{BucketSums, CommHook, compress};

/// Sends gradients as IEEE half precision: half the bytes of f32 and 11 bits of mantissa, so that
/// each mean is off by up to 2^-12 of its size for what each rank sends, and once more for what
/// comes back. Gradients above 65,504 overflow, which shows as a step that is not finite; those
/// below 2^-24 vanish. Ranks' numbers are summed in f32, so that only what a rank sends and the
/// mean itself must be in range. The tail, with the counts and the loss, travels as it is.
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
