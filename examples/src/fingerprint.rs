//! A short number that stands for many bits.

/// FNV-1a over the bytes of `words` (64 bits; Fowler, Noll, Vo). Two ranks
/// with the same number hold the same bits, but for a chance of 2^-64.
///
/// ```
/// assert_eq!(examples::fingerprint([]), 0xcbf2_9ce4_8422_2325);
/// assert_ne!(examples::fingerprint([1]), examples::fingerprint([2]));
/// ```
pub fn fingerprint(words: impl IntoIterator<Item = u64>) -> u64 {
    words
        .into_iter()
        .flat_map(u64::to_le_bytes)
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
}
