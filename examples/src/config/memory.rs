//! `[memory]`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::ConfigError;
use crate::{OptimizerKind, Settings};

/// `[memory]`, read by `mlp memory` only.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemorySettings {
    /// Ranks, one run of ddp and of every stage for each.
    pub world_sizes: Vec<usize>,
    /// Whether an allocator counts, beside the objects that are there.
    pub measure: bool,
    /// File for a drawing; empty for none.
    pub svg: PathBuf,
}

impl Default for MemorySettings {
    fn default() -> Self {
        Self {
            world_sizes: vec![1, 2, 4, 8],
            measure: true,
            svg: PathBuf::new(),
        }
    }
}

impl Settings {
    /// Defaults of `mlp memory`: 1.3 M parameters in nine buckets, with Adam; a second's work.
    pub fn memory() -> Self {
        let mut settings = Self::train();
        settings.model.layers = [&[784][..], &[384; 8], &[10]].concat();
        settings.optim.kind = OptimizerKind::Adam;
        settings.ddp.first_bucket_mb = 0.02;
        settings.ddp.bucket_cap_mb = 0.7;
        settings
    }

    /// Refuses what `mlp memory` has no formula for.
    ///
    /// # Errors
    /// [`ConfigError`] names the first setting.
    pub fn check_memory(&self) -> Result<(), ConfigError> {
        let refused = |key, value: String, what: &str| Err(ConfigError::value(key, value, what));
        let worlds = &self.memory.world_sizes;
        if worlds.is_empty() || worlds.iter().any(|world| !(1..=64).contains(world)) {
            let what = "one or more world sizes of 1 to 64";
            return refused("memory.world_sizes", format!("{worlds:?}"), what);
        }
        let kind = self.optim.kind;
        if !matches!(kind, OptimizerKind::Adam | OptimizerKind::AdamW)
            || self.optim.weight_decay > 0.0
        {
            let what =
                "adam or adamw without weight decay: the peak of a step is that of their updates";
            return refused("optim.kind", format!("\"{kind}\""), what);
        }
        if self.ddp.check_replicas_every > 0 {
            let what = "0: at stage 3 no two ranks hold the same";
            let every = self.ddp.check_replicas_every.to_string();
            return refused("ddp.check_replicas_every", every, what);
        }
        if self.ddp.micro_shards > 0 {
            let what = "0: partial sums come on top, as many as `partial_bytes` in the log says";
            return refused("ddp.micro_shards", self.ddp.micro_shards.to_string(), what);
        }
        Ok(())
    }
}
