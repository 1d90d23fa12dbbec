//! A short number that stands for many bytes.

/// FNV-1a, 64 bits (Fowler, Noll, Vo; RFC 9923).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    pub(crate) fn finish(self) -> u64 {
        self.0
    }
}

/// FNV-1a over `bytes`.
pub(crate) fn fnv1a(bytes: &[u8]) -> u64 {
    let mut hash = Fnv::default();
    hash.bytes(bytes);
    hash.finish()
}

/// Words hashed side by side.
const LANES: usize = 4;

/// A hash of as many bytes as a model has: FNV-1a's step on words of eight bytes, in lanes, since
/// byte by byte it would take 0.8 ns each.
pub(crate) fn of_values(bytes: &[u8]) -> u64 {
    let step = |hash: u64, word: u64| {
        let hash = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hash ^ (hash >> 32)
    };
    let (words, rest) = bytes.as_chunks::<8>();
    let (rows, words) = words.as_chunks::<LANES>();
    let mut lanes: [u64; LANES] = std::array::from_fn(|lane| lane as u64);
    for row in rows {
        for (lane, word) in lanes.iter_mut().zip(row) {
            *lane = step(*lane, u64::from_le_bytes(*word));
        }
    }
    let tail = words.iter().map(|word| u64::from_le_bytes(*word));
    let hash = lanes.into_iter().chain(tail).fold(bytes.len() as u64, step);
    rest.iter()
        .fold(hash, |hash, &byte| step(hash, byte.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_and_the_length_count() {
        for len in [1, 7, 8, 31, 32, 33, 100] {
            let bytes: Vec<u8> = (0..len).map(|at| at as u8).collect();
            let hash = of_values(&bytes);
            for at in 0..len {
                let mut other = bytes.clone();
                other[at] ^= 0x80;
                assert_ne!(of_values(&other), hash, "byte {at} of {len}");
            }
            assert_ne!(of_values(&[&bytes[..], &[0]].concat()), hash);
        }
    }
}
