//! What one step did, and when.
use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Serialize, Serializer};

/// One data-parallel step as this rank saw it. All times count from the beginning of its backward
/// pass, the last one if there were several. Serialised, they are whole microseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StepRecord {
    /// Number of the step, from 1.
    pub step: u64,
    /// This rank.
    pub rank: usize,
    /// Mean loss over the samples of all ranks.
    pub loss: f64,
    /// Samples of all ranks.
    pub samples: u64,
    /// Backward passes of this rank that were reduced together.
    pub micro_batches: usize,
    /// Most bytes of micro-shards' partial sums that waited for their twin at one time, beside the
    /// buckets; as many as [`Shards::partial_sums`](crate::Shards::partial_sums) says.
    pub partial_bytes: usize,
    /// Norm over all mean gradients, before clipping, if [`max_grad_norm`] asks for it.
    ///
    /// [`max_grad_norm`]: crate::DdpConfig::max_grad_norm
    pub grad_norm: Option<f64>,
    /// Ranks whose own gradients or loss were no numbers.
    pub non_finite: Vec<usize>,
    /// Whether the step was left out, on all ranks, because of gradients that are no numbers. If
    /// `non_finite` names nobody, the sum over the ranks overflowed.
    pub skipped: bool,
    /// Whether a communication thread reduced the buckets while the backward pass ran, so that it
    /// could hide anything.
    pub overlapped: bool,
    /// How long Burn's backward pass took, with what the training thread itself reduced in it.
    #[serde(rename = "backward_us", serialize_with = "micros")]
    pub backward: Duration,
    /// How long the training thread was kept by communication: waiting after the backward pass, and
    /// reducing in it if there is no communication thread.
    #[serde(rename = "exposed_us", serialize_with = "micros")]
    pub exposed: Duration,
    /// The buckets, in the order in which they were reduced.
    pub buckets: Vec<BucketRecord>,
    /// Parameters that no rank used, in visiting order; they got no gradient.
    pub unused: Vec<String>,
}

/// One bucket of a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BucketRecord {
    /// Elements reduced, the tail included.
    pub elements: usize,
    /// Bytes reduced, the tail included.
    pub bytes: usize,
    /// When its last gradient arrived, or when backward was over and the rest counted as zero.
    #[serde(rename = "ready_us", serialize_with = "micros")]
    pub ready: Duration,
    /// When its all-reduce started on this rank.
    #[serde(rename = "start_us", serialize_with = "micros")]
    pub start: Duration,
    /// When its mean was there.
    #[serde(rename = "end_us", serialize_with = "micros")]
    pub end: Duration,
    /// Parameters in it.
    pub slots: usize,
    /// The algorithm that ran; `blocks` where micro-shards do not close, `none` if nothing was sent.
    pub algorithm: String,
}

fn micros<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(time.as_micros() as u64)
}

impl StepRecord {
    /// The algorithms by which buckets were reduced, each once.
    pub fn algorithms(&self) -> Vec<String> {
        let all: BTreeSet<_> = self
            .buckets
            .iter()
            .map(|bucket| &bucket.algorithm)
            .collect();
        all.into_iter().cloned().collect()
    }

    /// Share of the all-reduce time that lies inside the backward pass, 0 to 1; 0 without any, and
    /// if it did not run beside it.
    ///
    /// ```
    /// use std::time::Duration;
    /// let ms = Duration::from_millis;
    /// let bucket = |start, end| ddp::BucketRecord {
    ///     elements: 1, bytes: 4, ready: ms(start), start: ms(start), end: ms(end), slots: 1,
    ///     algorithm: "ring".into(),
    /// };
    /// let step = ddp::StepRecord {
    ///     overlapped: true,
    ///     backward: ms(10),
    ///     buckets: vec![bucket(2, 5), bucket(9, 12)],
    ///     ..Default::default()
    /// };
    /// assert_eq!(step.hidden(), 4.0 / 6.0);
    /// ```
    pub fn hidden(&self) -> f64 {
        if !self.overlapped {
            return 0.0;
        }
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
