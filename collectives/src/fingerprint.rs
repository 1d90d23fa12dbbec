//! What each call is, in a few words that travel with its data.
use std::{
    fmt,
    hash::{Hash, Hasher},
};

use serde::{Deserialize, Serialize};

use crate::{DType, Operator, Route};

/// The operations of a [`Communicator`](crate::Communicator).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Collective {
    /// Every rank gets the reduction of all buffers.
    AllReduce,
    /// The root gets the reduction of all buffers.
    Reduce,
    /// Every rank gets the root's buffer.
    Broadcast,
    /// Every rank gets every rank's part.
    AllGather,
    /// Every rank gets its part of the reduction.
    ReduceScatter,
    /// The root gets every rank's part.
    Gather,
    /// Every rank gets its part of the root's buffer.
    Scatter,
    /// Every rank gets its part of every rank's buffer.
    AllToAll,
    /// The ranks agree on who is in a group.
    Split,
    /// No rank leaves before all have come.
    Barrier,
    /// A message from one rank to another.
    SendRecv,
}

impl Collective {
    /// The operations that an [`Algorithm`](crate::Algorithm) plans.
    pub const PLANNED: [Self; 5] = [
        Self::AllReduce,
        Self::Reduce,
        Self::Broadcast,
        Self::AllGather,
        Self::ReduceScatter,
    ];

    /// The operation's name, as in PyTorch.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::Reduce => "reduce",
            Self::Broadcast => "broadcast",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::AllToAll => "all_to_all",
            Self::Split => "split",
            Self::Barrier => "barrier",
            Self::SendRecv => "send/recv",
        }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a caller asks for: all that a plan needs to know, and no data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Call {
    /// The operation.
    pub collective: Collective,
    /// How elements are folded, where they are.
    pub op: Option<Operator>,
    /// The rank at the root, where there is one.
    pub root: Option<usize>,
    /// The type of the elements.
    pub dtype: DType,
    /// Elements in the whole buffer.
    pub len: usize,
    /// What else the ranks must agree on, as a hash: how the buffer is cut, where it
    /// is not cut evenly, or who is in a group; and the settings of which the plan is made.
    pub terms: u64,
}

impl Call {
    /// Whether the elements are [wide](crate::Element::Wide) while they are folded.
    pub fn widens(&self) -> bool {
        self.op.is_some_and(|operator| operator.widens(self.dtype))
    }

    /// Bytes in the whole buffer.
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} x {}", self.collective, self.len, self.dtype)?;
        if let Some(op) = self.op {
            write!(f, ", {op}")?;
        }
        if let Some(root) = self.root {
            write!(f, ", root {root}")?;
        }
        if self.terms != 0 {
            write!(f, ", terms {:08x}", self.terms as u32)?;
        }
        Ok(())
    }
}

/// A call as one rank made it. It travels with every message of the call, so a
/// disagreement between ranks is seen at once, and costs nothing when all agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    /// The number of the call, from 1: collectives of this communicator, or
    /// messages between these two ranks.
    pub seq: u64,
    /// The [digest](Self::digest) of the collective before this one, and with it
    /// of all before; 0 for the first, and for a single message. Two ranks may part
    /// in a call in which neither hears from the other: their next message tells.
    pub history: u64,
    /// What was asked for.
    pub call: Call,
    /// The plan that carries it out; none for a single message.
    pub algorithm: Option<Route>,
    /// The most elements in one message.
    pub segment: usize,
    /// The number of the message between these two ranks, from 1, where it travels with
    /// one; else 0. Where one is lost, the next does not land in its place.
    pub message: u64,
}

impl Fingerprint {
    /// This call and all before it in one number.
    pub fn digest(&self) -> u64 {
        let mut mix = Mix(0);
        self.hash(&mut mix);
        mix.finish()
    }

    /// The first field in which two ranks differ.
    pub fn difference(&self, other: &Self) -> Option<&'static str> {
        let (a, b) = (&self.call, &other.call);
        [
            ("the collective", a.collective != b.collective),
            ("the number of the call", self.seq != other.seq),
            ("the element type", a.dtype != b.dtype),
            ("the length", a.len != b.len),
            ("the reduce operation", a.op != b.op),
            ("the root", a.root != b.root),
            ("the counts, members or settings", a.terms != b.terms),
            ("the algorithm", self.algorithm != other.algorithm),
            ("the segment size", self.segment != other.segment),
            ("the calls before", self.history != other.history),
            ("the message", self.message != other.message),
        ]
        .into_iter()
        .find_map(|(field, differs)| differs.then_some(field))
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{} {}", self.seq, self.call)?;
        if let Some(algorithm) = self.algorithm {
            write!(
                f,
                ", by {algorithm} in segments of {} elements",
                self.segment
            )?;
        }
        if self.message > 0 {
            write!(f, ", message {}", self.message)?;
        }
        Ok(())
    }
}

/// A hash of a few words: each is mixed in by one multiplication. It meets mistakes, not
/// adversaries, in every call. Source: the hash of rustc's tables, FxHash.
struct Mix(u64);

impl Hasher for Mix {
    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }

    fn write_isize(&mut self, word: isize) {
        self.write_u64(word as u64);
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// A hash of numbers that all ranks must give alike (FNV-1a).
pub(crate) fn terms(numbers: impl Iterator<Item = usize>) -> u64 {
    numbers
        .flat_map(usize::to_le_bytes)
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
}
