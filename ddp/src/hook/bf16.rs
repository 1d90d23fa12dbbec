//! Half the bytes: gradients travel as bfloat16.
use collectives::{Communicator, bf16};

use super::{BucketSums, CommHook, compress};

/// Sends gradients as bfloat16: half the bytes of f32, its full range, and 8 bits of mantissa, so
/// that each mean is off by up to 2^-9 of its size for what each rank sends, and once more for
/// what comes back. The tail, with the counts and the loss, travels as it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bf16Compress;

impl CommHook for Bf16Compress {
    fn name(&self) -> &'static str {
        "bf16"
    }

    fn reduce(
        &self,
        bucket: &mut BucketSums<'_>,
        communicator: &mut Communicator,
    ) -> collectives::Result<()> {
        compress(bucket, communicator, bf16::from_f64, bf16::to_f64)
    }
}
