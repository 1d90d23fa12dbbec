//! The one way in which everything here is timed.
//!
//! Contenders take turns call by call (A B C A B C …), so that whatever else the
//! machine does meets them alike. Before each call every rank writes its buffer
//! anew and all meet at a gate; neither is timed. A call takes as long as its
//! slowest rank.
use std::time::Instant;

use collectives::{Collective, CommunicatorConfig, Route, Row, Stats};

use super::{
    BenchError, Job, Times, Wire,
    job::Buffers,
    numbers::{Number, Numbers, with_type},
    ranks::{self, Seat},
};

/// How often, among how many, over what.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setting {
    /// The ranks.
    pub ranks: usize,
    /// What joins them.
    pub wire: Wire,
    /// Whether rank `r` stays on core `r`, counting round and round.
    pub pinned: bool,
    /// Timed calls.
    pub iterations: usize,
    /// Calls before those.
    pub warm_up: usize,
    /// How many of the timed calls are checked, from the first on; the first always is.
    pub checked: usize,
}

/// What one contender did.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// The algorithm that really ran; none for single messages.
    pub route: Option<Route>,
    /// How long the calls took.
    pub times: Times,
    /// Wrong elements, over all ranks and checked calls.
    pub wrong: u64,
    /// Bytes that left the rank that sends most, in one call, as they were counted.
    pub sent: u64,
    /// The same by formula.
    pub formula: u64,
    /// Bytes by which counters and formulas differ, over all ranks, calls and directions.
    pub unforeseen: u64,
}

impl Measured {
    /// This and another round of the same.
    pub fn and(self, round: Self) -> Self {
        Self {
            times: self.times.and(round.times),
            wrong: self.wrong + round.wrong,
            unforeseen: self.unforeseen + round.unforeseen,
            ..round
        }
    }

    /// Whether every element checked was right and every byte foreseen.
    pub fn holds(&self) -> bool {
        self.wrong == 0 && self.unforeseen == 0
    }
}

/// Measures `job` by every contender; they answer in the order of their settings.
///
/// # Errors
///
/// The error nearest to the cause.
pub fn measure(
    job: &Job,
    setting: &Setting,
    contenders: &[CommunicatorConfig],
) -> Result<Vec<Measured>, BenchError> {
    if setting.warm_up.checked_add(setting.iterations).is_none() {
        return Err(BenchError::usage("-n and -w: nobody counts so many calls"));
    }
    let records = ranks::run(
        setting,
        contenders,
        |seat| with_type!(job.dtype, T => take_part::<T>(job, setting, seat)),
    )?;
    let by_contender = (0..contenders.len()).map(|contender| {
        let ranks: Vec<&Record> = records.iter().map(|rank| &rank[contender]).collect();
        gather(&ranks, setting.iterations)
    });
    Ok(by_contender.collect())
}

/// What one rank saw of one contender.
struct Record {
    times_us: Vec<f64>,
    wrong: u64,
    route: Option<Route>,
    row: Row,
}

fn take_part<T: Number>(
    job: &Job,
    setting: &Setting,
    seat: &mut Seat<'_>,
) -> Result<Vec<Record>, BenchError> {
    let Some(place) = seat.worlds.first().map(|world| world.place()) else {
        return Ok(vec![]);
    };
    let numbers = Numbers::<T>::new(job.op, setting.ranks);
    let mut buffers = Buffers::<T>::new(job, place, &numbers);
    let mut times_us = vec![vec![]; seat.worlds.len()];
    let mut wrong = vec![0; seat.worlds.len()];
    for call in 0..setting.warm_up + setting.iterations {
        for (contender, communicator) in seat.worlds.iter_mut().enumerate() {
            buffers.refresh();
            if !seat.gate.enter() {
                return Err(BenchError::Interrupted);
            }
            let start = Instant::now();
            buffers.call(job, communicator)?;
            let time = start.elapsed();
            if !seat.gate.leave() {
                return Err(BenchError::Interrupted);
            }
            if call < setting.warm_up {
                continue;
            }
            times_us[contender].push(time.as_secs_f64() * 1e6);
            if call - setting.warm_up < setting.checked.max(1) {
                wrong[contender] += buffers.wrong(&numbers);
            }
        }
    }
    let stats = seat.worlds.iter().map(|world| world.stats());
    Ok(stats
        .zip(times_us)
        .zip(wrong)
        .map(|((stats, times_us), wrong)| Record {
            times_us,
            wrong,
            route: route(stats, job.collective),
            row: stats.of(job.collective),
        })
        .collect())
}

fn route(stats: &Stats, collective: Collective) -> Option<Route> {
    stats.algorithms(collective).next()
}

/// From what each rank saw to what happened.
fn gather(ranks: &[&Record], iterations: usize) -> Measured {
    let slowest = |call: usize| {
        ranks
            .iter()
            .map(|rank| rank.times_us[call])
            .fold(0.0, f64::max)
    };
    let largest = |of: fn(&Row) -> u64| {
        let calls = |row: &Row| row.calls.max(1);
        ranks
            .iter()
            .map(|rank| of(&rank.row) / calls(&rank.row))
            .max()
            .unwrap_or(0)
    };
    Measured {
        route: ranks.first().and_then(|rank| rank.route),
        times: Times::new((0..iterations).map(slowest).collect()),
        wrong: ranks.iter().map(|rank| rank.wrong).sum(),
        sent: largest(|row| row.bytes_sent),
        formula: largest(|row| row.predicted_sent),
        unforeseen: ranks.iter().map(|rank| unforeseen(&rank.row)).sum(),
    }
}

fn unforeseen(row: &Row) -> u64 {
    row.bytes_sent.abs_diff(row.predicted_sent)
        + row.bytes_received.abs_diff(row.predicted_received)
}
