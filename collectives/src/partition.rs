//! Cutting a flat buffer into one contiguous range per rank.
use std::ops::Range;

/// A buffer cut into one part per rank, evenly or as the caller counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parts<'a> {
    /// As evenly as can be.
    Even(Partition),
    /// As many elements for each rank as stand here.
    Counted(&'a [usize]),
}

impl Parts<'_> {
    /// Elements in all parts.
    pub fn len(&self) -> usize {
        match self {
            Self::Even(partition) => partition.len,
            Self::Counted(counts) => total(counts),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The range that belongs to `part`.
    pub fn range(&self, part: usize) -> Range<usize> {
        self.span(part..part + 1)
    }

    /// The range of several parts that follow each other.
    pub fn span(&self, parts: Range<usize>) -> Range<usize> {
        match self {
            Self::Even(partition) => partition.span(parts),
            Self::Counted(counts) => {
                let start = total(&counts[..parts.start]);
                start..start.saturating_add(total(&counts[parts]))
            }
        }
    }
}

/// The sum of `counts`; of senseless ones, which no buffer fits, the largest number.
fn total(counts: &[usize]) -> usize {
    counts.iter().copied().fold(0, usize::saturating_add)
}

/// `len` elements cut into `parts` contiguous ranges, in order, without gap.
///
/// The lengths differ by at most one; ranges may be empty, so any length works
/// with any number of ranks. With a [piece](Self::with_piece) size the cuts fall
/// on multiples of it, and it is whole pieces that are dealt evenly.
///
/// ```
/// use collectives::Partition;
/// let cut = Partition::new(10, 4);
/// let ranges: Vec<_> = (0..4).map(|part| cut.range(part)).collect();
/// assert_eq!(ranges, [0..3, 3..6, 6..8, 8..10]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    len: usize,
    parts: usize,
    piece: usize,
}

impl Partition {
    /// Cuts `len` elements into `parts` ranges.
    ///
    /// # Panics
    ///
    /// Panics if `parts` is zero.
    pub fn new(len: usize, parts: usize) -> Self {
        assert!(parts > 0, "a partition has at least one part");
        Self {
            len,
            parts,
            piece: 1,
        }
    }

    /// Cuts only at multiples of `piece` elements; the last piece may be short.
    ///
    /// Pieces of 4096 are the unit of Alink's AllReduce.
    ///
    /// ```
    /// use collectives::Partition;
    /// let cut = Partition::new(8193, 2).with_piece(4096);
    /// assert_eq!([cut.range(0), cut.range(1)], [0..8192, 8192..8193]);
    /// ```
    ///
    /// # Panics
    ///
    /// Panics if `piece` is zero.
    pub fn with_piece(self, piece: usize) -> Self {
        assert!(piece > 0, "a piece holds at least one element");
        Self { piece, ..self }
    }

    /// The range that belongs to `part`.
    pub fn range(&self, part: usize) -> Range<usize> {
        self.start(part)..self.start(part + 1)
    }

    /// The range of several parts that follow each other.
    pub fn span(&self, parts: Range<usize>) -> Range<usize> {
        self.start(parts.start)..self.start(parts.end)
    }

    fn start(&self, part: usize) -> usize {
        let pieces = self.len.div_ceil(self.piece);
        let (each, extra) = (pieces / self.parts, pieces % self.parts);
        ((each * part + part.min(extra)) * self.piece).min(self.len)
    }
}
