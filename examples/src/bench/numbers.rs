//! Whole numbers to put in, and what must come out: exact in every type, so that
//! results are compared with `==`.
use collectives::{Element, ReduceOp, bf16, f16};

/// An element that can be made of a whole number, or of the quotient of two.
pub(super) trait Number: Element {
    /// The nearest element; integers wrap around.
    fn of(value: f64) -> Self;

    /// Its value, exactly; that of an integer above 2^53 nearly.
    fn value(self) -> f64;
}

macro_rules! numbers {
    ($($t:ty, $of:expr, $value:expr;)*) => {$(
        impl Number for $t {
            fn of(value: f64) -> Self {
                let of: fn(f64) -> Self = $of;
                of(value)
            }

            fn value(self) -> f64 {
                let value: fn(Self) -> f64 = $value;
                value(self)
            }
        }
    )*};
}

numbers! {
    f32, |x| x as f32, f64::from;
    f64, |x| x, |x| x;
    f16, f16::from_f64, f16::to_f64;
    bf16, bf16::from_f64, bf16::to_f64;
    i32, |x| x as i64 as i32, f64::from;
    i64, |x| x as i64, |x| x as f64;
    u8, |x| x as i64 as u8, f64::from;
    u32, |x| x as i64 as u32, f64::from;
    u64, |x| x as i64 as u64, |x| x as f64;
}

/// Runs an expression with `$T` standing for the type that a `DType` names.
macro_rules! with_type {
    ($dtype:expr, $T:ident => $run:expr) => {
        match $dtype {
            collectives::DType::F32 => {
                type $T = f32;
                $run
            }
            collectives::DType::F64 => {
                type $T = f64;
                $run
            }
            collectives::DType::F16 => {
                type $T = collectives::f16;
                $run
            }
            collectives::DType::BF16 => {
                type $T = collectives::bf16;
                $run
            }
            collectives::DType::I32 => {
                type $T = i32;
                $run
            }
            collectives::DType::I64 => {
                type $T = i64;
                $run
            }
            collectives::DType::U8 => {
                type $T = u8;
                $run
            }
            collectives::DType::U32 => {
                type $T = u32;
                $run
            }
            _ => {
                type $T = u64;
                $run
            }
        }
    };
}
pub(super) use with_type;

/// After so many elements the numbers come again.
const PERIOD: usize = 44;

/// What no rank puts in: where it is found, nothing has landed.
pub(super) const UNTOUCHED: f64 = 99.0;

/// What `rank` puts in at `index`.
fn put_in(op: ReduceOp, rank: usize, index: usize) -> f64 {
    match op {
        // At most sixteen ranks bring a two now and then: 16 bits hold the product.
        ReduceOp::Product if rank < 16 && (index + rank).is_multiple_of(4) => 2.0,
        ReduceOp::Product => 1.0,
        _ => ((index * 7 + rank * 13) % 11) as f64,
    }
}

/// What all ranks' numbers at `index` become. Of its own making: it must not share
/// a fault with the crate that it checks.
fn reduced(op: ReduceOp, world: usize, index: usize) -> f64 {
    let all = (0..world).map(|rank| put_in(op, rank, index));
    let bits =
        |of: fn(i64, i64) -> i64| all.clone().map(|x| x as i64).reduce(of).unwrap_or(0) as f64;
    match op {
        ReduceOp::Sum => all.sum(),
        ReduceOp::Mean => all.sum::<f64>() / world as f64,
        ReduceOp::Product => all.product(),
        ReduceOp::Min => all.fold(f64::INFINITY, f64::min),
        ReduceOp::Max => all.fold(f64::NEG_INFINITY, f64::max),
        ReduceOp::And => bits(|a, b| a & b),
        ReduceOp::Or => bits(|a, b| a | b),
        _ => bits(|a, b| a ^ b),
    }
}

/// Whose numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    /// Those that one rank puts in.
    Rank(usize),
    /// Those that all become.
    All,
}

/// The numbers at every index, computed once.
pub(super) struct Numbers<T> {
    op: ReduceOp,
    world: usize,
    all: Vec<T>,
}

impl<T: Number> Numbers<T> {
    pub(super) fn new(op: ReduceOp, world: usize) -> Self {
        let all = (0..PERIOD).map(|index| T::of(reduced(op, world, index)));
        Self {
            op,
            world,
            all: all.collect(),
        }
    }

    /// From `first` on, without end.
    pub(super) fn from(&self, whose: Whose, first: usize) -> impl Iterator<Item = T> + use<T> {
        let table: Vec<T> = match whose {
            Whose::All => self.all.clone(),
            Whose::Rank(rank) => {
                debug_assert!(rank < self.world);
                (0..PERIOD)
                    .map(|index| T::of(put_in(self.op, rank, index)))
                    .collect()
            }
        };
        (first..).map(move |index| table[index % PERIOD])
    }
}
