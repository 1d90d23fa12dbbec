//! What can go wrong, in words a user can act on.

/// Why data-parallel training stopped on this rank.
///
/// After any error of a [`DistributedDataParallel`](crate::DistributedDataParallel) every later
/// call on it returns that same error: the replicas can no longer be known to agree.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A collective failed; [`collectives::Error::ranks`] names the ranks at fault.
    #[error("{0}")]
    Collective(#[from] collectives::Error),

    /// A setting has no meaning.
    #[error("{name} = {value}: {expected}")]
    Config {
        /// The setting.
        name: &'static str,
        /// What it was set to.
        value: String,
        /// What would be right.
        expected: &'static str,
    },

    /// The ranks hold different models, or bucket settings.
    #[error(
        "ranks {ranks:?} hold another model or other settings than rank 0. First difference, line {line}:\n  rank 0: {zero}\n  rank {}: {other}",
        ranks[0]
    )]
    ModelMismatch {
        /// Every rank that differs from rank 0, never empty.
        ranks: Vec<usize>,
        /// Number of the first line that differs, from 1.
        line: usize,
        /// That line on rank 0.
        zero: String,
        /// That line on the first of `ranks`.
        other: String,
    },

    /// The ranks are not the same program on the same kind of processor, and equal bits were asked for.
    #[error(
        "micro_shards promises equal bits only for one program on one kind of processor, and ranks {ranks:?} differ from rank 0.\n  rank 0: {zero}\n  rank {}: {other}",
        ranks[0]
    )]
    PlatformMismatch {
        /// Every rank that differs from rank 0, never empty.
        ranks: Vec<usize>,
        /// The first difference, on rank 0.
        zero: String,
        /// The same on the first of `ranks`.
        other: String,
    },

    /// A hook reduced gradients and left the counts behind them as they were.
    #[error(
        "the communication hook {hook} did not sum a bucket's tail, so there is no sample total to divide by: it calls `all_reduce` of the bucket, or `all_reduce_tail` beside what it does with the gradients"
    )]
    HookLeftTail {
        /// Name of the hook.
        hook: &'static str,
    },

    /// A layer whose numbers depend on more than its input, where equal bits were asked for.
    #[error(
        "{layer} at {path} cannot keep the promise of micro_shards, the same bits at every world size: {why}"
    )]
    NotExact {
        /// Type of the layer.
        layer: String,
        /// Its path in the module.
        path: String,
        /// What it depends on, and what to do.
        why: &'static str,
    },

    /// A step had more or fewer micro-batches than this rank has micro-shards.
    #[error(
        "{call} got {got} micro-batches and this rank, {rank}, holds {due} of the {shards} micro-shards: pass each of them, once and in order, as `Batch::micro_shards` has them if the sampler was made `with_micro_shards({shards})`"
    )]
    MicroShards {
        /// The call that counts them: `accumulate`, which may have been `backward`, or `weighted_mean`.
        call: &'static str,
        /// This rank.
        rank: usize,
        /// Micro-shards of this rank.
        due: usize,
        /// Micro-batches that came.
        got: usize,
        /// Micro-shards of a global batch.
        shards: usize,
    },

    /// The replicas hold different values.
    #[error(
        "after step {step} ranks {ranks:?} hold other values than rank 0 in {parameter}, the first that differs of {of}"
    )]
    ReplicasDiffer {
        /// Steps done.
        step: u64,
        /// Every rank that differs from rank 0 in that parameter, never empty.
        ranks: Vec<usize>,
        /// Path of the first parameter that differs.
        parameter: String,
        /// How many parameters differ.
        of: usize,
    },

    /// Gradients can be f32 or f64, and quantized parameters cannot be copied.
    #[error(
        "parameter {parameter} is {dtype}; trained parameters are f32 or f64, frozen ones of any type but quantized ones: cast it"
    )]
    UnsupportedDtype {
        /// Path of the parameter.
        parameter: String,
        /// Its element type.
        dtype: String,
    },

    /// A parameter already carries a reparameterization, and Burn allows one.
    #[error(
        "parameter {parameter} already carries `{by}`, and Burn allows one reparameterization: call `materialize()` on the module before wrapping it"
    )]
    Reparameterized {
        /// Path of the parameter.
        parameter: String,
        /// Name of the reparameterization it carries.
        by: String,
    },

    /// The module lies on several devices.
    #[error(
        "the module lies on {0} devices; a rank holds its replica on one: move it with `to_device` first"
    )]
    ManyDevices(usize),

    /// A gradient arrived twice in one backward pass.
    #[error("parameter {parameter} got a second gradient in one backward pass")]
    ReadyTwice {
        /// Path of the parameter.
        parameter: String,
    },

    /// A gradient does not have its parameter's size and element type.
    #[error("the gradient of {parameter} is {got}, the parameter {expected}")]
    GradientMismatch {
        /// Path of the parameter.
        parameter: String,
        /// Elements and type of the parameter.
        expected: String,
        /// Elements and type of the gradient.
        got: String,
    },

    /// A parameter was used both through `val()` and around it.
    #[error(
        "parameter {parameter} was used through `val()` and also around it (`base()` or a deref), so that a part of its gradient missed the all-reduce: use `val()` everywhere"
    )]
    LeafGradient {
        /// Path of the parameter.
        parameter: String,
    },

    /// A change made a parameter trainable that the replica was not made with.
    #[error(
        "parameter {parameter} is to be trained, but was frozen or absent when the replica was made, so that its gradient would not be reduced: take the module out with `into_module()` and wrap it again"
    )]
    NotWrapped {
        /// Path of the parameter.
        parameter: String,
    },

    /// The loss is not one number.
    #[error(
        "the loss has {0} elements; backward takes the mean over this rank's samples, one number"
    )]
    LossShape(usize),

    /// No rank had a sample in this step.
    #[error("no rank had a sample in this step, so there is no mean to take")]
    NoSamples,

    /// Burn's backward pass panicked.
    #[error("the backward pass panicked: {0}")]
    Backward(String),

    /// A call came in the wrong state.
    #[error("{0}")]
    State(&'static str),
}

impl Error {
    /// Whether every rank has come to the same error, so that nobody needs to be told: to tell
    /// them might come before their own.
    pub(crate) fn is_everyones(&self) -> bool {
        matches!(
            self,
            Self::ModelMismatch { .. }
                | Self::PlatformMismatch { .. }
                | Self::ReplicasDiffer { .. }
                | Self::HookLeftTail { .. }
                | Self::NoSamples
        )
    }

    /// The ranks at fault, as far as they are known.
    pub fn ranks(&self) -> Vec<usize> {
        match self {
            Self::Collective(error) => error.ranks(),
            Self::ModelMismatch { ranks, .. }
            | Self::PlatformMismatch { ranks, .. }
            | Self::ReplicasDiffer { ranks, .. } => ranks.clone(),
            Self::MicroShards { rank, .. } => vec![*rank],
            _ => Vec::new(),
        }
    }
}

/// What ddp's fallible calls return.
pub type Result<T, E = Error> = std::result::Result<T, E>;
