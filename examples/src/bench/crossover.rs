//! `bench crossover`: which algorithm is fastest at which size, what each costs, and
//! from where the ring overtakes the others.
use std::{num::NonZeroUsize, path::PathBuf};

use clap::Args;
use collectives::{Algorithm, Collective, DType, ReduceOp, tuning::Cost};
use serde::Serialize;

use super::{
    BenchError, Bytes, Curve, Job, RankCounts, Row, Setting, Wire,
    crossings::{self, SEED_RANKS, SEED_SIZES},
    header,
    output::{self, Output},
    spot::{Spot, contenders},
};

/// What to compare.
#[derive(Args, Clone, Debug)]
pub struct CrossoverFlags {
    /// World sizes, each in turn
    #[arg(long, default_value = "2,4,8")]
    pub ranks: RankCounts,
    /// The collectives: all_reduce, reduce, broadcast, all_gather, reduce_scatter
    #[arg(long, value_delimiter = ',', default_value = "all_reduce", value_parser = planned)]
    pub collective: Vec<Collective>,
    /// The smallest buffer
    #[arg(short = 'b', long, default_value = "1K")]
    pub min_bytes: Bytes,
    /// The largest
    #[arg(short = 'e', long, default_value = "16M")]
    pub max_bytes: Bytes,
    /// How often all sizes are gone through
    #[arg(long, default_value = "5")]
    pub rounds: NonZeroUsize,
    /// Timed calls of each kind in a round
    #[arg(short = 'n', long, default_value = "10")]
    pub iters: NonZeroUsize,
    /// Leaves it to the system on which cores ranks run; else rank r stays on core r
    #[arg(long)]
    pub unpinned: bool,
    /// local, or delayed:LATENCY_US:GBIT
    #[arg(long, default_value = "local")]
    pub transport: Wire,
    /// The tuning file to write; the picture goes beside it, as .svg
    #[arg(long, default_value = "target/lockstep/tuning.toml")]
    pub out: PathBuf,
    /// Writes a JSON object for each line of times; - is standard output alone
    #[arg(short = 'J', long)]
    pub json: Option<PathBuf>,
}

/// What a communicator reads as its tuning.
#[derive(Serialize)]
struct TuningFile<'a> {
    tuning: &'a [Cost],
}

/// Measures, fits and writes; true if nothing was wrong.
///
/// # Errors
///
/// [`BenchError::Usage`] if the flags do not go together.
pub fn crossover(flags: &CrossoverFlags) -> Result<bool, BenchError> {
    flags.ranks.as_threads()?;
    let (first, last) = (flags.min_bytes, flags.max_bytes);
    if first.0.max(DType::F32.size()) > last.0 {
        return Err(BenchError::usage(format!(
            "no sizes from {first} up to {last}: -b must not be above -e, nor -e below 4 bytes"
        )));
    }
    if flags.out.extension().is_some_and(|end| end == "svg") {
        return Err(BenchError::usage(
            "--out is the tuning file, and not .svg: the picture beside it has that name",
        ));
    }
    let mut out = Output::new(flags.json.as_deref())?;
    let mut spots = spots(flags);
    let what = format!(
        "every algorithm by turns, transport {}, {} rounds of {} calls",
        flags.transport, flags.rounds, flags.iters
    );
    header::say(&out, &what, !flags.unpinned);
    let setting = Setting {
        ranks: 1,
        wire: flags.transport,
        pinned: !flags.unpinned,
        iterations: flags.iters.get(),
        warm_up: 3,
        checked: 1,
    };
    let contenders = contenders(Algorithm::ALL);
    for _ in 0..flags.rounds.get() {
        for spot in &mut spots {
            spot.measure(setting, &contenders)?;
        }
    }
    let mut good = true;
    for spot in &spots {
        for measured in &spot.measured {
            good &= measured.holds();
            out.record(&Row::new(&spot.job, spot.ranks, measured, None));
        }
    }
    let curves = curves(&spots);
    crossings::say(&out, &spots, &curves);
    let costs: Vec<_> = curves.iter().map(Curve::cost).collect();
    let note = format!(
        "# Costs of algorithms, as `bench crossover` fitted them to the shortest times over {}.\n\
         # Part of a communicator's settings: `auto` goes by it.\n\n",
        flags.transport
    );
    let tuning = toml::to_string(&TuningFile { tuning: &costs })?;
    output::write(&flags.out, &(note + &tuning))?;
    let picture = flags.out.with_extension("svg");
    output::write(&picture, &crossings::draw(&curves))?;
    let (costs, picture) = (flags.out.display(), picture.display());
    out.say(format!("\n# costs in {costs}, picture in {picture}"));
    if !good {
        out.say("# WRONG elements or bytes: see -J");
    }
    Ok(good)
}

/// Sizes that double, for every collective and world; and those of the seed.
fn spots(flags: &CrossoverFlags) -> Vec<Spot> {
    let first = flags.min_bytes.0.max(DType::F32.size());
    let doubled = std::iter::successors(Some(first), |bytes| bytes.checked_mul(2));
    let sizes: Vec<_> = doubled
        .take_while(|&bytes| bytes <= flags.max_bytes.0)
        .collect();
    let mut spots = vec![];
    for &collective in &flags.collective {
        let seeded = collective == Collective::AllReduce;
        let mut worlds = flags.ranks.0.clone();
        worlds.extend(seeded.then_some(SEED_RANKS));
        worlds.sort_unstable();
        worlds.dedup();
        for ranks in worlds {
            let mut all = vec![];
            if flags.ranks.0.contains(&ranks) {
                all.extend(&sizes);
            }
            if seeded && ranks == SEED_RANKS {
                all.extend(SEED_SIZES);
            }
            all.sort_unstable();
            all.dedup();
            spots.extend(all.into_iter().map(|bytes| {
                let job = Job::new(collective, DType::F32, ReduceOp::Sum, 0, bytes, ranks);
                Spot::new(job, ranks)
            }));
        }
    }
    spots
}

/// One for each collective, world and algorithm, of the shortest times: what else the
/// machine does can only add to a time.
fn curves(spots: &[Spot]) -> Vec<Curve> {
    let together = |a: &Spot, b: &Spot| (a.job.collective, a.ranks) == (b.job.collective, b.ranks);
    let of = |spots: &[Spot]| {
        let (collective, ranks) = (spots[0].job.collective, spots[0].ranks);
        let curve = |(index, &algorithm): (usize, &Algorithm)| Curve {
            collective,
            ranks,
            algorithm,
            points: (spots.iter())
                .map(|spot| (spot.job.bytes(), spot.measured[index].times.min()))
                .collect(),
        };
        let curves = Algorithm::ALL.iter().enumerate().map(curve);
        curves.collect::<Vec<_>>()
    };
    spots.chunk_by(together).flat_map(of).collect()
}

/// A collective that algorithms plan, by its name.
fn planned(word: &str) -> Result<Collective, String> {
    let all = Collective::PLANNED;
    all.into_iter()
        .find(|collective| collective.name() == word)
        .ok_or_else(|| {
            let names = all.map(|collective| collective.name());
            format!(
                "no collective with algorithms is \"{word}\"; there are {}",
                names.join(", ")
            )
        })
}
