//! One case, carried out here and compared.
use collectives::{Collective, Error, Operator, Partition, Route};
use sha2::{Digest, Sha256};

use super::{
    Case, Inputs, Outputs, Rule, Way, answer, bytes,
    call::{Ended, run},
    expected::{Side, gloo_ring, plain},
    inputs,
};
use crate::bench::numbers::{Number, with_type};

/// How a case went in one way.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// What was asked for.
    pub way: Way,
    /// What it was held to.
    pub rule: Rule,
    /// What really ran; none where an operation has no algorithm, or if nothing did.
    pub route: Option<Route>,
    /// The largest difference between an element and gloo's.
    pub difference: f64,
    /// Bytes that left all ranks, as counted.
    pub sent: u64,
    /// What a rank should send on average, where the algorithm's bytes are the least
    /// there can be: 2T(N-1)/N for an all_reduce of T bytes, T(N-1)/N for its halves.
    pub least: Option<f64>,
    /// What is wrong, if anything is.
    pub fault: Option<String>,
}

/// Carries out `case` in each way, and compares.
///
/// What cannot be compared, or compares badly, is a [fault](Outcome::fault). Inputs, and
/// what is due, are made once for all ways.
pub fn check(case: &Case, ways: &[Way]) -> Vec<Outcome> {
    with_type!(case.dtype, T => check_as::<T>(case, ways))
}

fn check_as<T: Number>(case: &Case, ways: &[Way]) -> Vec<Outcome> {
    let given = |rank: usize| match &case.inputs {
        Inputs::Elements(inputs) => inputs[rank].as_deref().map(elements),
        Inputs::Drawn(seed) => inputs(*seed, rank, case.dtype, case.len)
            .as_deref()
            .map(elements),
    };
    let inputs: Vec<Side<T>> = (0..case.world).map(given).collect();
    let due = due(case, &inputs);
    let by = |&way: &Way| {
        let mut outcome = Outcome {
            way,
            rule: Rule::of(case, way),
            route: None,
            difference: 0.0,
            sent: 0,
            least: None,
            fault: None,
        };
        outcome.fault = match &due {
            Ok(due) => hold(case, &inputs, due.as_deref(), &mut outcome).err(),
            Err(fault) => Some(fault.clone()),
        };
        outcome
    };
    ways.iter().map(by).collect()
}

/// What each rank is due; none if an error is.
fn due<T: Number>(case: &Case, inputs: &[Side<T>]) -> Result<Option<Vec<Side<T>>>, String> {
    match (answer(case), &case.refused) {
        (None, None) => recorded(case, inputs).map(Some),
        (Some(answer), Some(_)) => Ok((!answer.refused).then(|| plain(case, inputs))),
        (None, Some(gloo)) => Err(format!("no row says what we do, and gloo says {gloo}")),
        (Some(answer), None) => Err(format!("gloo does that: {}", answer.what)),
    }
}

/// What gloo gave to each rank.
fn recorded<T: Number>(case: &Case, inputs: &[Side<T>]) -> Result<Vec<Side<T>>, String> {
    match &case.outputs {
        Outputs::Elements(outputs) => Ok(outputs
            .iter()
            .map(|bytes| bytes.as_deref().map(elements))
            .collect()),
        Outputs::Hashes(hashes) => {
            let sums = gloo_ring(case, inputs);
            let digest = Sha256::digest(bytemuck::cast_slice::<T, u8>(&sums));
            let digits: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            match hashes.len() == case.world && hashes.iter().all(|hash| *hash == digits) {
                true => Ok(vec![Some(sums); case.world]),
                false => Err("a hash is not that of gloo's ring over the drawn inputs".to_owned()),
            }
        }
    }
}

/// Little-endian bytes, at any address, as elements.
fn elements<T: Number>(bytes: &[u8]) -> Vec<T> {
    bytes
        .chunks_exact(size_of::<T>())
        .map(bytemuck::pod_read_unaligned)
        .collect()
}

/// Carries the case out; says what is wrong first.
fn hold<T: Number>(
    case: &Case,
    inputs: &[Side<T>],
    due: Option<&[Side<T>]>,
    outcome: &mut Outcome,
) -> Result<(), String> {
    let ended = run(case, inputs, outcome.way).map_err(|error| error.to_string())?;
    let (ended, due) = match (ended, due) {
        (Ok(ended), Some(due)) => (ended, due),
        (Err(Error::Argument { .. }), None) => return Ok(()),
        (Ok(_), None) => return Err("carried out, and should be refused".to_owned()),
        (Err(error), None) => return Err(format!("not refused as an argument: {error}")),
        (Err(error), Some(_)) => return Err(error.to_string()),
    };
    outcome.route = ended[0].route;
    outcome.sent = ended.iter().map(|rank| rank.moved.bytes_sent).sum();
    outcome.least = outcome.route.and_then(|route| bytes::least(case, route));
    ran_as_asked(case, outcome.way, &ended)?;
    let mut held = Ok(());
    for (rank, (ours, theirs)) in ended.iter().map(|rank| &rank.output).zip(due).enumerate() {
        if rank > 0 && case.collective == Collective::AllReduce {
            if !same(ours, &ended[0].output) {
                return Err(format!("rank {rank} has other bits than rank 0"));
            }
            // Comparing bits is fast.
            if same(theirs, &due[0]) {
                continue;
            }
        }
        held = held.and(compare(case, inputs, rank, ours, theirs, outcome));
    }
    held.and_then(|()| bytes::hold(&ended, outcome.least))
}

/// Whether the algorithm that was asked for is the one that ran, on every rank.
fn ran_as_asked<T>(case: &Case, way: Way, ended: &[Ended<T>]) -> Result<(), String> {
    let widens = |op| Operator::Named(op).widens(case.dtype);
    // One order, or one rounding, may take the direct exchange; the route shows it.
    let may_differ = way.deterministic || case.reduce.is_some_and(widens);
    if may_differ || !Collective::PLANNED.contains(&case.collective) {
        return Ok(());
    }
    let asked = Some(way.algorithm.into());
    match ended.iter().find(|rank| rank.route != asked) {
        None => Ok(()),
        Some(other) => Err(format!("{:?} ran instead", other.route)),
    }
}

fn same<T: Number>(one: &Side<T>, other: &Side<T>) -> bool {
    let [one, other] = [one, other].map(|side| side.as_deref().map(bytemuck::cast_slice::<T, u8>));
    one == other
}

/// Compares one rank's result; says what is wrong with the first element that is.
fn compare<T: Number>(
    case: &Case,
    inputs: &[Side<T>],
    rank: usize,
    ours: &Side<T>,
    due: &Side<T>,
    outcome: &mut Outcome,
) -> Result<(), String> {
    let count = |side: &Side<T>| side.as_ref().map(Vec::len);
    if count(ours) != count(due) {
        let (got, due) = (count(ours), count(due));
        return Err(format!(
            "rank {rank} got {got:?} elements where {due:?} are due"
        ));
    }
    let start = match case.collective {
        Collective::ReduceScatter => Partition::new(case.len, case.world).range(rank).start,
        _ => 0,
    };
    let mut held = Ok(());
    let pairs = ours.iter().flatten().zip(due.iter().flatten());
    for (index, (ours, due)) in pairs.enumerate() {
        if bytemuck::bytes_of(ours) == bytemuck::bytes_of(due) {
            continue;
        }
        let (x, y) = (ours.value(), due.value());
        outcome.difference = outcome.difference.max((x - y).abs());
        let addends = inputs
            .iter()
            .flatten()
            .map(|input| input[start + index].value());
        if held.is_ok() && !outcome.rule.allows(case, addends, x, y) {
            held = Err(format!(
                "rank {rank}, element {index}: {ours:?} where gloo has {due:?}"
            ));
        }
    }
    held
}
