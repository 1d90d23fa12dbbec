//! `bench limit`: what the machine could do at best, and how near ring and tree come.
use std::{num::NonZeroUsize, path::PathBuf};

use clap::Args;
use collectives::{Algorithm, Collective, DType, ReduceOp};

use super::{
    BenchError, Bytes, Job, Machine, RankCounts, Row, Setting, Times, Wire,
    handed::handed_over,
    header,
    machine::{Kernel, WORKING_SETS},
    output::Output,
    spot::{Spot, contenders},
    table::{Columns, short},
};

/// What to hold against the limit.
#[derive(Args, Clone, Debug)]
pub struct LimitFlags {
    /// World sizes, each in turn
    #[arg(long, default_value = "2")]
    pub ranks: RankCounts,
    /// How often machine and collectives are measured by turns
    #[arg(long, default_value = "5")]
    pub rounds: NonZeroUsize,
    /// Timed calls of each kind in a round
    #[arg(short = 'n', long, default_value = "20")]
    pub iters: NonZeroUsize,
    /// Writes a JSON object for each line of times; - is standard output alone
    #[arg(short = 'J', long)]
    pub json: Option<PathBuf>,
}

const SIZES: [usize; 4] = [1 << 10, 1 << 20, 4 << 20, 16 << 20];

/// Measures both; true if nothing was wrong.
///
/// # Errors
///
/// [`BenchError::Usage`] if the flags do not go together.
pub fn limit(flags: &LimitFlags) -> Result<bool, BenchError> {
    flags.ranks.as_threads()?;
    let mut out = Output::new(flags.json.as_deref())?;
    let what = "the machine and all_reduce by turns, the best of";
    header::say(&out, &format!("{what} {} rounds", flags.rounds), true);
    let mut spots: Vec<_> = (flags.ranks.0.iter())
        .flat_map(|&ranks| SIZES.map(|bytes| Spot::new(job(bytes, ranks), ranks)))
        .collect();
    let setting = Setting {
        ranks: 1,
        wire: Wire::Local,
        pinned: true,
        iterations: flags.iters.get(),
        warm_up: 5,
        checked: 1,
    };
    let contenders = contenders(&[Algorithm::Ring, Algorithm::Tree]);
    let mut machine = Machine::measure();
    let mut handed = SIZES.map(|_| Times::default());
    for _ in 0..flags.rounds.get() {
        for spot in &mut spots {
            spot.measure(setting, &contenders)?;
        }
        for (times, bytes) in handed.iter_mut().zip(SIZES) {
            *times = std::mem::take(times).and(handed_over(bytes, flags.iters.get()));
        }
        machine = machine.and(Machine::measure());
    }
    say_machine(&out, &machine);
    if flags.ranks.0.contains(&2) {
        say_handed(&out, &machine, &handed);
    }
    let mut good = true;
    for spots in spots.chunk_by(|a, b| a.ranks == b.ranks) {
        say_floors(&out, &machine, spots[0].ranks);
        out.say(Row::columns().heading());
        for Spot {
            job,
            ranks,
            measured,
        } in spots
        {
            let floor = machine.floor_us(*ranks, job.bytes());
            for measured in measured {
                let row = Row::new(job, *ranks, measured, Some(floor));
                good &= measured.holds();
                out.say(Row::columns().line(&row.cells()));
                out.record(&row);
            }
        }
    }
    Ok(good)
}

fn say_floors(out: &Output, machine: &Machine, ranks: usize) {
    out.say(format!(
        "\n# all_reduce of f32, sum, ranks {ranks}; of limit: floor over the shortest time; \
         floor: one hand-over, and {} S bytes at the speed of a, b = a + b",
        2 * ranks
    ));
    for bytes in SIZES {
        let floor = machine.floor_us(ranks, bytes);
        let busbw = job(bytes, ranks).bus_factor(ranks) * bytes as f64 / floor * 1e-3;
        let (size, floor, busbw) = (Bytes(bytes), short(floor), short(busbw));
        out.say(format!("# floor of {size}: {floor} us, busbw {busbw} GB/s"));
    }
}

fn job(bytes: usize, ranks: usize) -> Job {
    Job::new(
        Collective::AllReduce,
        DType::F32,
        ReduceOp::Sum,
        0,
        bytes,
        ranks,
    )
}

fn say_machine(out: &Output, machine: &Machine) {
    let sizes = WORKING_SETS.map(|bytes| (Bytes(bytes).to_string(), 7));
    let headings = [
        ("GB/s, loads + stores".to_owned(), 20),
        ("threads".to_owned(), 7),
    ];
    let columns = Columns::new(headings.into_iter().chain(sizes));
    out.say("# working set for each thread, two arrays:");
    out.say(columns.heading());
    for kernel in Kernel::ALL {
        let rows: Vec<_> = machine
            .bandwidths
            .iter()
            .filter(|row| row.kernel == kernel)
            .collect();
        for rows in rows.chunk_by(|a, b| a.threads == b.threads) {
            let mut cells = vec![kernel.to_string(), rows[0].threads.to_string()];
            cells.extend(rows.iter().map(|row| short(row.best)));
            out.say(columns.line(&cells));
        }
    }
    let (min, median) = (machine.hand_over.min(), machine.hand_over.median());
    out.say(format!(
        "# hand-over between two threads through a channel, one way: {} us at best, {} in the median; \
         round trip {} and {}",
        short(min), short(median), short(2.0 * min), short(2.0 * median)
    ));
}

fn say_handed(out: &Output, machine: &Machine, handed: &[Times]) {
    out.say(
        "# no copies at all, two ranks: halves change hands through channels and come back summed",
    );
    for (times, bytes) in handed.iter().zip(SIZES) {
        let share = 100.0 * machine.floor_us(2, bytes) / times.min();
        let (min, median) = (short(times.min()), short(times.median()));
        out.say(format!(
            "#   {}: {min} us at best, {median} in the median; {share:.0} % of limit",
            Bytes(bytes)
        ));
    }
}
