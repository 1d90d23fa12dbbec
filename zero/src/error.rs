//! What can go wrong beyond what can in ddp.

/// Why sharded training stopped on this rank, or could not begin.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// What ddp says.
    #[error("{0}")]
    Ddp(#[from] ddp::Error),

    /// An optimizer that must see a whole parameter.
    #[error(
        "the optimizer of parameter {parameter} cannot be sharded: {why}. ZeRO gives every rank a piece of the parameter"
    )]
    WholeTensor {
        /// Path of the first such parameter.
        parameter: String,
        /// What was found, and what to do.
        why: String,
    },

    /// Burn's record of the optimizer's state is not what it is known to be.
    #[error("the optimizer's state cannot be read from its record: {0}")]
    Record(String),

    /// A checkpoint cannot be written or read.
    #[error("checkpoint {path}, on rank {rank}: {what}")]
    Checkpoint {
        /// The file.
        path: String,
        /// The first rank that cannot.
        rank: usize,
        /// Why.
        what: String,
    },

    /// An optimizer that has taken steps already.
    #[error(
        "the optimizer has state of {0} tensors, of whole parameters: pass a new one, as its config's `init` makes it"
    )]
    HasState(usize),
}

impl From<collectives::Error> for Error {
    fn from(error: collectives::Error) -> Self {
        Self::Ddp(error.into())
    }
}

impl Error {
    /// The ranks at fault, as far as they are known.
    pub fn ranks(&self) -> Vec<usize> {
        match self {
            Self::Ddp(error) => error.ranks(),
            Self::Checkpoint { rank, .. } => vec![*rank],
            _ => Vec::new(),
        }
    }
}

/// What fallible calls of this crate return.
pub type Result<T, E = Error> = std::result::Result<T, E>;
