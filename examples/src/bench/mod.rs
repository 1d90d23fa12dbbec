//! `bench`: measures the collectives, and verifies them against gloo.
//!
//! [`measure`] is the one way in which anything is timed; the verbs are what is made
//! of it. [`mod@reference`] can be used by tests.
mod error;
mod names;
pub mod reference;
mod size;
mod wire;

mod gate;
mod numbers;
mod pin;
mod ranks;
mod times;

mod handed;
mod job;
mod machine;
mod measure;

mod crossings;
mod curve;
mod header;
mod output;
mod picture;
mod row;
mod spot;
mod table;

mod crossover;
mod limit;
mod simulate;
mod step;
mod sweep;
mod verify;

mod cli;

pub use cli::{BenchCli, Verb, parse, run};
pub use crossover::{CrossoverFlags, crossover};
pub use curve::{Curve, Overtaking};
pub use error::BenchError;
pub use job::Job;
pub use limit::{LimitFlags, limit};
pub use machine::{Bandwidth, Kernel, Machine, WORKING_SETS};
pub use measure::{Measured, Setting, measure};
pub use names::{Choices, DTypes, MOST_RANKS, MOST_THREADS, NotAllowed, RankCounts, ReduceOps};
pub use row::Row;
pub use simulate::{SimulateFlags, simulate};
pub use size::{Bytes, Next, NoSize, sizes};
pub use step::{
    Contender, NoContender, StepFlags, StepOptimizer, StepRow, Verdict, hidden_by_overlap, step,
};
pub use sweep::{SweepFlags, sweep};
pub use times::Times;
pub use verify::{VerifyFlags, verify};
pub use wire::{NoWire, Wire};
