//! Which algorithm carries out which pass.
use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::{Algorithm, Flow, Shape, Traffic};
use crate::{Collective, Partition, Parts, Plan};

/// The way a collective really goes: the algorithm of each pass.
///
/// Mostly the two are one. Where an algorithm's own first pass could not keep a
/// promise, the direct exchange takes its place, at equal bytes, and the route
/// shows it: `direct+ring`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Route {
    /// Who brings the addends together.
    pub reduce: Algorithm,
    /// Who hands the result on.
    pub spread: Algorithm,
}

/// A route is an algorithm if both its passes are.
impl PartialEq<Algorithm> for Route {
    fn eq(&self, algorithm: &Algorithm) -> bool {
        *self == Self::from(*algorithm)
    }
}

impl From<Algorithm> for Route {
    fn from(algorithm: Algorithm) -> Self {
        Self {
            reduce: algorithm,
            spread: algorithm,
        }
    }
}

impl Route {
    /// The route of `algorithm`.
    ///
    /// A ring adds up in another order for each part, and would round at each hop,
    /// so its sums go direct where one order is asked for or one rounding is due.
    /// Halving has the one order for powers of two, in an all_reduce.
    pub fn new(algorithm: Algorithm, shape: &Shape<'_>) -> Self {
        let reduces = !matches!(
            shape.collective,
            Collective::Broadcast | Collective::AllGather
        );
        let ordered = match algorithm {
            Algorithm::Naive | Algorithm::Tree | Algorithm::Direct => true,
            Algorithm::Halving => {
                shape.collective == Collective::AllReduce && shape.place.world.is_power_of_two()
            }
            Algorithm::Ring => false,
        };
        let rounds_each_hop = shape.widens && algorithm == Algorithm::Ring;
        let swap = reduces && ((shape.deterministic && !ordered) || rounds_each_hop);
        match (swap, shape.collective) {
            (false, _) => algorithm.into(),
            (true, Collective::AllReduce) => Self {
                reduce: Algorithm::Direct,
                spread: algorithm,
            },
            // Nothing is left of the algorithm where nothing is handed on.
            (true, _) => Algorithm::Direct.into(),
        }
    }

    /// The steps of one rank. Pure: nothing is moved.
    pub fn plan(self, shape: &Shape<'_>, plan: &mut Plan) {
        plan.clear();
        match self.mixed(shape) {
            None => self.reduce.family().plan(shape, plan),
            Some((first, second)) => {
                self.reduce.family().plan(&first, plan);
                self.spread.family().plan(&second, plan);
            }
        }
    }

    /// What one rank sends and receives, by formula.
    pub fn traffic(self, shape: &Shape<'_>) -> Traffic {
        if shape.place.world == 1 {
            return Traffic::default();
        }
        let [reduce, spread] = match self.mixed(shape) {
            None => self.reduce.family().flow(shape),
            Some((first, second)) => {
                let [reduce, _] = self.reduce.family().flow(&first);
                let [_, spread] = self.spread.family().flow(&second);
                [reduce, spread]
            }
        };
        let size = self.reduce_size(shape);
        let bytes = |of: fn(&Flow) -> usize| of(&reduce) * size + of(&spread) * shape.dtype.size();
        Traffic {
            sent: bytes(|flow| flow.sent),
            received: bytes(|flow| flow.received),
        }
    }

    /// Whether the first pass moves wide partial sums.
    pub(crate) fn carries_wide(self, shape: &Shape<'_>) -> bool {
        shape.widens && self.reduce.family().carries_partial_sums()
    }

    /// Bytes of an element in the first pass.
    pub(crate) fn reduce_size(self, shape: &Shape<'_>) -> usize {
        match self.carries_wide(shape) {
            true => shape.dtype.wide_size(),
            false => shape.dtype.size(),
        }
    }

    /// Where two algorithms meet: a reduce_scatter by the one and an all_gather by
    /// the other, over even parts.
    fn mixed<'a>(self, shape: &Shape<'a>) -> Option<(Shape<'a>, Shape<'a>)> {
        if self.reduce == self.spread {
            return None;
        }
        let parts = Parts::Even(Partition::new(shape.parts.len(), shape.place.world));
        let of = |collective| Shape {
            collective,
            parts,
            ..*shape
        };
        Some((of(Collective::ReduceScatter), of(Collective::AllGather)))
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reduce == self.spread {
            true => write!(f, "{}", self.reduce),
            false => write!(f, "{}+{}", self.reduce, self.spread),
        }
    }
}

impl FromStr for Route {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name.split_once('+') {
            None => name.parse().map(Algorithm::into),
            Some((reduce, spread)) => Ok(Self {
                reduce: reduce.parse()?,
                spread: spread.parse()?,
            }),
        }
    }
}

impl Serialize for Route {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Route {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let name = String::deserialize(from)?;
        name.parse().map_err(de::Error::custom)
    }
}
