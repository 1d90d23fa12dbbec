//! `bench simulate`: plans in virtual time, among more ranks than the machine has; and
//! the proof that virtual time is true, where it can be had.
use clap::Args;
use collectives::{
    Algorithm, Collective, CommunicatorConfig, DType, Partition, Parts, Place, ReduceOp, Route,
    Shape, simulated, transport::Link,
};

use super::{
    BenchError, Bytes, Job, RankCounts, Setting, Wire, header, measure,
    output::Output,
    spot::contenders,
    table::{Columns, short},
    wire::link,
};

/// What to simulate.
#[derive(Args, Clone, Debug)]
pub struct SimulateFlags {
    /// World sizes; 8..1024 doubles
    #[arg(long, default_value = "8..1024")]
    pub ranks: RankCounts,
    /// The time of a message without bytes, in microseconds
    #[arg(long, default_value = "10")]
    pub alpha: f64,
    /// What leaves a rank, in Gbit/s
    #[arg(long, default_value = "10")]
    pub beta: f64,
    /// Bytes of a rank's buffer; a list
    #[arg(long, value_delimiter = ',', default_value = "1K,1M,64M")]
    pub bytes: Vec<Bytes>,
    /// Compares with the `delayed` transport at 2, 4 and 8 ranks instead
    #[arg(long)]
    pub check: bool,
}

/// Simulates, or checks the simulation; true if it was near enough.
///
/// # Errors
///
/// [`BenchError::Usage`] if there is no such link.
pub fn simulate(flags: &SimulateFlags) -> Result<bool, BenchError> {
    let link = link(flags.alpha, flags.beta).ok_or_else(|| {
        BenchError::usage(
            "--alpha needs microseconds from 0 on, --beta Gbit/s above 0, 1e-9 at least",
        )
    })?;
    let out = Output::new(None)?;
    if flags.check {
        return check(&out);
    }
    let columns = Columns::new(
        [("ranks".to_owned(), 6)]
            .into_iter()
            .chain(
                Algorithm::ALL
                    .iter()
                    .map(|algorithm| (algorithm.name().to_owned(), 12)),
            )
            .chain([("fastest".to_owned(), 8)]),
    );
    for &bytes in &flags.bytes {
        out.say(format!(
            "# all_reduce of {bytes} of f32, {} us and {} Gbit/s a link, virtual time in us; \
             folding is free",
            flags.alpha, flags.beta
        ));
        out.say(columns.heading());
        for &ranks in &flags.ranks.0 {
            let times = Algorithm::ALL
                .iter()
                .map(|&algorithm| virtual_us(algorithm, ranks, bytes.0, link));
            let times: Vec<_> = times.collect();
            let all = times.iter().zip(Algorithm::ALL);
            let fastest = all
                .min_by(|a, b| a.0.total_cmp(b.0))
                .map_or("-", |(_, a)| a.name());
            let cells = [ranks.to_string()]
                .into_iter()
                .chain(times.iter().map(|&time| short(time)));
            out.say(columns.line(&cells.chain([fastest.to_owned()]).collect::<Vec<_>>()));
        }
        out.say("");
    }
    Ok(true)
}

/// The virtual time of an all_reduce, in microseconds.
fn virtual_us(algorithm: Algorithm, ranks: usize, bytes: usize, link: Link) -> f64 {
    let (dtype, config) = (DType::F32, CommunicatorConfig::new());
    let shape = Shape {
        collective: Collective::AllReduce,
        place: Place::new(0, ranks),
        root: 0,
        parts: Parts::Even(Partition::new(bytes / dtype.size(), ranks)),
        dtype,
        segment: (config.segment_kb << 10) / dtype.size(),
        piece: config.direct_piece,
        deterministic: config.deterministic,
        widens: false,
    };
    simulated::time(Route::new(algorithm, &shape), &shape, link).as_secs_f64() * 1e6
}

/// A link slow enough that nothing else counts: 1 MiB leaves in 8.4 ms, where this
/// machine copies and folds it in well under one.
const SLOW: (f64, f64) = (500.0, 1.0);
const CHECKED_BYTES: [usize; 3] = [64 << 10, 256 << 10, 1 << 20];

/// Measured over simulated. Below 1 a rank would be faster than its link: only the time
/// between two ranks' starts, and the clock, can show as that. Above 1 is what virtual
/// time leaves out: copies, folds, and a wake-up at every hop that comes up to 0.1 ms
/// late on a busy machine, against hops of 0.5 ms and more; a third of a hop is allowed.
const BOUND: (f64, f64) = (0.97, 1.33);

fn check(out: &Output) -> Result<bool, BenchError> {
    let (alpha, beta) = SLOW;
    let Some(link) = link(alpha, beta) else {
        return Err(BenchError::usage("there is no such link"));
    };
    header::say(
        out,
        &format!(
            "simulated and measured over delayed:{alpha}:{beta}, all_reduce of f32, the shortest time"
        ),
        true,
    );
    let columns = Columns::new([
        ("ranks", 5),
        ("size", 6),
        ("algorithm", 9),
        ("simulated(us)", 13),
        ("measured(us)", 12),
        ("ratio", 6),
        ("", 4),
    ]);
    out.say(columns.heading());
    let configs = contenders(Algorithm::ALL);
    let mut good = true;
    for ranks in [2, 4, 8] {
        for bytes in CHECKED_BYTES {
            let job = Job::new(
                Collective::AllReduce,
                DType::F32,
                ReduceOp::Sum,
                0,
                bytes,
                ranks,
            );
            let setting = Setting {
                ranks,
                wire: Wire::Delayed(link),
                pinned: true,
                iterations: 5,
                warm_up: 1,
                checked: 1,
            };
            let measured = measure(&job, &setting, &configs)?;
            for (measured, &algorithm) in measured.iter().zip(Algorithm::ALL) {
                let simulated = virtual_us(algorithm, ranks, bytes, link);
                let ratio = measured.times.min() / simulated;
                let near = (BOUND.0..=BOUND.1).contains(&ratio) && measured.holds();
                good &= near;
                out.say(columns.line(&[
                    ranks.to_string(),
                    Bytes(bytes).to_string(),
                    algorithm.to_string(),
                    short(simulated),
                    short(measured.times.min()),
                    format!("{ratio:.3}"),
                    if near { "ok" } else { "FAR" }.to_owned(),
                ]));
            }
        }
    }
    let (low, high) = BOUND;
    out.say(format!(
        "# bound {low} to {high}: skew and the clock below, copies, folds and late wake-ups above"
    ));
    Ok(good)
}
