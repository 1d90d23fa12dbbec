//! Times of one thing measured many times.

/// Microseconds, one for each call: that of the slowest rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Times(Vec<f64>);

impl Times {
    /// These times, in any order.
    ///
    /// ```
    /// let times = examples::bench::Times::new(vec![3.0, 1.0, 2.0]);
    /// assert_eq!([times.min(), times.median(), times.p99()], [1.0, 2.0, 3.0]);
    /// ```
    pub fn new(mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        Self(times)
    }

    /// These times and those of another round.
    pub fn and(mut self, round: Self) -> Self {
        self.0.extend(round.0);
        Self::new(self.0)
    }

    /// The shortest.
    pub fn min(&self) -> f64 {
        self.at(0.0)
    }

    /// The one that a quarter of all do not exceed.
    pub fn quartile(&self) -> f64 {
        self.at(0.25)
    }

    /// The one in the middle.
    pub fn median(&self) -> f64 {
        self.at(0.5)
    }

    /// The one that 99 of 100 do not exceed; the longest of less than a hundred.
    pub fn p99(&self) -> f64 {
        self.at(0.99)
    }

    /// The smallest time that a share of all does not exceed; none measured, no number.
    fn at(&self, share: f64) -> f64 {
        let rank = (share * self.0.len() as f64).ceil() as usize;
        self.0.get(rank.max(1) - 1).copied().unwrap_or(f64::NAN)
    }
}
