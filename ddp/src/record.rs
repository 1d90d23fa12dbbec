//! What one step did, and when.
use std::time::Duration;

/// One data-parallel backward pass as this rank saw it. All times count from its beginning.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepRecord {
    /// Mean loss over the samples of all ranks.
    pub loss: f64,
    /// Samples of all ranks.
    pub samples: u64,
    /// How long Burn's backward pass took.
    pub backward: Duration,
    /// How long this rank then waited for the rest of the communication.
    pub exposed: Duration,
    /// The buckets, in the order in which they were reduced.
    pub buckets: Vec<BucketRecord>,
    /// Parameters that no rank used, in visiting order; they got no gradient.
    pub unused: Vec<String>,
}

/// One bucket of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct BucketRecord {
    /// Elements reduced, the tail included.
    pub elements: usize,
    /// Bytes reduced, the tail included.
    pub bytes: usize,
    /// When its last gradient arrived, or when backward was over and the rest counted as zero.
    pub ready: Duration,
    /// When its all-reduce started on this rank.
    pub start: Duration,
    /// When its mean was there.
    pub end: Duration,
    /// Parameters in it.
    pub slots: usize,
}

impl StepRecord {
    /// Share of the all-reduce time that lies inside the backward pass, 0 to 1; 0 without any.
    ///
    /// ```
    /// use std::time::Duration;
    /// let ms = Duration::from_millis;
    /// let bucket = |start, end| ddp::BucketRecord {
    ///     elements: 1, bytes: 4, ready: ms(start), start: ms(start), end: ms(end), slots: 1,
    /// };
    /// let step = ddp::StepRecord {
    ///     backward: ms(10),
    ///     buckets: vec![bucket(2, 5), bucket(9, 12)],
    ///     ..Default::default()
    /// };
    /// assert_eq!(step.hidden(), 4.0 / 6.0);
    /// ```
    pub fn hidden(&self) -> f64 {
        let (inside, all) = self
            .buckets
            .iter()
            .fold((0.0, 0.0), |(inside, all), bucket| {
                let until = bucket.end.min(self.backward);
                (
                    inside + until.saturating_sub(bucket.start).as_secs_f64(),
                    all + bucket.end.saturating_sub(bucket.start).as_secs_f64(),
                )
            });
        if all > 0.0 { inside / all } else { 0.0 }
    }
}
