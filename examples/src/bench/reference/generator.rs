//! Inputs too large to record: drawn anew from a seed, here and in Python alike.
use collectives::DType;

use crate::SplitMix64;

/// A number in [-1, 1) of the upper 53 of 64 bits; exact.
///
/// ```
/// use examples::bench::reference::unit;
/// assert_eq!([unit(0), unit(1 << 63)], [-1.0, 0.0]);
/// ```
pub fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 * (-52f64).exp2() - 1.0
}

/// What `rank` puts into a case of that seed, as little-endian bytes; none but f32 and
/// f64 are drawn.
///
/// Numbers in [-1, 1): the upper 24 bits of a draw, or 53 for f64, halved as often as its
/// lower three bits say; every step is exact. Without the halving most sums would be exact
/// too, in any order. A rank's draws are those of the stream that starts at `seed + rank`.
///
/// ```
/// use collectives::DType;
/// let bytes = examples::bench::reference::inputs(1, 0, DType::F64, 1).unwrap();
/// assert_eq!(bytes.len(), 8);
/// ```
pub fn inputs(seed: u64, rank: usize, dtype: DType, len: usize) -> Option<Vec<u8>> {
    let mut stream = SplitMix64::new(seed.wrapping_add(rank as u64));
    let draws = (0..len).map(|_| stream.next_u64());
    let halved = |bits: u64, kept: u64| unit(bits & kept) / f64::from(1u32 << (bits & 7));
    match dtype {
        DType::F32 => Some(
            draws
                .flat_map(|bits| (halved(bits, !0 << 40) as f32).to_le_bytes())
                .collect(),
        ),
        DType::F64 => Some(
            draws
                .flat_map(|bits| halved(bits, !0).to_le_bytes())
                .collect(),
        ),
        _ => None,
    }
}
