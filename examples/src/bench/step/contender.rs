//! The ways to take a training step that are held against each other.
use std::{fmt, str::FromStr};

use ddp::{DdpConfig, Hook};
use zero::Stage;

use super::super::Wire;

/// As many as the largest world that one would compare with, on a machine of this kind.
const SHARDS: usize = 8;

/// One way to take a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contender {
    /// One process, the batch of one rank.
    SingleLocal,
    /// One process on one core, the batch of all ranks.
    SingleGlobal,
    /// The same on as many cores as there are ranks: another program, with Burn's `rayon`.
    SingleCores,
    /// As many processes as ranks, which do not know of each other.
    Plain,
    /// Data-parallel with the hook that sends nothing: taps, buckets and division alone.
    Noop,
    /// Data-parallel, as it is set by default.
    Ddp,
    /// The same, each bucket reduced by the training thread.
    Inline,
    /// The same, all buckets after the backward pass.
    NoOverlap,
    /// The same, an all-reduce for each parameter.
    PerParameter,
    /// The same in micro-shards, one a rank: equal bits for nothing.
    ShardARank,
    /// The same in eight micro-shards.
    Shards,
    /// One process, the batch of all ranks in eight micro-shards: the same bits again.
    SingleShards,
    /// ZeRO's first stage: each rank updates its part, and the parts are gathered.
    ZeroOne,
    /// The second: gradients are reduce-scattered.
    ZeroTwo,
    /// The third: parameters are gathered when they are used.
    ZeroThree,
    /// PyTorch's DDP over gloo: another program.
    Torch,
    /// The same with PyTorch's ZeroRedundancyOptimizer: what stage 1 is held against.
    TorchZro,
    /// PyTorch's `fully_shard`: what stage 3 is held against.
    TorchFsdp2,
}

impl Contender {
    /// Every contender, in the order of the table.
    pub const ALL: [Self; 18] = [
        Self::SingleLocal,
        Self::SingleGlobal,
        Self::SingleCores,
        Self::Plain,
        Self::Noop,
        Self::Ddp,
        Self::Inline,
        Self::NoOverlap,
        Self::PerParameter,
        Self::ShardARank,
        Self::Shards,
        Self::SingleShards,
        Self::ZeroOne,
        Self::ZeroTwo,
        Self::ZeroThree,
        Self::Torch,
        Self::TorchZro,
        Self::TorchFsdp2,
    ];

    /// As in JSON and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::SingleLocal => "single_local",
            Self::SingleGlobal => "single_global",
            Self::SingleCores => "single_cores",
            Self::Plain => "plain",
            Self::Noop => "ddp_noop",
            Self::Ddp => "ddp",
            Self::Inline => "ddp_inline",
            Self::NoOverlap => "ddp_no_overlap",
            Self::PerParameter => "ddp_per_parameter",
            Self::ShardARank => "ddp_shard_a_rank",
            Self::Shards => "ddp_shards",
            Self::SingleShards => "single_shards",
            Self::ZeroOne => "zero_1",
            Self::ZeroTwo => "zero_2",
            Self::ZeroThree => "zero_3",
            Self::Torch => "torch_ddp",
            Self::TorchZro => "torch_zro",
            Self::TorchFsdp2 => "torch_fsdp2",
        }
    }

    /// For people.
    pub(super) fn what(self, ranks: usize) -> String {
        match self {
            Self::SingleLocal => "one process, a rank's batch".to_owned(),
            Self::SingleGlobal => "one process, global batch, 1 core".to_owned(),
            Self::SingleCores => format!("one process, global batch, {ranks} cores"),
            Self::Plain => format!("{ranks} processes that train alone"),
            Self::Noop => "DDP, no-op hook".to_owned(),
            Self::Ddp => "DDP".to_owned(),
            Self::Inline => "DDP, inline".to_owned(),
            Self::NoOverlap => "DDP, no overlap".to_owned(),
            Self::PerParameter => "DDP, parameter by parameter".to_owned(),
            Self::ShardARank => format!("DDP, exact, V = {ranks}"),
            Self::Shards => format!("DDP, exact, V = {SHARDS}"),
            Self::SingleShards => format!("one process, exact, V = {SHARDS}"),
            Self::ZeroOne => "ZeRO 1".to_owned(),
            Self::ZeroTwo => "ZeRO 2".to_owned(),
            Self::ZeroThree => "ZeRO 3".to_owned(),
            Self::Torch => "PyTorch DDP over gloo".to_owned(),
            Self::TorchZro => "PyTorch DDP and ZRO over gloo".to_owned(),
            Self::TorchFsdp2 => "PyTorch FSDP2 over gloo".to_owned(),
        }
    }

    /// The settings of a contender that wraps its model, among `ranks`.
    pub(super) fn ddp(self, ranks: usize) -> Option<DdpConfig> {
        let config = DdpConfig::new();
        match self {
            Self::Ddp | Self::ZeroOne | Self::ZeroTwo | Self::ZeroThree => Some(config),
            Self::Noop => Some(config.with_comm_hook(Hook::Noop)),
            Self::Inline => Some(config.with_comm_thread(false)),
            Self::NoOverlap => Some(config.with_overlap(false)),
            Self::PerParameter => Some(config.with_bucket_cap_mb(0.0).with_first_bucket_mb(0.0)),
            Self::ShardARank => Some(config.with_micro_shards(ranks)),
            Self::Shards | Self::SingleShards => Some(config.with_micro_shards(SHARDS.max(ranks))),
            _ => None,
        }
    }

    /// What it shards, if anything.
    pub(super) fn stage(self) -> Option<Stage> {
        match self {
            Self::ZeroOne => Some(Stage::One),
            Self::ZeroTwo => Some(Stage::Two),
            Self::ZeroThree => Some(Stage::Three),
            _ => None,
        }
    }

    /// What `torch_step.py` calls it, if it is one of PyTorch's ways.
    pub(super) fn torch(self) -> Option<&'static str> {
        match self {
            Self::Torch => Some("ddp"),
            Self::TorchZro => Some("zro"),
            Self::TorchFsdp2 => Some("fsdp2"),
            _ => None,
        }
    }

    /// Whether its ranks are one world.
    pub(super) fn has_world(self) -> bool {
        self != Self::SingleShards && self.ddp(2).is_some()
    }

    /// Whether its ranks exchange anything over the wire.
    pub(super) fn exchanges(self) -> bool {
        self != Self::Noop && self.has_world()
    }

    /// Whether it has a place beside others on `wire`: on a slow one only what sends over
    /// it, and what that is held against.
    pub(super) fn belongs_on(self, wire: Wire) -> bool {
        wire == Wire::Local || self.has_world()
    }

    /// Whether it takes part with one rank only.
    pub(super) fn is_single(self) -> bool {
        matches!(
            self,
            Self::SingleLocal | Self::SingleGlobal | Self::SingleShards
        )
    }

    /// Whether another program does it.
    pub(super) fn is_outside(self) -> bool {
        self == Self::SingleCores || self.torch().is_some()
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A word that names no contender.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no row \"{word}\"; there are {all}")]
pub struct NoContender {
    word: String,
    all: String,
}

impl FromStr for Contender {
    type Err = NoContender;

    fn from_str(word: &str) -> Result<Self, NoContender> {
        let found = Self::ALL.into_iter().find(|row| row.name() == word);
        found.ok_or_else(|| NoContender {
            word: word.to_owned(),
            all: Self::ALL.map(Self::name).join(", "),
        })
    }
}
