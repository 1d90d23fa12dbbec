//! What listeners of `tracing` get to see.
//!
//! Where nobody listens a call costs about ten nanoseconds more (2 cores, 2026-11-30).
use tracing::{Span, dispatcher, field, info_span, subscriber::NoSubscriber};

use crate::{Collective, Fingerprint, Traffic};

/// The span of one call on `rank`: named by the operation, as the name of a span is static.
///
/// Its bytes are those that leave this rank, by formula; `call` is the call's number, the
/// same on all ranks.
pub(crate) fn call(rank: usize, fingerprint: &Fingerprint, predicted: Traffic) -> Span {
    macro_rules! named {
        ($name:literal) => {
            info_span!(
                target: "lockstep",
                $name,
                rank,
                algorithm = fingerprint.algorithm.map(field::display),
                bytes = predicted.sent,
                call = fingerprint.seq,
            )
        };
    }
    match fingerprint.call.collective {
        Collective::AllReduce => named!("all_reduce"),
        Collective::Reduce => named!("reduce"),
        Collective::Broadcast => named!("broadcast"),
        Collective::AllGather => named!("all_gather"),
        Collective::ReduceScatter => named!("reduce_scatter"),
        Collective::Gather => named!("gather"),
        Collective::Scatter => named!("scatter"),
        Collective::AllToAll => named!("all_to_all"),
        Collective::Split => named!("split"),
        Collective::Barrier => named!("barrier"),
        Collective::SendRecv => named!("send/recv"),
    }
}

/// `body`, to be run on a new thread with the subscriber of the one that starts it, which
/// may have been set for that thread alone.
pub(crate) fn inherit<R>(body: impl FnOnce() -> R) -> impl FnOnce() -> R {
    let listener = dispatcher::get_default(|listener| {
        // A scoped subscriber, even one that wants nothing, slows every span of its thread.
        (!listener.is::<NoSubscriber>()).then(|| listener.clone())
    });
    move || match listener {
        Some(listener) => dispatcher::with_default(&listener, body),
        None => body(),
    }
}
