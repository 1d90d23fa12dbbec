//! Why a measurement could not be made, and with what code the program then ends.
use std::path::PathBuf;

use super::reference::ReferenceError;

/// What stops `bench`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// Flags that do not go together.
    #[error("{0}")]
    Usage(String),
    /// A collective failed, or its settings cannot be.
    #[error(transparent)]
    Collective(#[from] collectives::Error),
    /// Training failed on a rank.
    #[error(transparent)]
    Training(#[from] ddp::Error),
    /// A model cannot be sharded, which is no fault of training.
    #[error(transparent)]
    Sharding(zero::Error),
    /// Another program, asked to take part, failed.
    #[error("{program} {what}")]
    Outside {
        /// The program.
        program: String,
        /// What it did.
        what: String,
    },
    /// A rank panicked.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// The rank.
        rank: usize,
        /// What it said.
        message: String,
    },
    /// Another rank stopped first, and says why.
    #[error("another rank stopped")]
    Interrupted,
    /// The operating system gave no thread.
    #[error("no thread for rank {rank}: {source}")]
    Thread {
        /// The rank that was to have it.
        rank: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The recorded reference cannot be read.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// Costs that cannot be written as TOML.
    #[error("cannot write the costs as TOML: {0}")]
    Toml(#[from] toml::ser::Error),
}

impl From<zero::Error> for BenchError {
    fn from(error: zero::Error) -> Self {
        match error {
            zero::Error::Ddp(error) => Self::Training(error),
            other => Self::Sharding(other),
        }
    }
}

impl BenchError {
    pub(super) fn usage(what: impl Into<String>) -> Self {
        Self::Usage(what.into())
    }

    /// 2 for what the user can put right in the command, 1 for the rest.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) | Self::Collective(collectives::Error::Config { .. }) => 2,
            _ => 1,
        }
    }
}
