//! Time over size: the line through it, and where two of them cross.
use collectives::{Algorithm, Collective, tuning::Cost};

/// The times of one algorithm among so many ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// The operation.
    pub collective: Collective,
    /// Among how many ranks.
    pub ranks: usize,
    /// By which algorithm.
    pub algorithm: Algorithm,
    /// Bytes and microseconds, in ascending order of bytes.
    pub points: Vec<(usize, f64)>,
}

/// From where one algorithm is faster than another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overtaking {
    /// At every size measured.
    Throughout,
    /// From this many bytes on.
    From(usize),
    /// At no size up to the largest.
    Never,
}

impl Curve {
    /// The cost that fits best.
    pub fn cost(&self) -> Cost {
        Cost::fit(self.collective, self.ranks, self.algorithm, &self.points)
    }

    /// From which size on this one is faster than `other`: the split of the sizes that
    /// loses least, in logarithms of time, if the one is used below it and the other
    /// above; between two sizes where the lines between the measured times cross. A tie goes
    /// to `other`.
    ///
    /// ```
    /// use collectives::{Algorithm, Collective};
    /// use examples::bench::{Curve, Overtaking};
    /// let curve = |algorithm, points: &[(usize, f64)]| Curve {
    ///     collective: Collective::AllReduce,
    ///     ranks: 4,
    ///     algorithm,
    ///     points: points.to_vec(),
    /// };
    /// let tree = curve(Algorithm::Tree, &[(1024, 1.0), (4096, 4.0)]);
    /// let ring = curve(Algorithm::Ring, &[(1024, 2.0), (4096, 2.0)]);
    /// assert_eq!(ring.overtakes(&tree), Overtaking::From(2048));
    /// assert_eq!(tree.overtakes(&ring), Overtaking::Never);
    /// ```
    pub fn overtakes(&self, other: &Self) -> Overtaking {
        // Above 0 where this one is faster; logarithms, so that a cost line is one.
        let lead: Vec<(f64, f64)> = (self.points.iter())
            .filter_map(|&(bytes, time)| {
                let (_, others) = other.points.iter().find(|point| point.0 == bytes)?;
                Some(((bytes as f64).ln(), (others / time).ln()))
            })
            .collect();
        let mut best = (0, 0.0);
        let mut gain = 0.0;
        for (index, point) in lead.iter().enumerate() {
            gain -= point.1;
            if gain >= best.1 {
                best = (index + 1, gain);
            }
        }
        match best.0 {
            0 => Overtaking::Throughout,
            split if split == lead.len() => Overtaking::Never,
            split => {
                let ((x0, y0), (x1, y1)) = (lead[split - 1], lead[split]);
                // The one is not ahead at the size before, nor behind at the size after.
                let x = if y1 > y0 {
                    x0 - y0 * (x1 - x0) / (y1 - y0)
                } else {
                    x0
                };
                Overtaking::From(x.exp().round() as usize)
            }
        }
    }
}
