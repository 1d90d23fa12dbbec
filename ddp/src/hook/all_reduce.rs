//! The plain hook: one all-reduce a bucket.
use collectives::Communicator;

use super::{BucketSums, CommHook};

/// Sums every bucket as it is, tail and all, in one all-reduce. The default.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllReduce;

impl CommHook for AllReduce {
    fn name(&self) -> &'static str {
        "all_reduce"
    }

    fn reduce(
        &self,
        bucket: &mut BucketSums<'_>,
        communicator: &mut Communicator,
    ) -> collectives::Result<()> {
        bucket.all_reduce_to_means(communicator)
    }

    fn is_plain(&self) -> bool {
        true
    }
}
