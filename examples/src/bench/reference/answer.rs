//! What we say where gloo says no.
use collectives::{Collective, DType, ReduceOp};

use super::Case;

/// A kind of call that gloo does not carry out.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    /// The kind.
    pub what: &'static str,
    /// Whether a case is of that kind.
    pub holds: fn(&Case) -> bool,
    /// Whether it is an error here too: of the caller, on every rank. If not, the
    /// result is that of a plain fold in rank order.
    pub refused: bool,
}

/// No case is of two kinds.
pub const ANSWERS: [Answer; 8] = [
    Answer {
        what: "a mean of integers",
        holds: |case| case.reduce == Some(ReduceOp::Mean) && !case.dtype.is_float(),
        refused: true,
    },
    Answer {
        what: "bits of floats",
        holds: |case| {
            use ReduceOp::{And, Or, Xor};
            case.dtype.is_float() && matches!(case.reduce, Some(And | Or | Xor))
        },
        refused: true,
    },
    Answer {
        what: "a root that is no rank",
        holds: |case| case.root >= case.world,
        refused: true,
    },
    Answer {
        what: "a message to oneself",
        holds: |case| case.collective == Collective::SendRecv && case.root == 0,
        refused: true,
    },
    Answer {
        what: "an all_to_all of unequal parts",
        holds: |case| case.collective == Collective::AllToAll && is_unequal(case),
        refused: true,
    },
    Answer {
        what: "an all_gather of unequal parts",
        holds: |case| case.collective == Collective::AllGather && case.counts.is_some(),
        refused: false,
    },
    Answer {
        what: "a reduce_scatter of unequal parts",
        holds: |case| case.collective == Collective::ReduceScatter && is_unequal(case),
        refused: false,
    },
    Answer {
        what: "unsigned integers of 32 and 64 bits",
        holds: |case| matches!(case.dtype, DType::U32 | DType::U64),
        refused: false,
    },
];

/// The kind of a case, if it is of one.
pub fn answer(case: &Case) -> Option<&'static Answer> {
    ANSWERS.iter().find(|answer| (answer.holds)(case))
}

fn is_unequal(case: &Case) -> bool {
    !case.len.is_multiple_of(case.world)
}
