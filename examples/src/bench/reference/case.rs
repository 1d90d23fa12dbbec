//! One call that every rank of a world made.
use collectives::{Collective, DType, ReduceOp};

/// One collective that gloo was, or is to be, asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// Its name, unique in a recording.
    pub name: String,
    /// The operation.
    pub collective: Collective,
    /// Among how many ranks.
    pub world: usize,
    /// The element type.
    pub dtype: DType,
    /// How elements are folded.
    pub reduce: Option<ReduceOp>,
    /// The rank at the root; of a single message, which rank 0 sends, its receiver.
    pub root: usize,
    /// Elements of the buffer that is cut by rank, if one is; else of one rank's input.
    pub len: usize,
    /// Elements by rank, where ranks give unequal parts.
    pub counts: Option<Vec<usize>>,
    /// What gloo said, if it refused.
    pub refused: Option<String>,
    /// What the ranks give.
    pub inputs: Inputs,
    /// What gloo gave them.
    pub outputs: Outputs,
}

/// What the ranks give.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Inputs {
    /// Little-endian elements by rank; none from a rank that gives nothing.
    Elements(Vec<Option<Vec<u8>>>),
    /// Elements that are [drawn](super::inputs) from this seed when they are needed.
    Drawn(u64),
}

/// What the ranks get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outputs {
    /// Little-endian elements by rank; none for a rank that gets nothing.
    Elements(Vec<Option<Vec<u8>>>),
    /// By rank, the SHA-256 of its elements' bytes, in hexadecimal digits.
    Hashes(Vec<String>),
}

impl Case {
    /// Whether its inputs are drawn when it is run: megabytes for each rank.
    pub fn is_large(&self) -> bool {
        matches!(self.inputs, Inputs::Drawn(_))
    }

    /// How many elements `rank` gives, if it gives any.
    pub fn given(&self, rank: usize) -> Option<usize> {
        let gives = match self.collective {
            Collective::Scatter => rank == self.root,
            Collective::SendRecv => rank == 0,
            _ => true,
        };
        gives.then(|| self.counts.as_ref().map_or(self.len, |counts| counts[rank]))
    }

    /// Whether it rounds: a sum, mean or product of floats.
    pub(super) fn rounds(&self) -> bool {
        use ReduceOp::{Mean, Product, Sum};
        self.dtype.is_float() && matches!(self.reduce, Some(Sum | Mean | Product))
    }
}
