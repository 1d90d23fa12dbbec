//! Sizes as nccl-tests writes them, and the sweep from one to another.
use std::{fmt, num::NonZeroUsize, str::FromStr};

/// A number of bytes: `8`, `4K`, `16M`, `1G`; K is 1024.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub usize);

const UNITS: [(char, u32); 3] = [('K', 10), ('M', 20), ('G', 30)];

/// A text that is no size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no size \"{0}\": a whole number is needed, and K, M or G may follow")]
pub struct NoSize(String);

impl FromStr for Bytes {
    type Err = NoSize;

    fn from_str(text: &str) -> Result<Self, NoSize> {
        let no_size = || NoSize(text.to_owned());
        let unit = UNITS
            .iter()
            .find(|(letter, _)| text.to_uppercase().ends_with(*letter));
        let (digits, shift) = match unit {
            Some((letter, shift)) => (
                text.trim_end_matches(|c: char| c.eq_ignore_ascii_case(letter)),
                *shift,
            ),
            None => (text, 0),
        };
        if unit.is_some() && digits.len() + 1 != text.len() {
            return Err(no_size());
        }
        let number: usize = digits.parse().map_err(|_| no_size())?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(no_size)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole =
            |&(_, shift): &(char, u32)| self.0 >> shift > 0 && self.0.trailing_zeros() >= shift;
        match UNITS.into_iter().rev().find(whole) {
            Some((letter, shift)) => write!(f, "{}{letter}", self.0 >> shift),
            None => write!(f, "{}", self.0),
        }
    }
}

/// How a sweep goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// So many times larger.
    Factor(NonZeroUsize),
    /// So many bytes more.
    Step(NonZeroUsize),
}

/// Every size from `first` to `last`.
///
/// ```
/// use examples::bench::{Bytes, Next, sizes};
/// let four = std::num::NonZeroUsize::new(4).unwrap();
/// let sweep = sizes(Bytes(1024), Bytes(1 << 20), Next::Factor(four)).unwrap();
/// assert_eq!(sweep.len(), 6);
/// ```
///
/// # Errors
///
/// Says what is allowed if the sweep would be empty or without end.
pub fn sizes(first: Bytes, last: Bytes, next: Next) -> Result<Vec<Bytes>, String> {
    if first > last {
        return Err(format!(
            "no sizes from {first} up to {last}: -b must not be above -e"
        ));
    }
    let endless = match next {
        Next::Factor(factor) => first.0 == 0 || factor.get() == 1,
        Next::Step(_) => false,
    };
    if endless && first != last {
        let what = "a sweep by -f needs a factor of at least 2 and -b of at least 1; -i adds bytes instead";
        return Err(what.to_owned());
    }
    let grow = |size: &Bytes| match next {
        _ if *size == last => None,
        Next::Factor(factor) => size.0.checked_mul(factor.get()).map(Bytes),
        Next::Step(step) => size.0.checked_add(step.get()).map(Bytes),
    };
    Ok(std::iter::successors(Some(first), grow)
        .take_while(|size| *size <= last)
        .collect())
}
