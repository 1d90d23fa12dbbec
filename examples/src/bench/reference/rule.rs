//! How close to gloo a result must be, and why not closer.
use std::fmt;

use collectives::{Collective, DType, ReduceOp};

use super::{Case, Way, answer};

/// What a result is held to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// The same bits, though every hop rounds: a ring's all_reduce adds up in gloo's order.
    Bits,
    /// The same bits, since there is nothing to round, or one addition, which has no order:
    /// what is only moved, integers, minima and maxima, and what two ranks make.
    Equal,
    /// Within N·ε·Σ|x|, for a product N·ε·∏|x|.
    ///
    /// A sum of N in any order is off by at most (N - 1) ε/2 · Σ|x|, to first order, and
    /// both sides may be. Of a mean, N times smaller, that also covers the rounding of both
    /// divisions. A product is off by (N - 1) ε/2 of itself.
    Bound,
    /// At least as near as gloo to the exact result: 16-bit sums are carried in 32 bits
    /// and rounded once, where gloo rounds at every hop. What those 32 bits may lose
    /// themselves, N·2^-23·Σ|x|, is allowed for.
    Nearer,
    /// An error of the caller: gloo refuses, and so do we.
    Refused,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bits => "bits",
            Self::Equal => "==",
            Self::Bound => "N·ε·Σ|x|",
            Self::Nearer => "nearer",
            Self::Refused => "refused",
        })
    }
}

impl Rule {
    /// The rule for a case that is carried out in this way.
    pub fn of(case: &Case, way: Way) -> Self {
        let ring = way == Way::RING && case.collective == Collective::AllReduce;
        match case.dtype {
            _ if answer(case).is_some_and(|answer| answer.refused) => Self::Refused,
            _ if !case.rounds() || case.world <= 2 => Self::Equal,
            DType::F16 | DType::BF16 => Self::Nearer,
            _ if ring && case.reduce != Some(ReduceOp::Product) => Self::Bits,
            _ => Self::Bound,
        }
    }

    /// Whether `ours`, of other bits, is close enough to `gloo`'s, given what the ranks
    /// put in. A NaN never is.
    pub fn allows(
        self,
        case: &Case,
        addends: impl Iterator<Item = f64> + Clone,
        ours: f64,
        gloo: f64,
    ) -> bool {
        let fold = |addends: &mut dyn Iterator<Item = f64>| match case.reduce {
            Some(ReduceOp::Product) => addends.product(),
            Some(ReduceOp::Mean) => addends.sum::<f64>() / case.world as f64,
            _ => addends.sum(),
        };
        let epsilon = match case.dtype {
            DType::F64 => f64::EPSILON,
            _ => f32::EPSILON.into(),
        };
        let bound = || case.world as f64 * epsilon * fold(&mut addends.clone().map(f64::abs));
        match self {
            Self::Bound => (ours - gloo).abs() <= bound(),
            Self::Nearer => {
                let exact = fold(&mut addends.clone());
                (ours - exact).abs() <= (gloo - exact).abs() + bound()
            }
            _ => false,
        }
    }
}
