//! The gradient tap: sees the gradient of a parameter while the backward pass is still running.
//!
//! A tap is an identity operation behind [`Param::val`](burn::module::Param::val), put there by
//! Burn's reparameterization, so that no model changes. Its backward step copies the finished
//! gradient into the reducer's bucket and stores none on the leaf.
//!
//! Burn's tape runs by depth, the deepest first, and an operation on a leaf has depth 1: a plain
//! tap fires last, after the whole backward pass. So each tap has a second, untracked parent, a
//! *rung*, whose depth grows with the order in which the forward pass uses the parameters.
//!
//! The tapped tensor is cached until it fires: a weight used twice fires once, with the sum. There
//! may be several under one tap, of clones of the module with older values.
//! Outside [`backward`](crate::DistributedDataParallel::backward) a tap lets the gradient pass to
//! its leaf, as if it were not there.
#![cfg_attr(
    feature = "ndarray",
    allow(deprecated, reason = "Burn 0.22 is the last with that backend")
)]
use std::any::Any;
use std::fmt::{self, Debug, Formatter};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::module::{Module, Reparameterization};
use burn::tensor::{DType, Tensor, TensorData, try_read_sync};
use burn_autodiff::NodeId;
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};

use crate::bucket::BucketPlan;
use crate::buffer::Gradient;
use crate::loan::{Borrower, Failure, Lender, Loans, Pass};
use crate::reducer::Reducer;
use crate::{Error, Result};

/// A backend whose gradients may be seen on the host without a copy.
pub(crate) trait ReadGradient: Backend {
    /// The values of `tensor` in order, if they lie so.
    fn values(tensor: &FloatTensor<Self>) -> Option<Gradient<'_>>;
}

impl ReadGradient for Flex {
    fn values(tensor: &FloatTensor<Self>) -> Option<Gradient<'_>> {
        match tensor.dtype() {
            DType::F32 => tensor.as_slice().map(Gradient::F32),
            DType::F64 => tensor.as_slice().map(Gradient::F64),
            _ => None,
        }
    }
}

// Its layout is its own affair, and a gradient that nobody else holds is read without a copy.
#[cfg(feature = "ndarray")]
impl ReadGradient for burn::backend::NdArray {
    fn values(_: &FloatTensor<Self>) -> Option<Gradient<'_>> {
        None
    }
}

/// Calls `deliver` with the values of `tensor`, copied only where they cannot be seen.
fn read<B: ReadGradient>(
    tensor: FloatTensor<B>,
    deliver: impl FnOnce(Gradient<'_>) -> Result<()>,
) -> Result<()> {
    if let Some(values) = B::values(&tensor) {
        return deliver(values);
    }
    match try_read_sync(B::float_into_data(tensor)) {
        Some(Ok(data)) => deliver(view(&data)?),
        _ => Err(Error::State("a gradient cannot be read on the host")),
    }
}

/// The values of `data`, as a gradient.
pub(crate) fn view(data: &TensorData) -> Result<Gradient<'_>> {
    match data.dtype() {
        DType::F32 => data.as_slice().ok().map(Gradient::F32),
        DType::F64 => data.as_slice().ok().map(Gradient::F64),
        _ => None,
    }
    .ok_or(Error::State("a gradient is neither f32 nor f64"))
}

/// The tap as an operation of a backend. Another backend: its name here, and two impls like those
/// of NdArray.
#[backend_extension(Flex, NdArray: cfg(feature = "ndarray"), Autodiff)]
pub(crate) trait TapBackend: Backend {
    /// Returns `parameter`; its gradient goes to `tap`. `rung` is there for its depth alone.
    fn tap(parameter: FloatTensor<Self>, rung: FloatTensor<Self>, tap: Tap) -> FloatTensor<Self>;

    /// Returns what is lent in the place of `placeholder`, to which its gradient goes.
    fn lend(placeholder: FloatTensor<Self>, borrower: Borrower) -> FloatTensor<Self>;

    /// Returns `parameter`, which is from now on the leaf whose gradient `tap` delivers.
    fn own(parameter: FloatTensor<Self>, tap: Tap) -> FloatTensor<Self>;
}

impl TapBackend for Flex {
    fn tap(parameter: FloatTensor<Self>, _: FloatTensor<Self>, _: Tap) -> FloatTensor<Self> {
        parameter
    }

    fn lend(placeholder: FloatTensor<Self>, borrower: Borrower) -> FloatTensor<Self> {
        borrower.values::<Self>(&placeholder)
    }

    fn own(parameter: FloatTensor<Self>, _: Tap) -> FloatTensor<Self> {
        parameter
    }
}

#[cfg(feature = "ndarray")]
impl TapBackend for burn::backend::NdArray {
    fn tap(parameter: FloatTensor<Self>, _: FloatTensor<Self>, _: Tap) -> FloatTensor<Self> {
        parameter
    }

    fn lend(placeholder: FloatTensor<Self>, borrower: Borrower) -> FloatTensor<Self> {
        borrower.values::<Self>(&placeholder)
    }

    fn own(parameter: FloatTensor<Self>, _: Tap) -> FloatTensor<Self> {
        parameter
    }
}

impl<B: ReadGradient, C: CheckpointStrategy> TapBackend for Autodiff<B, C> {
    fn tap(parameter: FloatTensor<Self>, rung: FloatTensor<Self>, tap: Tap) -> FloatTensor<Self> {
        let leaf = parameter.id();
        if let Some(tapped) = tap.cached(leaf) {
            return tapped;
        }
        tap.line.climb(tap.slot);
        let (primitive, node) = parameter.into_parts();
        let (_, rung) = rung.into_parts();
        let operation = Operation.prepare::<C>([node, rung]).compute_bound();
        let tapped: FloatTensor<Self> = match operation.stateful() {
            OpsKind::Tracked(operation) => operation.finish(tap.trigger(), primitive),
            OpsKind::UnTracked(operation) => operation.finish(primitive),
        };
        tap.cache(leaf, tapped.clone());
        tapped
    }

    fn lend(placeholder: FloatTensor<Self>, borrower: Borrower) -> FloatTensor<Self> {
        borrower.tracked::<B, C>(placeholder)
    }

    fn own(parameter: FloatTensor<Self>, tap: Tap) -> FloatTensor<Self> {
        lock(&tap.line.leaves)[tap.slot] = Some(parameter.id());
        parameter
    }
}

#[derive(Debug)]
struct Operation;

impl<B: ReadGradient> Backward<B, 2> for Operation {
    type State = Trigger;

    // Runs under the lock of this rank's graph: copies, enqueues, and never panics.
    fn backward(self, ops: Ops<Trigger, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<B>(&ops.node);
        let (Trigger { slot, line, cache }, [leaf, _rung]) = (ops.state, ops.parents);
        if let (Some(cache), Some(leaf)) = (cache.upgrade(), &leaf) {
            lock(&cache).retain(|(id, _)| *id != leaf.id);
        }
        // A clone with other values has leaves of its own, and what reaches those is not ours.
        let own = leaf
            .as_ref()
            .is_some_and(|leaf| lock(&line.leaves)[slot] == Some(leaf.id));
        if let Some(loans) = line.loans.get() {
            loans.done(slot);
        }
        let mut link = lock(&line.link);
        match (&mut *link, leaf) {
            (Link::Live { reducer, error }, _) if own => {
                let delivered = read::<B>(gradient, |gradient| reducer.ready(slot, gradient));
                if let Err(first) = delivered {
                    error.get_or_insert(first);
                }
            }
            (_, Some(leaf)) => gradients.register::<B>(leaf.id, gradient),
            (_, None) => {}
        }
    }
}

/// A leaf, and the tensor that came of it, of a type that only its backend knows.
type Tapped = (NodeId, Box<dyn Any + Send>);

/// The replica's own leaf and those of clones that are used by turns with it, a teacher say. Beyond
/// these the oldest are let go, so that clones that come and go without a backward pass pile up
/// nothing.
const MOST_TAPPED: usize = 8;

/// One parameter's tap.
#[derive(Clone)]
pub(crate) struct Tap {
    slot: usize,
    line: Arc<Line>,
    cache: Arc<Mutex<Vec<Tapped>>>,
}

impl Tap {
    pub(crate) fn new(slot: usize, line: Arc<Line>) -> Self {
        Self {
            slot,
            line,
            cache: Arc::default(),
        }
    }

    /// Delivers the gradient of this leaf from now on.
    pub(crate) fn own<const D: usize>(&self, leaf: Tensor<D>) {
        if leaf.is_autodiff() {
            drop(<Dispatch as TapBackend>::own(
                leaf.into_dispatch(),
                self.clone(),
            ));
        }
    }

    /// Lets go of the tapped tensors, and with them of the parameter's values.
    pub(crate) fn forget(&self) {
        lock(&self.cache).clear();
    }

    fn trigger(&self) -> Trigger {
        Trigger {
            slot: self.slot,
            line: self.line.clone(),
            cache: Arc::downgrade(&self.cache),
        }
    }

    fn cached<T: Clone + 'static>(&self, leaf: NodeId) -> Option<T> {
        let cache = lock(&self.cache);
        // Other leaves under this tap: a step was taken, or a clone of the module was changed.
        let (_, tapped) = cache.iter().find(|(id, _)| *id == leaf)?;
        tapped.downcast_ref().cloned()
    }

    fn cache<T: Send + 'static>(&self, leaf: NodeId, tapped: T) {
        let mut cache = lock(&self.cache);
        if cache.len() == MOST_TAPPED {
            cache.remove(0);
        }
        cache.push((leaf, Box::new(tapped)));
    }
}

impl Debug for Tap {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "Tap({})", self.slot)
    }
}

/// What Burn's graph holds of a tap. Weak, since the cached tensor holds the graph.
#[derive(Clone, Debug)]
struct Trigger {
    slot: usize,
    line: Arc<Line>,
    cache: Weak<Mutex<Vec<Tapped>>>,
}

/// What the taps of one replica share.
pub(crate) struct Line {
    stride: usize,
    ladder: Mutex<Ladder>,
    /// The replica's own leaf of each slot.
    leaves: Mutex<Vec<Option<NodeId>>>,
    link: Mutex<Link>,
    /// The values, if the module holds placeholders.
    loans: OnceLock<Arc<Loans>>,
    /// The error of a value that came late.
    failure: Failure,
}

/// Rung k has depth k x stride. Built as far as needed, kept for ever: one element each.
struct Ladder {
    rungs: Vec<Tensor<1>>,
    /// Slots that the forward pass has used, in order.
    used: Vec<usize>,
    slots: usize,
}

/// Where gradients go.
enum Link {
    /// To their leaves.
    Open,
    /// To the reducer, during a backward pass; the first error waits for the end.
    Live {
        reducer: Box<Reducer>,
        error: Option<Error>,
    },
}

impl Line {
    pub(crate) fn new(slots: usize, stride: usize) -> Arc<Self> {
        let ladder = Ladder {
            rungs: Vec::new(),
            used: Vec::new(),
            slots,
        };
        Arc::new(Self {
            stride,
            ladder: Mutex::new(ladder),
            leaves: Mutex::new(vec![None; slots]),
            link: Mutex::new(Link::Open),
            loans: OnceLock::new(),
            failure: Failure::default(),
        })
    }

    /// Takes values from `lender` from now on, if none has been named before; with `ahead`, a bucket
    /// ahead of their use.
    pub(crate) fn lend_from(&self, lender: Arc<dyn Lender>, plan: BucketPlan, ahead: bool) {
        let failure = self.failure.clone();
        self.loans
            .get_or_init(|| Arc::new(Loans::new(lender, plan, ahead, failure)));
    }

    /// Gives back what was borrowed, since a pass begins or ends, or values change.
    pub(crate) fn settle(&self, next: Pass) {
        if let Some(loans) = self.loans.get() {
            loans.settle(next);
        }
    }

    /// The most bytes that were lent at a time.
    pub(crate) fn most_lent(&self) -> usize {
        self.loans.get().map_or(0, |loans| loans.most())
    }

    /// Takes the error of a value that could not be had.
    pub(crate) fn failure(&self) -> &Failure {
        &self.failure
    }

    /// Per bucket, whether backward passes borrow its values; empty while none has.
    pub(crate) fn lent_again(&self) -> Vec<bool> {
        self.loans
            .get()
            .map_or_else(Vec::new, |loans| loans.lent_again())
    }

    /// Hands the gradients to `reducer` until [`unplug`](Self::unplug).
    pub(crate) fn plug(&self, reducer: Box<Reducer>) {
        *lock(&self.link) = Link::Live {
            reducer,
            error: None,
        };
    }

    /// Takes the reducer back, with the first error of a tap.
    ///
    /// # Panics
    ///
    /// If none is plugged in.
    pub(crate) fn unplug(&self) -> (Box<Reducer>, Option<Error>) {
        match std::mem::replace(&mut *lock(&self.link), Link::Open) {
            Link::Live { reducer, error } => (reducer, error),
            Link::Open => panic!("unplug follows plug"),
        }
    }

    /// The next forward pass begins at the lowest rung.
    pub(crate) fn descend(&self) {
        lock(&self.ladder).used.clear();
    }

    fn climb(&self, slot: usize) {
        lock(&self.ladder).used.push(slot);
    }

    /// The slots that the forward pass has used so far, each once, in the order of their first use.
    pub(crate) fn uses(&self) -> Vec<usize> {
        let ladder = lock(&self.ladder);
        let mut seen = vec![false; ladder.slots];
        let first = |slot: &&usize| !std::mem::replace(&mut seen[**slot], true);
        ladder.used.iter().filter(first).copied().collect()
    }

    fn rung<const D: usize>(&self, like: &Tensor<D>) -> Tensor<1> {
        let mut ladder = lock(&self.ladder);
        let rung = if self.stride == 0 {
            0
        } else {
            ladder.used.len().min(ladder.slots)
        };
        if ladder.rungs.is_empty() {
            ladder.rungs.push(Tensor::zeros([1], &like.device()));
        }
        while ladder.rungs.len() <= rung {
            let last = ladder.rungs[ladder.rungs.len() - 1].clone();
            ladder
                .rungs
                .push((0..self.stride).fold(last, |deeper, _| deeper * 1.0));
        }
        ladder.rungs[rung].clone()
    }
}

impl Debug for Line {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Line")
            .field("stride", &self.stride)
            .finish_non_exhaustive()
    }
}

/// The tap as Burn's reparameterization.
#[derive(Module, Debug)]
pub(crate) struct TappedParameter {
    #[module(skip)]
    pub(crate) tap: Tap,
}

impl Reparameterization for TappedParameter {
    const NAME: &'static str = "gradient_tap";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let tapped = match base.is_autodiff() && base.is_require_grad() {
            true => {
                let rung = self.tap.line.rung(&base).into_dispatch();
                <Dispatch as TapBackend>::tap(base.into_dispatch(), rung, self.tap.clone())
            }
            false => base.into_dispatch(),
        };
        Tensor::from_dispatch(match self.tap.line.loans.get() {
            None => tapped,
            Some(loans) => {
                let (loans, slot) = (loans.clone(), self.tap.slot);
                <Dispatch as TapBackend>::lend(tapped, Borrower { loans, slot })
            }
        })
    }
}

/// A panic elsewhere leaves nothing half done behind these locks.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
