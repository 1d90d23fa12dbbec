//! How replicas exchange gradients: settings, all with defaults.
use serde::{Deserialize, Serialize};

use crate::bucket::Caps;
use crate::{Error, Result};

/// How replicas exchange gradients. MB means 2^20 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DdpConfig {
    /// Cap of a bucket; 0 reduces every parameter on its own.
    pub bucket_cap_mb: f64,
    /// Cap of the first bucket, small so that communication starts early.
    pub first_bucket_mb: f64,
    /// Whether buckets are reduced while the backward pass runs, or all after it.
    pub overlap: bool,
    /// Depth from one rung to the next; more than the operations between the first uses of two
    /// parameters that follow each other. 0 takes the rungs out: gradients stay right, the
    /// overlap is gone.
    pub rung_stride: usize,
    /// Which thread reduces the buckets.
    pub comm_thread: CommThread,
}

/// Which thread reduces the buckets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CommThread {
    /// Whichever is measured to be better.
    #[default]
    Auto,
    /// One beside the training thread: a bucket's time is hidden where a core, or a link, is free.
    Always,
    /// The training thread itself, at the moment in which a bucket is full.
    Never,
}

/// Twice what attention needs, about 30 operations from one parameter to the next, and still
/// cheap. A step in ms (flex, one rank, best of 6 x 10, loaded 2-core machine, 2026-11-30):
///
/// | stride                        | no taps | 0    | 16   | 64   | 256  | 1024 | 4096 |
/// |-------------------------------|---------|------|------|------|------|------|------|
/// | 784-1024-1024-10, batch 128   | 54.8    | 61.7 | 59.7 | 56.4 | 54.2 | 58.2 | 56.3 |
/// | 200 layers of 32, batch 32    | 10.0    | 11.4 | 5.8  | 8.3  | 15.4 | 34.1 | 115  |
///
/// Burn's tape allocates once per unit of depth, which shows only in the second row.
const RUNG_STRIDE: usize = 64;

/// A rung costs as many operations; far more than this would look like a hang.
const MOST_RUNG_STRIDE: usize = 1 << 16;

impl Default for DdpConfig {
    fn default() -> Self {
        Self {
            bucket_cap_mb: 25.0,
            first_bucket_mb: 1.0,
            overlap: true,
            rung_stride: RUNG_STRIDE,
            comm_thread: CommThread::Auto,
        }
    }
}

impl DdpConfig {
    /// The defaults: 25 MB buckets after a first of 1 MB, overlapped.
    ///
    /// ```
    /// let config = ddp::DdpConfig::new().with_bucket_cap_mb(0.5).with_overlap(false);
    /// assert_eq!((config.bucket_cap_mb, config.first_bucket_mb), (0.5, 1.0));
    /// ```
    pub fn new() -> Self {
        Self::default()
    }

    /// Caps buckets at `mb`.
    pub fn with_bucket_cap_mb(self, mb: f64) -> Self {
        Self {
            bucket_cap_mb: mb,
            ..self
        }
    }

    /// Caps the first bucket at `mb`.
    pub fn with_first_bucket_mb(self, mb: f64) -> Self {
        Self {
            first_bucket_mb: mb,
            ..self
        }
    }

    /// Overlaps communication with the backward pass, or not.
    pub fn with_overlap(self, overlap: bool) -> Self {
        Self { overlap, ..self }
    }

    /// Sets the depth between rungs.
    pub fn with_rung_stride(self, stride: usize) -> Self {
        Self {
            rung_stride: stride,
            ..self
        }
    }

    /// Reduces buckets on a thread of their own, or on the training thread.
    pub fn with_comm_thread(self, comm_thread: CommThread) -> Self {
        Self {
            comm_thread,
            ..self
        }
    }

    /// Checks every setting.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] names the first setting that has no meaning.
    pub fn validate(&self) -> Result<()> {
        self.caps().map(drop)
    }

    pub(crate) fn caps(&self) -> Result<Caps> {
        if self.rung_stride > MOST_RUNG_STRIDE {
            return Err(Error::Config {
                name: "rung_stride",
                value: self.rung_stride.to_string(),
                expected: "0 to 65536",
            });
        }
        let bytes = |name, mb: f64| {
            if mb.is_finite() && mb >= 0.0 {
                Ok((mb * f64::from(1 << 20)) as usize)
            } else {
                let expected = "a number of MB, 0 or more";
                Err(Error::Config {
                    name,
                    value: mb.to_string(),
                    expected,
                })
            }
        };
        Ok(Caps {
            first_bytes: bytes("first_bucket_mb", self.first_bucket_mb)?,
            bucket_bytes: bytes("bucket_cap_mb", self.bucket_cap_mb)?,
        })
    }
}
