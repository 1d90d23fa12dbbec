//! What a case should move, and whether it did.
use collectives::{Algorithm, Collective, Operator, Route};

use super::{Case, call::Ended};

/// Whether bytes were counted that no formula foresees, or more than the least.
pub(super) fn hold<T>(ended: &[Ended<T>], least: Option<f64>) -> Result<(), String> {
    for (rank, ended) in ended.iter().enumerate() {
        let (sent, formula) = (ended.moved.bytes_sent, ended.moved.predicted_sent);
        if sent != formula {
            return Err(format!(
                "rank {rank} sent {sent} bytes where the formula says {formula}"
            ));
        }
    }
    let total: u64 = ended.iter().map(|ended| ended.moved.bytes_sent).sum();
    let due = least.map(|least| least * ended.len() as f64);
    match due.filter(|due| (total as f64 - due).abs() > 0.5) {
        None => Ok(()),
        Some(due) => Err(format!(
            "all ranks sent {total} bytes where {due} are the least"
        )),
    }
}

/// What a rank sends on average by `route`, if that is the least there can be: no part
/// passes a link twice, and nothing travels wider than it is.
pub(super) fn least(case: &Case, route: Route) -> Option<f64> {
    let spare = |algorithm| {
        matches!(
            algorithm,
            Algorithm::Ring | Algorithm::Halving | Algorithm::Direct
        )
    };
    let wide = |op| Operator::Named(op).widens(case.dtype) && route.reduce != Algorithm::Direct;
    if !spare(route.reduce) || !spare(route.spread) || case.reduce.is_some_and(wide) {
        return None;
    }
    let (world, bytes) = (case.world as f64, (case.len * case.dtype.size()) as f64);
    match case.collective {
        Collective::AllReduce => Some(2.0 * bytes * (world - 1.0) / world),
        Collective::ReduceScatter => Some(bytes * (world - 1.0) / world),
        // The recording gives the length of a part.
        Collective::AllGather if case.counts.is_none() => Some(bytes * (world - 1.0)),
        _ => None,
    }
}
