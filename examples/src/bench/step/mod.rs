//! `bench step`: what a training step costs by every way of taking it.
//!
//! Contenders take turns block by block: one step that does not count, then a few that do.
//! The order is turned round in every other round, so that nobody always follows the same
//! one. Ratios and differences are taken within a round, and of these the median: whatever
//! else the machine does meets both sides. All replicas live as long as the run.
mod contender;
mod outside;
mod processor;
mod replica;
mod rows;
mod target;

use std::{
    ffi::OsString,
    fs,
    num::NonZeroUsize,
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::Instant,
};

use clap::Args;
use collectives::{
    Communicator, CommunicatorConfig, Place,
    transport::{Local, Transport},
};

use self::{
    outside::{Outside, PATIENCE},
    processor::Spent,
    replica::{Replica, Seen, Training},
    rows::{Block, LeftOut, Measured, Table},
};
use super::{
    BenchError, Setting, Wire,
    gate::cores,
    output::Output,
    ranks::{self, Seat},
    table::short,
};

pub use contender::{Contender, NoContender};
pub use replica::StepOptimizer;
pub use rows::{StepRow, hidden_by_overlap};
pub use target::Verdict;

/// What to train, how, and how often.
#[derive(Args, Clone, Debug)]
pub struct StepFlags {
    /// Widths of one model, from features to classes [default: 784,1024,1024,10 and then
    /// 784, eight times 2048, 10]
    #[arg(long, value_delimiter = ',')]
    pub layers: Vec<NonZeroUsize>,
    /// What makes a step of gradients, in every row
    #[arg(long, value_enum, default_value = "momentum")]
    pub optimizer: StepOptimizer,
    /// Rows of a rank's batch
    #[arg(long, default_value = "128")]
    pub batch: NonZeroUsize,
    /// World size
    #[arg(long, default_value = "2", value_parser = clap::value_parser!(u16).range(2..=64))]
    pub ranks: u16,
    /// local, or delayed:LATENCY_US:GBIT; a list, each in turn
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "local,delayed:50:1,delayed:50:10"
    )]
    pub transport: Vec<Wire>,
    /// Rows of the table to measure, a list of single_local, single_global, single_cores, plain,
    /// ddp_noop, ddp, ddp_inline, ddp_no_overlap, ddp_per_parameter, ddp_shard_a_rank, ddp_shards,
    /// single_shards, zero_1, zero_2, zero_3, torch_ddp, torch_zro, torch_fsdp2 [default: all]
    #[arg(long, value_delimiter = ',')]
    pub rows: Vec<Contender>,
    /// Blocks of each row [default: 20, and 8 for a model of 10 million parameters or more]
    #[arg(long)]
    pub rounds: Option<NonZeroUsize>,
    /// Steps in a block that count [default: 8, and 2 for such a model]
    #[arg(long)]
    pub steps: Option<NonZeroUsize>,
    /// Keeps rank r, and its communication thread, on core r; else they run where the system
    /// puts them, as ranks of `mlp` do
    #[arg(long)]
    pub pinned: bool,
    /// The built program of `examples/two_cores`: one process on as many cores as ranks
    #[arg(long, value_name = "PROGRAM")]
    pub two_cores: Option<PathBuf>,
    /// A Python that has PyTorch, as `tests/gloo/torch_env.sh` prints it
    #[arg(long, value_name = "PYTHON")]
    pub torch: Option<PathBuf>,
    /// Ends with 1 if a target is missed
    #[arg(long)]
    pub check: bool,
    /// Writes a JSON object for each row and target; - is standard output alone
    #[arg(short = 'J', long)]
    pub json: Option<PathBuf>,
}

const SMALL: [usize; 4] = [784, 1024, 1024, 10];
const WIDE: [usize; 10] = [784, 2048, 2048, 2048, 2048, 2048, 2048, 2048, 2048, 10];

/// From so many parameters on a step is long enough that few make a block.
const LARGE: usize = 10_000_000;

const TORCH_STEP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/peers/torch_step.py");

/// Measures every model on every transport; true unless a target that is to be checked is
/// missed.
///
/// # Errors
///
/// [`BenchError::Usage`] if there is no such model; what stopped a rank or a program.
pub fn step(flags: &StepFlags) -> Result<bool, BenchError> {
    let mut out = Output::new(flags.json.as_deref())?;
    let models = match flags.layers.len() {
        0 => vec![SMALL.to_vec(), WIDE.to_vec()],
        1 => {
            return Err(BenchError::usage(
                "--layers needs two widths at least: 784,10",
            ));
        }
        _ => vec![flags.layers.iter().map(|width| width.get()).collect()],
    };
    let mut good = true;
    for layers in models {
        let training = Training {
            layers,
            batch: flags.batch.get(),
            optimizer: flags.optimizer,
        };
        for &wire in &flags.transport {
            let mut run = Run::new(flags, &training, wire);
            run.say_header(&out);
            let outsides = run.start_outsides(flags)?;
            run.say_left_out(&mut out);
            let table = run.measure(&outsides)?;
            good &= report(&mut out, &table);
        }
    }
    Ok(good || !flags.check)
}

/// Prints a table and its verdicts; true if no target is missed.
fn report(out: &mut Output, table: &Table) -> bool {
    out.say(StepRow::columns().heading());
    for (row, measured) in table.rows().iter().zip(&table.measured) {
        let what = measured.contender.what(table.ranks);
        out.say(StepRow::columns().line(&row.cells(what)));
        out.record(row);
    }
    if let Some(saved) = table.saved_by_buckets() {
        out.say(match saved > 0.0 {
            true => format!(
                "# buckets save {} ms a step over parameter by parameter",
                short(saved)
            ),
            false => "# what buckets save over parameter by parameter is less than the noise here"
                .to_owned(),
        });
    }
    if let Ok(hidden) = table.hidden_by_overlap() {
        let hidden = 100.0 * hidden;
        out.say(match hidden > 0.0 {
            true => format!(
                "# overlap hides {hidden:.0} % of what communication adds to a step without it"
            ),
            false => "# what overlap hides is less than the noise here".to_owned(),
        });
    }
    let verdicts = target::verdicts(table);
    for verdict in &verdicts {
        out.say(format!("# {verdict}"));
        out.record(verdict);
    }
    out.say("");
    verdicts.iter().all(|verdict| verdict.met != Some(false))
}

/// One model on one transport.
struct Run<'a> {
    training: &'a Training,
    wire: Wire,
    ranks: usize,
    rounds: usize,
    steps: usize,
    pinned: bool,
    contenders: Vec<Contender>,
    /// Asked for, or in every table, but without the program that it needs.
    absent: Vec<(Contender, String)>,
}

impl<'a> Run<'a> {
    fn new(flags: &StepFlags, training: &'a Training, wire: Wire) -> Self {
        let large = training.parameters() >= LARGE;
        let or = |given: Option<NonZeroUsize>, default| given.map_or(default, NonZeroUsize::get);
        let ranks = usize::from(flags.ranks);
        let wanted = Contender::ALL.into_iter().filter(|row| {
            row.belongs_on(wire) && (flags.rows.is_empty() || flags.rows.contains(row))
        });
        let (contenders, absent) = wanted.partition(|row| match row {
            Contender::SingleCores => flags.two_cores.is_some(),
            row => row.torch().is_none() || flags.torch.is_some(),
        });
        let absent: Vec<Contender> = absent;
        Self {
            training,
            wire,
            ranks,
            rounds: or(flags.rounds, if large { 8 } else { 20 }),
            steps: or(flags.steps, if large { 2 } else { 8 }),
            pinned: flags.pinned,
            contenders,
            absent: absent.into_iter().map(|row| (row, how_to(row))).collect(),
        }
    }

    fn say_header(&self, out: &Output) {
        let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let load = load.split(' ').next().unwrap_or("unknown").to_owned();
        let widths: Vec<_> = self.training.layers.iter().map(usize::to_string).collect();
        let placed = match self.pinned {
            true => "rank r stays on core r mod cores",
            false => "ranks run where the system puts them",
        };
        out.say(format!(
            "# {}, {} parameters, f32, {} ranks, batch {} a rank, {}, over {}",
            widths.join("-"),
            self.training.parameters(),
            self.ranks,
            self.training.batch,
            self.training.optimizer.name(),
            self.wire
        ));
        out.say(format!(
            "# cores {}  load {load}  launcher threads  {placed}",
            cores()
        ));
        out.say(format!(
            "# {} rounds of blocks of {} steps, rows by turns; time of the slowest rank, a step's mean over a block, \
             median over the rounds, in ms; ratios and differences within a round",
            self.rounds, self.steps
        ));
        out.say(
            "# ran, queued: a step's time of all ranks' threads on a core, and ready but without one; \
             load from elsewhere lengthens the second far more than the first",
        );
        out.say(
            "# forward, backward, exposed, update: rank 0's mean step in its parts; gathering: its all-gathers, \
             in these parts or beside them",
        );
    }

    fn say_left_out(&self, out: &mut Output) {
        for (row, why) in &self.absent {
            out.say(format!("# left out: {}: {why}", row.what(self.ranks)));
            out.record(&LeftOut {
                kind: "left_out",
                contender: row.name(),
                why: why.clone(),
            });
        }
    }

    /// `outsides` has the program of each contender that needs one.
    fn measure(&self, outsides: &[Mutex<Option<Outside>>]) -> Result<Table, BenchError> {
        let setting = Setting {
            ranks: self.ranks,
            wire: self.wire,
            pinned: self.pinned,
            iterations: self.rounds,
            warm_up: 1,
            checked: 0,
        };
        // The first world is the referee's: it brings ranks together before and in each block.
        let referee = CommunicatorConfig::new().with_timeout(3 * PATIENCE);
        let worlds = self.contenders.iter().filter(|row| row.has_world());
        let config = |row: &Contender| {
            let exact = row.ddp(self.ranks).is_some_and(|ddp| ddp.micro_shards > 0);
            CommunicatorConfig::new().with_deterministic(exact)
        };
        let configs: Vec<_> = [referee].into_iter().chain(worlds.map(config)).collect();
        let by_rank = ranks::run(&setting, &configs, |seat| self.take_part(seat, outsides))?;
        let measured = self.contenders.iter().enumerate();
        let measured = measured.map(|(index, &contender)| Measured {
            contender,
            blocks: (0..self.rounds)
                .map(|round| slowest(by_rank.iter().filter_map(|rank| rank[index][round])))
                .collect(),
        });
        Ok(Table {
            training: self.training.clone(),
            wire: self.wire,
            ranks: self.ranks,
            steps: self.steps,
            measured: measured.collect(),
        })
    }

    /// The programs of the contenders that need one, before any thread is kept on a core. A
    /// contender whose program cannot do it is left out.
    fn start_outsides(
        &mut self,
        flags: &StepFlags,
    ) -> Result<Vec<Mutex<Option<Outside>>>, BenchError> {
        let mut outsides = Vec::new();
        for contender in std::mem::take(&mut self.contenders) {
            let outside = match self.start(contender, flags)? {
                Ok(outside) => outside,
                Err(why) => {
                    self.absent.push((contender, why));
                    continue;
                }
            };
            self.contenders.push(contender);
            outsides.push(Mutex::new(outside));
        }
        Ok(outsides)
    }

    /// The program of a contender that needs one, or why it cannot do it.
    fn start(
        &self,
        contender: Contender,
        flags: &StepFlags,
    ) -> Result<Result<Option<Outside>, String>, BenchError> {
        let widths: Vec<_> = self.training.layers.iter().map(usize::to_string).collect();
        let (widths, batch) = (widths.join(","), self.training.batch);
        let optimizer = self.training.optimizer.name();
        let (program, arguments) = match (contender, contender.torch()) {
            (Contender::SingleCores, _) => {
                let rows = (batch * self.ranks).to_string();
                (&flags.two_cores, vec![widths, rows, optimizer.into()])
            }
            (_, Some(way)) => {
                let (batch, ranks) = (batch.to_string(), self.ranks.to_string());
                let words = [TORCH_STEP, &widths, &batch, &ranks, optimizer, way];
                (&flags.torch, words.map(str::to_owned).into())
            }
            _ => return Ok(Ok(None)),
        };
        let Some(program) = program else {
            return Ok(Ok(None));
        };
        let arguments: Vec<_> = arguments.into_iter().map(OsString::from).collect();
        let started = Outside::start(program.as_os_str(), &arguments, self.ranks, optimizer)?;
        Ok(started.map(Some))
    }

    /// What one rank does and sees, by contender and round.
    fn take_part(
        &self,
        seat: &mut Seat<'_>,
        outsides: &[Mutex<Option<Outside>>],
    ) -> Result<Vec<Vec<Option<Block>>>, BenchError> {
        let mut worlds = std::mem::take(&mut seat.worlds).into_iter();
        let Some(mut referee) = worlds.next() else {
            return Err(BenchError::Interrupted);
        };
        let place = referee.place();
        let replicas = self
            .contenders
            .iter()
            .map(|&row| self.replica(row, place, &mut worlds));
        let mut replicas = replicas.collect::<Result<Vec<_>, _>>()?;
        let mut blocks = vec![vec![]; replicas.len()];
        for round in 0..self.rounds {
            for turn in 0..replicas.len() {
                let index = match round % 2 {
                    0 => turn,
                    _ => replicas.len() - 1 - turn,
                };
                // Asleep meanwhile, so that a contender that needs fewer threads has the machine.
                referee.barrier()?;
                let before = Spent::now();
                let mut block = if self.contenders[index].is_outside() {
                    self.outside_block(&outsides[index], place)?
                } else if let Some(replica) = &mut replicas[index] {
                    let alone = self.contenders[index].is_single();
                    Some(self.block(replica, (!alone).then_some(&mut referee))?)
                } else {
                    None
                };
                referee.barrier()?;
                if let (Some(block), Some(before), Some(after)) = (&mut block, before, Spent::now())
                    && !self.contenders[index].is_outside()
                {
                    block.spent = Some(after - before);
                }
                blocks[index].push(block);
            }
        }
        Ok(blocks)
    }

    /// This rank's replica for a contender, if it has one.
    fn replica(
        &self,
        contender: Contender,
        place: Place,
        worlds: &mut impl Iterator<Item = Communicator>,
    ) -> Result<Option<Replica>, BenchError> {
        let own = place.rank..place.rank + 1;
        Ok(match contender {
            Contender::SingleLocal => (place.rank == 0).then(|| self.training.alone(own)),
            Contender::SingleGlobal => {
                (place.rank == 0).then(|| self.training.alone(0..place.world))
            }
            Contender::Plain => Some(self.training.alone(own)),
            _ => match contender.ddp(self.ranks) {
                Some(config) if contender.has_world() => {
                    let world = worlds.next().ok_or(BenchError::Interrupted)?;
                    Some(match contender.stage() {
                        Some(stage) => self.training.sharded(stage, config, world, own)?,
                        None => self.training.wrapped(&config, world, own)?,
                    })
                }
                Some(config) if place.rank == 0 => {
                    Some(self.training.wrapped(&config, alone()?, 0..place.world)?)
                }
                _ => None,
            },
        })
    }

    fn block(
        &self,
        replica: &mut Replica,
        referee: Option<&mut Communicator>,
    ) -> Result<Block, BenchError> {
        replica.step()?;
        if let Some(referee) = referee {
            referee.barrier()?;
        }
        let before = replica.moved()?;
        let start = Instant::now();
        let mut seen = Seen::default();
        for _ in 0..self.steps {
            seen = seen.and(replica.step()?);
        }
        // What a step leaves to the communication thread is part of its time.
        seen.moved = replica.moved()? - before;
        Ok(Block {
            seconds: start.elapsed().as_secs_f64() / self.steps as f64,
            seen,
            spent: None,
        })
    }

    /// Rank 0 asks; the others sleep at the next meeting.
    fn outside_block(
        &self,
        outside: &Mutex<Option<Outside>>,
        place: Place,
    ) -> Result<Option<Block>, BenchError> {
        let mut outside = outside.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *outside {
            Some(program) if place.rank == 0 => Ok(Some(Block {
                seconds: program.run(self.steps)? / self.steps as f64,
                seen: Seen::default(),
                spent: None,
            })),
            _ => Ok(None),
        }
    }
}

/// A world of one.
fn alone() -> Result<Communicator, BenchError> {
    let end = Local::mesh(1).into_iter().next();
    let end: Box<dyn Transport> = Box::new(end.ok_or(BenchError::Interrupted)?);
    Ok(Communicator::new(end, &CommunicatorConfig::new())?)
}

/// The longest time, and what the first rank saw.
fn slowest(mut ranks: impl Iterator<Item = Block>) -> Block {
    let nobody = Block {
        seconds: f64::NAN,
        seen: Seen::default(),
        spent: None,
    };
    let first = ranks.next().unwrap_or(nobody);
    ranks.fold(first, |slowest, rank| Block {
        seconds: slowest.seconds.max(rank.seconds),
        ..slowest
    })
}

fn how_to(contender: Contender) -> String {
    match contender {
        Contender::SingleCores => {
            "`cargo build --manifest-path examples/two_cores/Cargo.toml`, then \
             --two-cores examples/two_cores/target/debug/two_cores"
                .to_owned()
        }
        _ => "--torch \"$(tests/gloo/torch_env.sh | tail -n 1)\"".to_owned(),
    }
}
