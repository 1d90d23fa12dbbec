//! What can be reduced, and how.
use std::fmt;

use bytemuck::Pod;
use serde::{Deserialize, Serialize};

/// How the elements of all ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ReduceOp {
    /// Their sum. Integers wrap around.
    Sum,
    /// Their sum, divided once by the world size, in the elements' own type.
    /// Integers have none: asking for it is an error before anything moves.
    Mean,
    /// The smallest. A NaN anywhere gives NaN; −0 is smaller than +0.
    Min,
    /// The largest. A NaN anywhere gives NaN; +0 is larger than −0.
    Max,
    /// Their product. Integers wrap around.
    Product,
}

impl ReduceOp {
    /// Every operation.
    pub const ALL: [Self; 5] = [Self::Sum, Self::Mean, Self::Min, Self::Max, Self::Product];
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::Min => "min",
            Self::Max => "max",
            Self::Product => "product",
        })
    }
}

/// A plain number that may cross a wire. The list of types is closed: [`DType`].
pub trait Element: Pod + Send + Sync + fmt::Debug + PartialEq + sealed::Sealed {
    /// The type's name at run time.
    const DTYPE: DType;

    /// Folds `incoming` into `acc`, element by element. [`Mean`](ReduceOp::Mean)
    /// folds as [`Sum`](ReduceOp::Sum); [`divide`](Self::divide) completes it.
    ///
    /// # Panics
    ///
    /// Panics if the slices differ in length.
    fn fold(op: ReduceOp, acc: &mut [Self], incoming: &[Self]);

    /// Divides each element by `count`; integers are left as they are.
    fn divide(elements: &mut [Self], count: usize);
}

mod sealed {
    #[expect(unnameable_types, reason = "this is how a trait is sealed")]
    pub trait Sealed {}
}

/// Two numbers made one; the same bits whichever comes first.
trait Pair: Sized {
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn smaller(self, other: Self) -> Self;
    fn larger(self, other: Self) -> Self;
}

macro_rules! integers {
    ($($t:ident)*) => {$(
        impl Pair for $t {
            fn add(self, other: Self) -> Self { self.wrapping_add(other) }
            fn multiply(self, other: Self) -> Self { self.wrapping_mul(other) }
            fn smaller(self, other: Self) -> Self { Ord::min(self, other) }
            fn larger(self, other: Self) -> Self { Ord::max(self, other) }
        }
    )*};
}

macro_rules! floats {
    ($($t:ident)*) => {$(
        impl Pair for $t {
            fn add(self, other: Self) -> Self { self + other }
            fn multiply(self, other: Self) -> Self { self * other }
            // `f32::max` would drop a NaN, and keep either zero: the result would
            // depend on who was folded first.
            fn smaller(self, other: Self) -> Self {
                if self < other { self }
                else if other < self { other }
                else if self == other { Self::from_bits(self.to_bits() | other.to_bits()) }
                else { Self::NAN }
            }
            fn larger(self, other: Self) -> Self {
                if self > other { self }
                else if other > self { other }
                else if self == other { Self::from_bits(self.to_bits() & other.to_bits()) }
                else { Self::NAN }
            }
        }
    )*};
}

macro_rules! elements {
    ($($dtype:ident $t:ident, $divide:expr;)*) => {
        /// An element type's name at run time.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "lowercase")]
        #[non_exhaustive]
        pub enum DType {
            $(#[doc = concat!("`", stringify!($t), "`")] $dtype,)*
        }

        impl DType {
            /// Every element type.
            pub const ALL: &[Self] = &[$(Self::$dtype),*];

            /// Bytes in an element.
            pub fn size(self) -> usize {
                match self { $(Self::$dtype => size_of::<$t>(),)* }
            }

            /// The type's name in Rust.
            pub fn name(self) -> &'static str {
                match self { $(Self::$dtype => stringify!($t),)* }
            }
        }

        $(
            impl sealed::Sealed for $t {}

            impl Element for $t {
                const DTYPE: DType = DType::$dtype;

                fn fold(op: ReduceOp, acc: &mut [Self], incoming: &[Self]) {
                    assert_eq!(acc.len(), incoming.len(), "folded slices are of one length");
                    let pairs = acc.iter_mut().zip(incoming);
                    match op {
                        ReduceOp::Sum | ReduceOp::Mean => pairs.for_each(|(a, &b)| *a = a.add(b)),
                        ReduceOp::Min => pairs.for_each(|(a, &b)| *a = a.smaller(b)),
                        ReduceOp::Max => pairs.for_each(|(a, &b)| *a = a.larger(b)),
                        ReduceOp::Product => pairs.for_each(|(a, &b)| *a = a.multiply(b)),
                    }
                }

                fn divide(elements: &mut [Self], count: usize) {
                    let divide: fn(&mut [Self], usize) = $divide;
                    divide(elements, count);
                }
            }
        )*
    };
}

integers!(u8 i32 i64 u32 u64);
floats!(f32 f64);

// A new type is one row here, and a word above.
elements! {
    F32 f32, |elements, count| elements.iter_mut().for_each(|x| *x /= count as f32);
    F64 f64, |elements, count| elements.iter_mut().for_each(|x| *x /= count as f64);
    I32 i32, |_, _| ();
    I64 i64, |_, _| ();
    U8 u8, |_, _| ();
    U32 u32, |_, _| ();
    U64 u64, |_, _| ();
}

impl DType {
    /// Whether the type has a [`Mean`](ReduceOp::Mean).
    pub fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
