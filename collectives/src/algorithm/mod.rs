//! Algorithms: pure functions from a place to a plan.
//!
//! To add one: write one file with a [`Family`], and list it in [`Algorithm`].
//! The suite then plays its plans, counts its bytes and runs it live.
mod naive;
mod ring;
mod tree;

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{Call, Collective, Place, Schedule};

/// How a collective is carried out.
///
/// Each algorithm plans every collective, so the name that is asked for is the
/// one that runs.
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
}

impl Algorithm {
    /// Every algorithm, simplest first.
    pub const ALL: &[Self] = &[Self::Naive, Self::Tree, Self::Ring];

    fn family(self) -> &'static dyn Family {
        match self {
            Self::Naive => &naive::Naive,
            Self::Tree => &tree::Tree,
            Self::Ring => &ring::Ring,
        }
    }

    /// The algorithm's name in configurations and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::Tree => "tree",
            Self::Ring => "ring",
        }
    }

    /// The steps of one rank, appended to `plan`. Pure: nothing is moved.
    ///
    /// The buffer is the whole one on every rank: for an all_gather each rank's
    /// own [part](crate::Partition) is filled at first, for a reduce_scatter at
    /// the end. A call without a root takes none; one that has a root has it
    /// below `place.world`.
    pub fn plan(self, call: &Call, place: Place, plan: &mut Schedule) {
        let (family, len) = (self.family(), call.len);
        let root = call.root.unwrap_or(0);
        match call.collective {
            // One place for every algorithm: a barrier has no bytes to save on.
            Collective::Barrier => tree::Tree.all_reduce(place, 0, 1, plan),
            Collective::AllReduce => family.all_reduce(place, len, call.dtype.size(), plan),
            Collective::Reduce => family.reduce(place, root, len, plan),
            Collective::Broadcast => family.broadcast(place, root, len, plan),
            Collective::AllGather => family.all_gather(place, len, plan),
            Collective::ReduceScatter => family.reduce_scatter(place, len, plan),
            Collective::SendRecv => {}
        }
    }

    /// What one rank sends and receives, by formula: each algorithm's own file
    /// has it, written by hand beside the plan and not derived from it.
    pub fn traffic(self, call: &Call, place: Place) -> Traffic {
        let elements = match call.collective {
            Collective::Barrier | Collective::SendRecv => Traffic::default(),
            _ if place.world == 1 => Traffic::default(),
            _ => self.family().traffic(call, place),
        };
        Traffic {
            sent: elements.sent * call.dtype.size(),
            received: elements.received * call.dtype.size(),
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

/// Bytes of one rank in one collective, without headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes that leave the rank.
    pub sent: usize,
    /// Bytes that reach it.
    pub received: usize,
}

/// What an algorithm's file provides: a plan for each collective, appended to
/// `plan`, and the elements that it moves for one rank of at least two.
trait Family {
    /// `size` is the bytes of an element, on which gloo's blocks depend.
    fn all_reduce(&self, place: Place, len: usize, size: usize, plan: &mut Schedule);
    fn reduce(&self, place: Place, root: usize, len: usize, plan: &mut Schedule);
    fn broadcast(&self, place: Place, root: usize, len: usize, plan: &mut Schedule);
    fn all_gather(&self, place: Place, len: usize, plan: &mut Schedule);
    fn reduce_scatter(&self, place: Place, len: usize, plan: &mut Schedule);
    fn traffic(&self, call: &Call, place: Place) -> Traffic;
}
