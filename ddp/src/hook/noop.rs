//! No communication: what a step costs when reducing is free.
use collectives::Communicator;

use super::{BucketSums, CommHook};

/// Sends nothing: every rank steps by its own mean, and the replicas part. It shows the step time
/// that no way of reducing can beat.
#[derive(Clone, Copy, Debug, Default)]
pub struct Noop;

impl CommHook for Noop {
    fn name(&self) -> &'static str {
        "noop"
    }

    fn reduce(&self, _: &mut BucketSums<'_>, _: &mut Communicator) -> collectives::Result<()> {
        Ok(())
    }

    fn agrees(&self) -> bool {
        false
    }

    fn is_plain(&self) -> bool {
        true
    }
}
