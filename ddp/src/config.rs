//! How replicas exchange gradients: settings, all with defaults.
use serde::{Deserialize, Serialize};

use crate::bucket::Caps;
use crate::{Error, Hook, Result};

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
    /// V micro-shards a global batch, for the same bits at every world size; 0 for none. See
    /// [`accumulate`](crate::DistributedDataParallel::accumulate).
    pub micro_shards: usize,
    /// Largest norm over all mean gradients; above it they are scaled down. 0 for no limit.
    pub max_grad_norm: f64,
    /// Whether all ranks leave out a step in which a gradient of any of them is no number, or
    /// take the numbers as they are. With [`broadcast_buffers`](Self::broadcast_buffers) the running
    /// state of BatchNorm is left as it was too.
    pub skip_non_finite: bool,
    /// What becomes of a bucket between the ranks.
    pub comm_hook: Hook,
    /// Whether rank 0's running state of BatchNorm goes to all ranks after every step.
    pub broadcast_buffers: bool,
    /// Steps between two comparisons of all replicas' values; 0 for none.
    pub check_replicas_every: u64,
    /// Whether a thread of its own reduces the buckets, or the training thread where one is full.
    ///
    /// The thread is better or no worse also where ranks fill the cores. A step over that of
    /// [`Hook::Noop`] (2 ranks on 2 cores, in-process, `bench step`, 2026-11-30; medians of 10 and 40
    /// rounds, of which the second were taken beside other work):
    ///
    /// | model | thread | inline | after the backward pass |
    /// |---|---|---|---|
    /// | 784-2048x8-10 | 1.055 | 1.166 | 1.095 |
    /// | 784-1024-1024-10 | 1.088 | 1.104 | 1.079 |
    pub comm_thread: bool,
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

/// Sample counts stay exact in f32 up to here; see [`LIMBS`](crate::bucket::LIMBS).
const MOST_SHARDS: usize = 4096;

/// A rung costs as many operations; far more than this would look like a hang.
const MOST_RUNG_STRIDE: usize = 1 << 16;

impl Default for DdpConfig {
    fn default() -> Self {
        Self {
            bucket_cap_mb: 25.0,
            first_bucket_mb: 1.0,
            overlap: true,
            rung_stride: RUNG_STRIDE,
            micro_shards: 0,
            max_grad_norm: 0.0,
            skip_non_finite: true,
            comm_hook: Hook::AllReduce,
            broadcast_buffers: true,
            check_replicas_every: 0,
            comm_thread: true,
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
    pub fn with_comm_thread(self, comm_thread: bool) -> Self {
        Self {
            comm_thread,
            ..self
        }
    }

    /// Cuts each global batch into `shards` micro-shards: the same bits at every world size.
    pub fn with_micro_shards(self, shards: usize) -> Self {
        Self {
            micro_shards: shards,
            ..self
        }
    }

    /// Limits the norm over all mean gradients.
    pub fn with_max_grad_norm(self, norm: f64) -> Self {
        Self {
            max_grad_norm: norm,
            ..self
        }
    }

    /// Leaves out steps with gradients that are no numbers, or not.
    pub fn with_skip_non_finite(self, skip: bool) -> Self {
        Self {
            skip_non_finite: skip,
            ..self
        }
    }

    /// Takes buckets through the ranks by one of this crate's hooks; for one of your own see
    /// [`register_comm_hook`](crate::DistributedDataParallel::register_comm_hook).
    pub fn with_comm_hook(self, hook: Hook) -> Self {
        Self {
            comm_hook: hook,
            ..self
        }
    }

    /// Sends rank 0's running state of BatchNorm to all ranks after every step, or not.
    pub fn with_broadcast_buffers(self, broadcast: bool) -> Self {
        Self {
            broadcast_buffers: broadcast,
            ..self
        }
    }

    /// Compares all replicas' values after every `steps` steps.
    pub fn with_check_replicas_every(self, steps: u64) -> Self {
        Self {
            check_replicas_every: steps,
            ..self
        }
    }

    /// Checks every setting that can be checked without a world.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] names the first setting that has no meaning.
    pub fn validate(&self) -> Result<()> {
        self.caps().map(drop)
    }

    /// What must be the same on all ranks, a line each; the first says whether bits are to be equal
    /// at every world size.
    pub(crate) fn signature(&self) -> String {
        let Self {
            bucket_cap_mb,
            first_bucket_mb,
            // This rank's own affair.
            overlap: _,
            rung_stride: _,
            comm_thread: _,
            micro_shards,
            max_grad_norm,
            skip_non_finite,
            comm_hook,
            broadcast_buffers,
            check_replicas_every,
        } = self;
        format!(
            "micro_shards: {micro_shards}\n\
             first_bucket_mb, bucket_cap_mb: {first_bucket_mb} {bucket_cap_mb}\n\
             max_grad_norm: {max_grad_norm}\n\
             skip_non_finite: {skip_non_finite}\n\
             comm_hook: {}\n\
             broadcast_buffers: {broadcast_buffers}\n\
             check_replicas_every: {check_replicas_every}",
            comm_hook.make().name(),
        )
    }

    pub(crate) fn caps(&self) -> Result<Caps> {
        if self.rung_stride > MOST_RUNG_STRIDE {
            return Err(Error::Config {
                name: "rung_stride",
                value: self.rung_stride.to_string(),
                expected: "0 to 65536",
            });
        }
        if self.micro_shards > MOST_SHARDS {
            return Err(Error::Config {
                name: "micro_shards",
                value: self.micro_shards.to_string(),
                expected: "0 to 4096",
            });
        }
        if !(self.max_grad_norm.is_finite() && self.max_grad_norm >= 0.0) {
            return Err(Error::Config {
                name: "max_grad_norm",
                value: self.max_grad_norm.to_string(),
                expected: "a finite number, 0 or above",
            });
        }
        if self.micro_shards > 0 && self.comm_hook != Hook::AllReduce {
            return Err(Error::Config {
                name: "comm_hook",
                value: self.comm_hook.make().name().to_owned(),
                expected: "all_reduce with micro_shards: rounding what each rank sends would give \
                           other bits at other world sizes",
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
