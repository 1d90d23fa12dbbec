//! What can be reduced, and how.
use std::fmt;

use bytemuck::Pod;
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// How the elements of all ranks become one.
///
/// Floats follow IEEE 754 whatever the algorithm: a NaN on any rank gives NaN, and so do
/// infinities of both signs in a sum, or an infinity and a zero in a product; which of
/// several NaNs is not promised. All ranks get the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ReduceOp {
    /// Their sum. Integers wrap around.
    Sum,
    /// Their sum, divided once by the world size. Floats only.
    Mean,
    /// The smallest. A NaN anywhere gives NaN; −0 is smaller than +0.
    Min,
    /// The largest. A NaN anywhere gives NaN; +0 is larger than −0.
    Max,
    /// Their product. Integers wrap around.
    Product,
    /// The bits that are set in all. Integers only.
    And,
    /// The bits that are set in any. Integers only.
    Or,
    /// The bits that are set in an odd number. Integers only.
    Xor,
}

impl ReduceOp {
    /// Every operation.
    pub const ALL: [Self; 8] = [
        Self::Sum,
        Self::Mean,
        Self::Min,
        Self::Max,
        Self::Product,
        Self::And,
        Self::Or,
        Self::Xor,
    ];

    /// Whether elements of `dtype` can be reduced so.
    pub fn suits(self, dtype: DType) -> bool {
        match self {
            Self::Sum | Self::Min | Self::Max | Self::Product => true,
            Self::Mean => dtype.is_float(),
            Self::And | Self::Or | Self::Xor => !dtype.is_float(),
        }
    }

    /// The operation's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::Min => "min",
            Self::Max => "max",
            Self::Product => "product",
            Self::And => "and",
            Self::Or => "or",
            Self::Xor => "xor",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What folds the elements of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operator {
    /// One of the operations that have a name.
    Named(ReduceOp),
    /// The caller's own.
    User,
}

impl Operator {
    /// Whether elements of `dtype` are [wide](Element::Wide) while they are folded.
    ///
    /// A minimum needs no more bits, and what a caller's own operator needs is not known.
    pub fn widens(self, dtype: DType) -> bool {
        use ReduceOp::{Mean, Product, Sum};
        matches!(self, Self::Named(Sum | Mean | Product)) && dtype.wide_size() > dtype.size()
    }
}

impl fmt::Display for Operator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(op) => write!(f, "{op}"),
            Self::User => f.write_str("the caller's operator"),
        }
    }
}

/// A plain number that may cross a wire. The list of types is closed: [`DType`].
pub trait Element: Pod + Send + Sync + fmt::Debug + PartialEq + sealed::Sealed {
    /// The type's name at run time.
    const DTYPE: DType;

    /// The type in which sums and products of this one are carried: `f32` for the
    /// 16-bit floats, which are rounded once, at the end; the type itself otherwise.
    type Wide: Element<Wide = Self::Wide>;

    /// The same number, wide.
    fn widen(self) -> Self::Wide;

    /// The nearest number of this type.
    fn narrow(wide: Self::Wide) -> Self;

    /// Folds `incoming` into `acc`, element by element. [`Mean`](ReduceOp::Mean)
    /// folds as [`Sum`](ReduceOp::Sum); [`divide`](Self::divide) completes it.
    ///
    /// # Panics
    ///
    /// Panics if the slices differ in length, or if `op` does not
    /// [suit](ReduceOp::suits) the type.
    fn fold(op: ReduceOp, acc: &mut [Self], incoming: &[Self]);

    /// Divides each element by `count`; integers are left as they are.
    fn divide(elements: &mut [Self], count: usize);

    /// Makes every NaN the one NaN: whose bits a sum of two keeps depends on who was
    /// folded first. Integers are left as they are.
    fn settle(elements: &mut [Self]);
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
    fn bits(op: ReduceOp, this: Self, other: Self) -> Self;
    fn divided(self, count: usize) -> Self;
    fn settled(self) -> Self;
}

macro_rules! integers {
    ($($t:ident)*) => {$(
        impl Pair for $t {
            fn add(self, other: Self) -> Self { self.wrapping_add(other) }
            fn multiply(self, other: Self) -> Self { self.wrapping_mul(other) }
            fn smaller(self, other: Self) -> Self { Ord::min(self, other) }
            fn larger(self, other: Self) -> Self { Ord::max(self, other) }
            fn bits(op: ReduceOp, this: Self, other: Self) -> Self {
                match op {
                    ReduceOp::And => this & other,
                    ReduceOp::Or => this | other,
                    _ => this ^ other,
                }
            }
            fn divided(self, _count: usize) -> Self { self }
            fn settled(self) -> Self { self }
        }
    )*};
}

macro_rules! floats {
    ($($t:ident, $divided:expr;)*) => {$(
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
            fn bits(op: ReduceOp, _: Self, _: Self) -> Self {
                unreachable!("a communicator refuses {op} of floats")
            }
            fn divided(self, count: usize) -> Self {
                let divided: fn(Self, usize) -> Self = $divided;
                divided(self, count)
            }
            fn settled(self) -> Self { if self.is_nan() { Self::NAN } else { self } }
        }
    )*};
}

macro_rules! elements {
    ($($dtype:ident $t:ident $wide:ident, $widen:expr, $narrow:expr;)*) => {
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

            /// Bytes in an element while it is [summed](Element::Wide).
            pub fn wide_size(self) -> usize {
                match self { $(Self::$dtype => size_of::<$wide>(),)* }
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

                type Wide = $wide;

                // Across crates a call per element costs several times the fold itself.
                #[inline(always)]
                fn widen(self) -> $wide {
                    let widen: fn($t) -> $wide = $widen;
                    widen(self)
                }

                #[inline(always)]
                fn narrow(wide: $wide) -> Self {
                    let narrow: fn($wide) -> $t = $narrow;
                    narrow(wide)
                }

                fn fold(op: ReduceOp, acc: &mut [Self], incoming: &[Self]) {
                    assert_eq!(acc.len(), incoming.len(), "folded slices are of one length");
                    let pairs = acc.iter_mut().zip(incoming);
                    match op {
                        ReduceOp::Sum | ReduceOp::Mean => pairs.for_each(|(a, &b)| *a = a.add(b)),
                        ReduceOp::Min => pairs.for_each(|(a, &b)| *a = a.smaller(b)),
                        ReduceOp::Max => pairs.for_each(|(a, &b)| *a = a.larger(b)),
                        ReduceOp::Product => pairs.for_each(|(a, &b)| *a = a.multiply(b)),
                        bits => pairs.for_each(|(a, &b)| *a = Pair::bits(bits, *a, b)),
                    }
                }

                fn divide(elements: &mut [Self], count: usize) {
                    elements.iter_mut().for_each(|x| *x = x.divided(count));
                }

                fn settle(elements: &mut [Self]) {
                    elements.iter_mut().for_each(|x| *x = x.settled());
                }
            }
        )*
    };
}

integers!(u8 i32 i64 u32 u64);
floats! {
    f32, |x, count| x / count as f32;
    f64, |x, count| x / count as f64;
    f16, |x, count| Self::from_f32(x.to_f32() / count as f32);
    bf16, |x, count| Self::from_f32(x.to_f32() / count as f32);
}

// A new type is one row here, and one above.
elements! {
    F32 f32 f32, |x| x, |x| x;
    F64 f64 f64, |x| x, |x| x;
    F16 f16 f32, |x| x.to_f32(), |x| Self::from_f32(x);
    BF16 bf16 f32, |x| x.to_f32(), |x| Self::from_f32(x);
    I32 i32 i32, |x| x, |x| x;
    I64 i64 i64, |x| x, |x| x;
    U8 u8 u8, |x| x, |x| x;
    U32 u32 u32, |x| x, |x| x;
    U64 u64 u64, |x| x, |x| x;
}

impl DType {
    /// Whether the type has fractions, and so a [`Mean`](ReduceOp::Mean).
    pub fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64 | Self::F16 | Self::BF16)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
