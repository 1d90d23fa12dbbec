//! A way to carry out a case.
use std::fmt;

use collectives::{Algorithm, CommunicatorConfig};

/// An algorithm, and whether all sums have one order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Way {
    /// The algorithm that is asked for.
    pub algorithm: Algorithm,
    /// Whether the order of a sum is the same by every algorithm.
    pub deterministic: bool,
}

impl Way {
    /// The way that gloo goes.
    pub const RING: Self = Self {
        algorithm: Algorithm::Ring,
        deterministic: false,
    };

    /// Every algorithm in its own order, then every algorithm in the one order.
    pub fn all() -> Vec<Self> {
        let by = |deterministic| {
            Algorithm::ALL.iter().map(move |&algorithm| Self {
                algorithm,
                deterministic,
            })
        };
        by(false).chain(by(true)).collect()
    }

    pub(super) fn config(self) -> CommunicatorConfig {
        CommunicatorConfig::new()
            .with_algorithm(self.algorithm)
            .with_deterministic(self.deterministic)
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = match self.deterministic {
            true => ", deterministic",
            false => "",
        };
        write!(f, "{}{order}", self.algorithm)
    }
}
