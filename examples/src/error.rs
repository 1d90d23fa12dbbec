//! What can end a run early, and the exit code that says so.

use std::path::Path;

use collectives::launch::LaunchError;

use crate::{ConfigError, DataError, KMeansError};

/// Why a program stopped. Printed as one line, with all its causes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A file of data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Rows that cannot be clustered.
    #[error(transparent)]
    KMeans(#[from] KMeansError),
    /// The data-parallel machinery.
    #[error(transparent)]
    Ddp(#[from] ddp::Error),
    /// Its sharded kind.
    #[error(transparent)]
    Zero(#[from] zero::Error),
    /// A world of ranks.
    #[error(transparent)]
    Launch(LaunchError),
    /// A file could not be written.
    #[error("{path}: cannot be written: {reason}")]
    Write {
        /// The file.
        path: String,
        /// The operating system's words.
        reason: String,
    },
}

impl Error {
    /// A file that could not be written, and the operating system's words.
    pub(crate) fn write(path: &Path, error: &std::io::Error) -> Self {
        Self::Write {
            path: path.display().to_string(),
            reason: error.to_string(),
        }
    }

    /// 2 for what was asked for and cannot be run (flags, config, input
    /// files), 1 for what went wrong while it ran.
    ///
    /// ```
    /// use examples::{Error, KMeansError};
    ///
    /// assert_eq!(Error::from(KMeansError::NoClusters).exit_code(), 2);
    /// ```
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::KMeans(KMeansError::Collective(_)) => 1,
            Self::Config(_) | Self::Data(_) | Self::KMeans(_) => 2,
            Self::Ddp(_) | Self::Zero(_) | Self::Launch(_) | Self::Write { .. } => 1,
        }
    }
}

impl From<LaunchError> for Error {
    /// An error of ours that a rank returned is that error; all ranks agree
    /// on it, so that it does not matter which.
    fn from(error: LaunchError) -> Self {
        match error {
            LaunchError::Failed { rank, source } => match source.downcast::<KMeansError>() {
                Ok(error) => Self::KMeans(*error),
                Err(source) => Self::Launch(LaunchError::Failed { rank, source }),
            },
            other => Self::Launch(other),
        }
    }
}
