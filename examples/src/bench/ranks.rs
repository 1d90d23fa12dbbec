//! Ranks as threads, each in several worlds at once: one for every contender of a
//! comparison, so that all are measured by turns in the same threads.
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    thread,
};

use collectives::{Communicator, CommunicatorConfig};

use super::{
    BenchError, Setting,
    gate::{Gate, Member},
    pin::pin,
};

/// One rank's ends of all worlds, in the order of their settings.
pub(super) struct Seat<'a> {
    pub(super) gate: &'a Gate,
    pub(super) worlds: Vec<Communicator>,
    _member: Member<'a>,
}

/// Runs `body` on a thread for each rank of `setting` and gives what they returned, by
/// rank; or the error nearest to the cause.
pub(super) fn run<R: Send>(
    setting: &Setting,
    contenders: &[CommunicatorConfig],
    body: impl Fn(&mut Seat<'_>) -> Result<R, BenchError> + Sync,
) -> Result<Vec<R>, BenchError> {
    let (world, wire) = (setting.ranks, setting.wire);
    let gate = Gate::new(world);
    let mut ends: Vec<Vec<Communicator>> = (0..world).map(|_| vec![]).collect();
    for config in contenders {
        for (worlds, link) in ends.iter_mut().zip(wire.mesh(world)) {
            worlds.push(Communicator::new(link, config)?);
        }
    }
    let outcomes: Vec<Result<R, BenchError>> = thread::scope(|scope| {
        let threads: Vec<_> = ends
            .into_iter()
            .enumerate()
            .map(|(rank, worlds)| {
                let (gate, body) = (&gate, &body);
                let member = gate.member();
                let run = move || {
                    if setting.pinned {
                        pin(rank);
                    }
                    let mut seat = Seat {
                        gate,
                        worlds,
                        _member: member,
                    };
                    catch_unwind(AssertUnwindSafe(|| body(&mut seat))).unwrap_or_else(|panic| {
                        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
                        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
                        let message = text.unwrap_or_else(|| "no message".to_owned());
                        Err(BenchError::Panicked { rank, message })
                    })
                };
                let builder = thread::Builder::new().name(format!("rank {rank}"));
                builder
                    .spawn_scoped(scope, run)
                    .map_err(|source| BenchError::Thread { rank, source })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread?.join().unwrap_or(Err(BenchError::Interrupted)))
            .collect()
    });
    let (results, failures): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Result::is_ok);
    let failures = failures.into_iter().filter_map(Result::err);
    match failures.min_by_key(distance) {
        Some(failure) => Err(failure),
        None => Ok(results.into_iter().flatten().collect()),
    }
}

/// How far an error is from the cause, nearest first.
fn distance(error: &BenchError) -> u8 {
    match error {
        BenchError::Panicked { .. } => 0,
        BenchError::Interrupted => 3,
        BenchError::Collective(error) | BenchError::Training(ddp::Error::Collective(error))
            if error.is_secondary() =>
        {
            2
        }
        _ => 1,
    }
}
