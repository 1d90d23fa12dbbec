//! What people run: an MLP trained data-parallel, KMeans over all-reduce, and
//! the measuring and verifying of the collectives.
//!
//! The binaries `mlp`, `kmeans` and `bench` are thin; everything they do is
//! here, so that tests do it too.

pub mod bench;

mod fingerprint;
mod random;

mod config;
mod data;
mod report;

mod error;
mod kmeans;
mod memory;

mod compare;
mod model;
mod moved;
mod optimizer;
mod step_log;
mod task;
mod trace;
mod train;
mod trainer;
mod weights;

mod cli;
mod run;

pub use cli::{CompareFlags, KMeansCli, MemoryFlags, MlpCli, MlpCommand, TrainFlags};
pub use compare::{Fault, Mode, ModeReport, Traffic, Verdict, compare};
pub use config::{
    Compare, ConfigError, Data, Flag, KMeansData, KMeansRun, KMeansSettings, Log, MemorySettings,
    Model, Optim, OptimizerKind, Precision, Preset, Run, Settings, Train, Zero, print, resolve,
};
pub use data::{
    DataError, DataSet, IdxImages, Matrix, Samples, article_start, digits, idx_images, idx_labels,
    iris, mnist_folder, parse_iris, read_csv, synthetic,
};
pub use error::Error;
pub use fingerprint::fingerprint;
pub use kmeans::{KMeansError, KMeansFit, KMeansIteration, KMeansOptions, fit};
pub use memory::{Allocated, CountAllocations, CountedMemory, RankMemory, WorldMemory, memory};
pub use model::Mlp;
pub use optimizer::optimizer;
pub use random::SplitMix64;
pub use report::{Columns, Curve, curves_csv, curves_svg, grouped, timeline};
pub use run::{exit_code, run_compare, run_kmeans, run_memory, run_train};
pub use task::Task;
pub use trace::Recording;
pub use train::{Epoch, News, TrainReport, train};
