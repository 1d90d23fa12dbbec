//! The command line.
use std::{
    io::{Write, stderr},
    process::exit,
};

use clap::{CommandFactory, Parser, Subcommand, error::ErrorKind};
use collectives::Collective;

use super::{
    BenchError, CrossoverFlags, LimitFlags, SimulateFlags, StepFlags, SweepFlags, VerifyFlags,
    crossover, limit, output::all_written, simulate, step, sweep, verify,
};

/// Measures and verifies the collectives, with nccl-tests' options and columns, and
/// measures what a training step costs.
///
/// Ends with 0 if all is well, 1 if anything was wrong, 2 if the command cannot be.
#[derive(Clone, Debug, Parser)]
#[command(name = "bench")]
pub struct BenchCli {
    /// What to do
    #[command(subcommand)]
    pub verb: Verb,
}

/// What `bench` does.
#[derive(Clone, Debug, Subcommand)]
#[command(rename_all = "snake_case")]
pub enum Verb {
    /// Every rank gets the reduction of all buffers
    AllReduce(SweepFlags),
    /// The root gets the reduction of all buffers
    Reduce(SweepFlags),
    /// Every rank gets the root's buffer
    Broadcast(SweepFlags),
    /// Every rank gets every rank's part
    AllGather(SweepFlags),
    /// Every rank gets its part of the reduction
    ReduceScatter(SweepFlags),
    /// The root gets every rank's part
    Gather(SweepFlags),
    /// Every rank gets its part of the root's buffer
    Scatter(SweepFlags),
    /// Every rank gets its part of every rank's buffer
    AllToAll(SweepFlags),
    /// Every rank sends to the next and receives from the last
    #[command(name = "sendrecv")]
    SendRecv(SweepFlags),
    /// Every collective by every algorithm against recorded results of gloo
    Verify(VerifyFlags),
    /// From which size on the ring is fastest; writes a tuning file and a picture
    Crossover(CrossoverFlags),
    /// What the machine could do at best, and how near ring and tree come
    Limit(LimitFlags),
    /// Plans in virtual time, among as many ranks as you like
    Simulate(SimulateFlags),
    /// What a training step costs by every way of taking it, interleaved in one run
    Step(StepFlags),
}

/// Reads this program's command line; ends the program if it cannot be.
pub fn parse() -> BenchCli {
    BenchCli::try_parse().unwrap_or_else(|error| {
        if error.kind() != ErrorKind::InvalidSubcommand {
            error.exit();
        }
        // clap says what is wrong, but not what would be right.
        let first = error.to_string().lines().next().map(str::to_owned);
        let command = BenchCli::command();
        let verbs: Vec<_> = (command.get_subcommands())
            .map(|verb| verb.get_name())
            .collect();
        let what = first.unwrap_or_default();
        drop(writeln!(stderr(), "{what}; there are {}", verbs.join(", ")));
        exit(2)
    })
}

/// Does what the command line says; true if all is well.
///
/// # Errors
///
/// What stopped it; [`BenchError::exit_code`] has the code to end with.
pub fn run(cli: &BenchCli) -> Result<bool, BenchError> {
    let good = match &cli.verb {
        Verb::AllReduce(flags) => sweep(Collective::AllReduce, flags),
        Verb::Reduce(flags) => sweep(Collective::Reduce, flags),
        Verb::Broadcast(flags) => sweep(Collective::Broadcast, flags),
        Verb::AllGather(flags) => sweep(Collective::AllGather, flags),
        Verb::ReduceScatter(flags) => sweep(Collective::ReduceScatter, flags),
        Verb::Gather(flags) => sweep(Collective::Gather, flags),
        Verb::Scatter(flags) => sweep(Collective::Scatter, flags),
        Verb::AllToAll(flags) => sweep(Collective::AllToAll, flags),
        Verb::SendRecv(flags) => sweep(Collective::SendRecv, flags),
        Verb::Verify(flags) => verify(flags),
        Verb::Crossover(flags) => crossover(flags),
        Verb::Limit(flags) => limit(flags),
        Verb::Simulate(flags) => simulate(flags),
        Verb::Step(flags) => step(flags),
    }?;
    all_written()?;
    Ok(good)
}
