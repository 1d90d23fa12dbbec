//! What is sharded: one number.
use ddp::{DdpConfig, Hook};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// What each rank holds only a part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub enum Stage {
    /// The optimizer's state. Gradients are all-reduced, as DDP does.
    One,
    /// Gradients too: buckets are reduce-scattered.
    Two,
    /// Parameters too: buckets of them are gathered when they are used, and let go.
    Three,
}

impl Stage {
    /// Every stage there is.
    pub const ALL: [Self; 3] = [Self::One, Self::Two, Self::Three];
}

impl TryFrom<u8> for Stage {
    type Error = String;

    fn try_from(number: u8) -> Result<Self, String> {
        let found = Self::ALL
            .into_iter()
            .find(|&stage| u8::from(stage) == number);
        found.ok_or_else(|| format!("stage = {number}: 1, 2 or 3"))
    }
}

impl From<Stage> for u8 {
    fn from(stage: Stage) -> Self {
        match stage {
            Stage::One => 1,
            Stage::Two => 2,
            Stage::Three => 3,
        }
    }
}

/// How training is sharded.
///
/// ```
/// let config: zero::ZeroConfig = serde_json::from_str(r#"{"stage": 2}"#)?;
/// assert_eq!(config, zero::ZeroConfig::new(zero::Stage::Two));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ZeroConfig {
    /// What is sharded.
    pub stage: Stage,
    /// How gradients are reduced: DDP's settings, all with the meaning they have there.
    #[serde(default)]
    pub ddp: DdpConfig,
}

impl ZeroConfig {
    /// That stage, with DDP's defaults.
    ///
    /// ```
    /// let config = zero::ZeroConfig::new(zero::Stage::Two);
    /// assert_eq!(config.ddp, ddp::DdpConfig::new());
    /// ```
    pub fn new(stage: Stage) -> Self {
        Self {
            stage,
            ddp: DdpConfig::new(),
        }
    }

    /// Reduces gradients as `ddp` says.
    pub fn with_ddp(self, ddp: DdpConfig) -> Self {
        Self { ddp, ..self }
    }

    /// Checks every setting that can be checked without a world.
    ///
    /// # Errors
    ///
    /// [`ddp::Error::Config`] names the first setting that has no meaning.
    pub fn validate(&self) -> Result<()> {
        self.ddp.validate()?;
        if self.stage > Stage::One && self.ddp.comm_hook != Hook::AllReduce {
            return Err(Error::Ddp(ddp::Error::Config {
                name: "comm_hook",
                value: self.ddp.comm_hook.make().name().to_owned(),
                expected: "all_reduce from stage 2 on, where buckets are reduce-scattered as they are",
            }));
        }
        if self.stage == Stage::Three && self.ddp.check_replicas_every > 0 {
            return Err(Error::Ddp(ddp::Error::Config {
                name: "check_replicas_every",
                value: self.ddp.check_replicas_every.to_string(),
                expected: "0 at stage 3, where no two ranks hold the same",
            }));
        }
        Ok(())
    }
}
