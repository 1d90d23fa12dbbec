//! Settings: defaults, then a TOML file, then flags.

mod error;
mod kmeans;
mod memory;
mod mlp;
mod resolve;

pub use error::ConfigError;
pub use kmeans::{KMeansData, KMeansRun, KMeansSettings};
pub use memory::MemorySettings;
pub use mlp::{
    Compare, Data, Log, Model, Optim, OptimizerKind, Precision, Preset, Run, Settings, Train, Zero,
};
pub(crate) use resolve::read_tuning;
pub use resolve::{Flag, print, resolve};
