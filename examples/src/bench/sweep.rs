//! `bench all_reduce` and its like: one collective over sizes, types, operations,
//! algorithms and ranks, with nccl-tests' options and columns.
use std::{num::NonZeroUsize, path::PathBuf};

use clap::Args;
use collectives::{Algorithm, Choice, Collective, CommunicatorConfig, DType, ReduceOp};

use super::{
    BenchError, Bytes, Choices, DTypes, Job, Machine, Next, RankCounts, ReduceOps, Row, Setting,
    Wire, header, measure, output::Output, row::name, size::sizes,
};

/// What to measure, and how.
#[derive(Args, Clone, Debug)]
pub struct SweepFlags {
    /// The smallest buffer, in bytes; K, M and G are understood
    #[arg(short = 'b', long, default_value = "1K")]
    pub min_bytes: Bytes,
    /// The largest buffer
    #[arg(short = 'e', long, default_value = "16M")]
    pub max_bytes: Bytes,
    /// Each buffer is so many times larger than the last
    #[arg(short = 'f', long, default_value = "4", conflicts_with = "step_bytes")]
    pub step_factor: NonZeroUsize,
    /// Each buffer is so many bytes larger than the last
    #[arg(short = 'i', long)]
    pub step_bytes: Option<Bytes>,
    /// Timed calls of each kind
    #[arg(short = 'n', long, default_value = "20")]
    pub iters: NonZeroUsize,
    /// Calls before those
    #[arg(short = 'w', long, default_value = "5")]
    pub warmup_iters: usize,
    /// How many timed calls are checked element by element; the first always is
    #[arg(short = 'c', long, default_value = "1")]
    pub check: usize,
    /// sum, mean (or avg), min, max, product, and, or, xor; a list, or all [default: sum]
    #[arg(short = 'o', long)]
    pub op: Option<ReduceOps>,
    /// f32, f64, f16, bf16, i32, i64, u8, u32, u64; a list, or all
    #[arg(short = 'd', long, default_value = "f32")]
    pub datatype: DTypes,
    /// The rank at the root, where there is one
    #[arg(short = 'r', long, default_value = "0")]
    pub root: usize,
    /// World sizes, each in turn: 2,4,8
    #[arg(long, default_value = "2")]
    pub ranks: RankCounts,
    /// naive, tree, ring, halving, direct, auto; a list, or all [default: all]
    #[arg(long)]
    pub algorithm: Option<Choices>,
    /// One order for every sum, whatever the algorithm
    #[arg(long)]
    pub deterministic: bool,
    /// The most KiB in one message [default: that of the communicator]
    #[arg(long)]
    pub segment_kb: Option<usize>,
    /// Leaves it to the system on which cores ranks run; else rank r stays on core r
    #[arg(long)]
    pub unpinned: bool,
    /// local, or delayed:LATENCY_US:GBIT
    #[arg(long, default_value = "local")]
    pub transport: Wire,
    /// Measures the machine too, and shows all_reduce of f32 as a share of its limit
    #[arg(long)]
    pub limit: bool,
    /// Writes a JSON object for each line; - is standard output, and then nothing else
    /// goes there
    #[arg(short = 'J', long)]
    pub json: Option<PathBuf>,
}

/// Measures `collective`; true if nothing was wrong.
///
/// # Errors
///
/// [`BenchError::Usage`] if the flags do not go together.
pub fn sweep(collective: Collective, flags: &SweepFlags) -> Result<bool, BenchError> {
    let kinds = kinds(collective, flags)?;
    let choices = choices(collective, flags)?;
    let next = match flags.step_bytes {
        Some(Bytes(step)) => Next::Step(
            NonZeroUsize::new(step).ok_or_else(|| BenchError::usage("-i needs at least 1 byte"))?,
        ),
        None => Next::Factor(flags.step_factor),
    };
    let sizes = sizes(flags.min_bytes, flags.max_bytes, next).map_err(BenchError::Usage)?;
    flags.ranks.as_threads()?;
    for &ranks in &flags.ranks.0 {
        if flags.root >= ranks {
            return Err(BenchError::usage(format!(
                "-r {}: among {ranks} ranks, 0 to {} are allowed",
                flags.root,
                ranks - 1
            )));
        }
        if collective == Collective::SendRecv && ranks == 1 {
            return Err(BenchError::usage("sendrecv needs at least 2 ranks"));
        }
    }
    let configs: Vec<_> = choices
        .into_iter()
        .map(|choice| config(choice, flags))
        .collect();
    configs.iter().try_for_each(CommunicatorConfig::validate)?;
    let mut out = Output::new(flags.json.as_deref())?;
    let machine = flags.limit.then(Machine::measure);
    let mut good = true;
    for &ranks in &flags.ranks.0 {
        header::say(
            &out,
            &title(collective, ranks, flags, &configs[0]),
            !flags.unpinned,
        );
        out.say(Row::columns().heading());
        let setting = Setting {
            ranks,
            wire: flags.transport,
            pinned: !flags.unpinned,
            iterations: flags.iters.get(),
            warm_up: flags.warmup_iters,
            checked: flags.check,
        };
        for &(dtype, op) in &kinds {
            for bytes in &sizes {
                let job = Job::new(collective, dtype, op, flags.root, bytes.0, ranks);
                let measured = measure(&job, &setting, &configs)?;
                let limited = collective == Collective::AllReduce && dtype == DType::F32;
                let floor = machine.as_ref().filter(|_| limited);
                for measured in &measured {
                    let floor = floor.map(|machine| machine.floor_us(ranks, job.bytes()));
                    let row = Row::new(&job, ranks, measured, floor);
                    good &= measured.holds();
                    out.say(Row::columns().line(&row.cells()));
                    out.record(&row);
                }
            }
        }
    }
    out.say(match good {
        true => "# every checked element right, every byte foreseen",
        false => "# WRONG: see the last three columns",
    });
    Ok(good)
}

fn title(
    collective: Collective,
    ranks: usize,
    flags: &SweepFlags,
    config: &CommunicatorConfig,
) -> String {
    let order = if flags.deterministic {
        "  deterministic"
    } else {
        ""
    };
    format!(
        "{}  ranks {ranks}  transport {}  segments {} KiB{order}",
        name(collective),
        flags.transport,
        config.segment_kb,
    )
}

fn config(choice: Choice, flags: &SweepFlags) -> CommunicatorConfig {
    let config = CommunicatorConfig::new()
        .with_algorithm(choice)
        .with_deterministic(flags.deterministic);
    match flags.segment_kb {
        Some(segment_kb) => config.with_segment_kb(segment_kb),
        None => config,
    }
}

/// Types and operations; those that do not go together are left out of an `all` only.
fn kinds(collective: Collective, flags: &SweepFlags) -> Result<Vec<(DType, ReduceOp)>, BenchError> {
    let dtypes = &flags.datatype.0;
    let reduces = matches!(
        collective,
        Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter
    );
    if !reduces && flags.op.is_some() {
        return Err(BenchError::usage(format!(
            "{} folds nothing: leave out -o",
            name(collective)
        )));
    }
    let ops = match &flags.op {
        Some(ReduceOps(ops)) => ops.clone(),
        None => vec![ReduceOp::Sum],
    };
    let all = dtypes.len() == DType::ALL.len() || ops.len() == ReduceOp::ALL.len();
    let mut kinds = vec![];
    for &dtype in dtypes {
        for &op in &ops {
            match op.suits(dtype) {
                true => kinds.push((dtype, op)),
                false if all => {}
                false => {
                    let suiting = ReduceOp::ALL.iter().filter(|op| op.suits(dtype));
                    let names: Vec<_> = suiting.map(|op| op.name()).collect();
                    return Err(BenchError::usage(format!(
                        "no {op} of {dtype}; there are {}",
                        names.join(", ")
                    )));
                }
            }
        }
    }
    Ok(kinds)
}

fn choices(collective: Collective, flags: &SweepFlags) -> Result<Vec<Choice>, BenchError> {
    let planned = Collective::PLANNED.contains(&collective);
    match &flags.algorithm {
        Some(_) if !planned => Err(BenchError::usage(format!(
            "{} has no algorithm to choose: leave out --algorithm",
            name(collective)
        ))),
        Some(Choices(choices)) => Ok(choices.clone()),
        None if planned => Ok(Algorithm::ALL
            .iter()
            .map(|&algorithm| algorithm.into())
            .collect()),
        None => Ok(vec![Choice::Auto]),
    }
}
