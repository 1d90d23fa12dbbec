//! Algorithms: pure functions from a place to a plan.
//!
//! To add one: write one file with a [`Family`], and list it in [`Algorithm`].
//! The suite then plays its plans, counts its bytes and runs it live.
mod direct;
pub(crate) mod exchange;
mod halving;
mod naive;
mod ring;
mod route;
mod tree;

pub use route::Route;

use std::{fmt, ops::Range, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{Collective, DType, Parts, Place, Plan};

/// How a collective is carried out.
///
/// Each algorithm plans every collective that can be planned in more than one
/// way, so the name that is asked for is the one that runs.
///
/// Hops are messages that wait for each other; `S` is the bytes of the buffer, and
/// what a rank sends is the most that any rank does. Among N ranks, L = log2 N
/// rounded up:
///
/// | all_reduce | hops | a rank sends | order of a sum |
/// |---|---|---|---|
/// | naive | 2 | (N-1) S, at rank 0 | the tree over ranks |
/// | tree | 2 L | L S, at rank 0 | the tree over ranks |
/// | ring | 2 (N-1) | 2 (N-1)/N S | down the ring, another for each block (gloo's) |
/// | halving | 2 L | 2 (N-1)/N S | the tree over ranks, if N is a power of two |
/// | direct | 2 | 2 (N-1)/N S | the tree over ranks |
///
/// | hops; a rank sends | naive | tree | ring | halving | direct |
/// |---|---|---|---|---|---|
/// | reduce_scatter | 2; S | 2 L; S | N-1; (N-1)/N S | L; (N-1)/N S | 1; (N-1)/N S |
/// | all_gather | 2; (N-1) S | 2 L; L S | N-1; (N-1)/N S | L; (N-1)/N S | 1; (N-1)/N S |
/// | broadcast | 1; (N-1) S | L; L S | N-1, in N pieces; S | 2 L; 2 (N-1)/N S | 2; 2 (N-1)/N S |
/// | reduce | 1; S | L; S | N-1, in N pieces; S | 2 L; 2 (N-1)/N S | 2; S |
///
/// *The tree over ranks* is T(n) = T(p) + T(n - p), p the largest power of two below
/// n. With [`deterministic`](crate::CommunicatorConfig::deterministic) every sum has
/// that order. [`Route::traffic`] has the exact bytes of each rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Algorithm {
    /// Everything through one rank: the reference for the others.
    Naive,
    /// A binomial tree: few hops, the whole buffer on each.
    Tree,
    /// Around a ring: the fewest bytes per rank, many hops.
    Ring,
    /// Halves of halves, and back: the fewest bytes in the fewest hops, far apart.
    Halving,
    /// Each part straight to the rank that owns it, and from there to all.
    Direct,
}

impl Algorithm {
    /// Every algorithm, simplest first.
    pub const ALL: &[Self] = &[
        Self::Naive,
        Self::Tree,
        Self::Ring,
        Self::Halving,
        Self::Direct,
    ];

    fn family(self) -> &'static dyn Family {
        match self {
            Self::Naive => &naive::Naive,
            Self::Tree => &tree::Tree,
            Self::Ring => &ring::Ring,
            Self::Halving => &halving::Halving,
            Self::Direct => &direct::Direct,
        }
    }

    /// The algorithm's name in configurations and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::Tree => "tree",
            Self::Ring => "ring",
            Self::Halving => "halving",
            Self::Direct => "direct",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL
            .iter()
            .copied()
            .find(|algorithm| algorithm.name() == name)
            .ok_or_else(|| {
                let known: Vec<_> = Self::ALL.iter().map(|a| a.name()).collect();
                format!("no algorithm \"{name}\"; there are {}", known.join(", "))
            })
    }
}

/// All that a plan depends on.
///
/// The buffer is the whole one on every rank that has it: for an all_gather each
/// rank's own part is filled at first, for a reduce_scatter at the end.
#[derive(Clone, Copy, Debug)]
pub struct Shape<'a> {
    /// The operation.
    pub collective: Collective,
    /// The rank that plans.
    pub place: Place,
    /// The rank at the root, below `place.world`; 0 where there is none.
    pub root: usize,
    /// The buffer, cut into one part per rank.
    pub parts: Parts<'a>,
    /// The type of the elements, on whose size gloo's blocks depend.
    pub dtype: DType,
    /// The most elements in one message.
    pub segment: usize,
    /// The least elements of an all_reduce that `direct` gives to one owner.
    pub piece: usize,
    /// Whether every sum is to be the one tree over ranks.
    pub deterministic: bool,
    /// Whether the elements are [wide](crate::Element::Wide) while they are summed.
    pub widens: bool,
}

impl Shape<'_> {
    fn len(&self) -> usize {
        self.parts.len()
    }

    fn whole(&self) -> Range<usize> {
        0..self.len()
    }

    fn own(&self) -> Range<usize> {
        self.parts.range(self.place.rank)
    }

    fn is_root(&self) -> bool {
        self.place.rank == self.root
    }

    /// Every rank but this one.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let Place { rank, world } = self.place;
        (0..world).filter(move |&other| other != rank)
    }
}

/// Elements that one rank sends and receives in one pass of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flow {
    /// Elements that leave the rank.
    pub sent: usize,
    /// Elements that reach it.
    pub received: usize,
}

impl Flow {
    const NONE: Self = Self::new(0, 0);

    const fn new(sent: usize, received: usize) -> Self {
        Self { sent, received }
    }
}

/// Bytes of one rank in one collective, without headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes that leave the rank.
    pub sent: usize,
    /// Bytes that reach it.
    pub received: usize,
}

/// What an algorithm's file provides, for the five collectives of
/// [`Collective::PLANNED`].
trait Family {
    /// The steps of one rank.
    fn plan(&self, shape: &Shape<'_>, plan: &mut Plan);

    /// What the two passes move for one rank of at least two: by formula, written
    /// by hand and not derived from the plan.
    fn flow(&self, shape: &Shape<'_>) -> [Flow; 2];

    /// Whether partial sums travel, or only what ranks put in. Partial sums of
    /// 16-bit floats are 32 bits wide.
    fn carries_partial_sums(&self) -> bool {
        true
    }
}

/// `range` in the messages that [`Step::segments`](crate::schedule::Step::segments)
/// makes of it: at most `segment` elements in each, and at least one message.
fn segments(range: Range<usize>, segment: usize) -> impl Iterator<Item = Range<usize>> {
    (0..).map_while(move |index| nth_segment(&range, segment, index))
}

/// The message of that number, if there is one.
fn nth_segment(range: &Range<usize>, segment: usize, index: usize) -> Option<Range<usize>> {
    let start = range.start + index * segment;
    (index == 0 || start < range.end).then(|| start..start.saturating_add(segment).min(range.end))
}
