//! Values of parameters that are not in the module, but lent to it while they are used.
//!
//! A module whose values lie elsewhere holds placeholders. Behind [`Param::val`] stands one more
//! operation, which takes the values of a whole bucket from a [`Lender`] and gives views of them. It
//! is marked as cheap to do again, so that Burn's graph keeps none of it: what the forward pass has
//! used is free when its last view is dropped, and the backward pass borrows it anew.
//!
//! [`Param::val`]: burn::module::Param::val
use std::any::Any;
use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape, Slice, TensorData};
use burn_autodiff::NodeId;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::retro_forward::RetroForward;
use burn_autodiff::checkpoint::state::BackwardStates;
use burn_autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};

use crate::bucket::{BucketPlan, Float};
use crate::{Buffer, Error, Result};

/// Has the values of a replica's parameters.
pub trait Lender: Debug + Send + Sync {
    /// All values of a bucket, without a tail, in the order of the plan. Called when the first
    /// parameter of the bucket is used and none of it is at hand: in the same order on all ranks, if
    /// these use their modules alike.
    ///
    /// # Errors
    ///
    /// If they cannot be had; the pass ends in that error.
    fn lend(&self, bucket: usize) -> Result<Buffer>;
}

/// What a replica has borrowed.
#[derive(Debug)]
pub(crate) struct Loans {
    lender: Arc<dyn Lender>,
    plan: BucketPlan,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    buckets: Vec<Loan>,
    /// Per bucket, whether a backward pass has borrowed of it; empty before the first.
    again: Vec<bool>,
    failed: Option<Error>,
}

/// One bucket's values.
#[derive(Debug)]
struct Loan {
    /// Of a type that only their backend knows.
    values: Option<Box<dyn Any + Send>>,
    /// Slots of the bucket that need no more of them.
    done: Vec<usize>,
}

impl Loans {
    pub(crate) fn new(lender: Arc<dyn Lender>, plan: BucketPlan) -> Self {
        let empty = |_| Loan {
            values: None,
            done: Vec::new(),
        };
        Self {
            lender,
            state: Mutex::new(State {
                buckets: (0..plan.len()).map(empty).collect(),
                again: Vec::new(),
                failed: None,
            }),
            plan,
        }
    }

    /// The values of `slot`, a view of its bucket. After a failure zeros, and the error is kept.
    fn borrow<B: Backend>(&self, slot: usize, shape: Shape, device: &B::Device) -> FloatTensor<B> {
        let (bucket, range) = self.plan.locate(slot);
        let flat = self.flat::<B>(bucket, device);
        self.done(slot);
        let Some(flat) = flat else {
            let dtype = match self.plan.dtype(bucket) {
                Float::F32 => FloatDType::F32,
                Float::F64 => FloatDType::F64,
            };
            return B::float_zeros(shape, device, dtype);
        };
        let view = B::float_slice(flat, &[Slice::from(range)]);
        B::float_reshape(view, shape)
    }

    fn flat<B: Backend>(&self, bucket: usize, device: &B::Device) -> Option<FloatTensor<B>> {
        let mut state = self.lock();
        let State {
            buckets, failed, ..
        } = &mut *state;
        let values = &mut buckets[bucket].values;
        if let Some(flat) = values.as_ref().and_then(|flat| flat.downcast_ref()) {
            return Some(FloatTensor::<B>::clone(flat));
        }
        if failed.is_some() {
            return None;
        }
        let data = match self.lender.lend(bucket) {
            Ok(Buffer::F32(lent)) => {
                let len = lent.len();
                TensorData::new(lent, [len])
            }
            Ok(Buffer::F64(lent)) => {
                let len = lent.len();
                TensorData::new(lent, [len])
            }
            Err(error) => {
                *failed = Some(error);
                return None;
            }
        };
        let flat = B::float_from_data(data, device);
        *values = Some(Box::new(flat.clone()));
        Some(flat)
    }

    /// `slot` has what it needs; when all of its bucket have, that is given back.
    pub(crate) fn done(&self, slot: usize) {
        let (bucket, _) = self.plan.locate(slot);
        let loan = &mut self.lock().buckets[bucket];
        if !loan.done.contains(&slot) {
            loan.done.push(slot);
        }
        if loan.done.len() == self.plan.slots_in(bucket).len() {
            loan.values = None;
            loan.done.clear();
        }
    }

    /// A backward pass borrows the values of `slot`.
    fn again(&self, slot: usize) {
        let (bucket, _) = self.plan.locate(slot);
        let mut state = self.lock();
        state.again.resize(self.plan.len(), false);
        state.again[bucket] = true;
    }

    /// Per bucket, whether backward passes borrow of it; empty while none has been.
    pub(crate) fn lent_again(&self) -> Vec<bool> {
        self.lock().again.clone()
    }

    /// Gives everything back: another pass begins, or the values change.
    pub(crate) fn settle(&self) {
        for loan in &mut self.lock().buckets {
            loan.values = None;
            loan.done.clear();
        }
    }

    /// The error of the first loan that could not be had, once.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.lock().failed.take()
    }

    // A lender that panics leaves nothing half done behind this lock.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The loan of one parameter.
#[derive(Clone, Debug)]
pub(crate) struct Borrower {
    pub(crate) loans: Arc<Loans>,
    pub(crate) slot: usize,
}

impl Borrower {
    /// The values in the place of `placeholder`.
    pub(crate) fn values<B: Backend>(&self, placeholder: &FloatTensor<B>) -> FloatTensor<B> {
        let (shape, device) = (placeholder.shape(), placeholder.device());
        self.loans.borrow::<B>(self.slot, shape, &device)
    }

    /// The same, whose gradient goes to `placeholder`.
    pub(crate) fn tracked<B: Backend, C: CheckpointStrategy>(
        self,
        placeholder: FloatTensor<Autodiff<B, C>>,
    ) -> FloatTensor<Autodiff<B, C>> {
        let values = self.values::<B>(placeholder.primitive());
        let again = Again::<B> {
            placeholder: placeholder.id(),
            borrower: self,
            backend: PhantomData,
        };
        // Whatever the device's strategy is, this operation is one to be done again.
        let operation = Lend
            .prepare::<BalancedCheckpointing>([placeholder.node()])
            .memory_bound()
            .retro_forward(again)
            .parents([&placeholder])
            .stateful();
        match operation {
            OpsKind::Tracked(operation) => operation.finish((), values),
            OpsKind::UnTracked(operation) => operation.finish(values),
        }
    }
}

#[derive(Debug)]
struct Lend;

impl<B: Backend> Backward<B, 1> for Lend {
    type State = ();

    fn backward(self, ops: Ops<(), 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<B>(&ops.node);
        let [placeholder] = ops.parents;
        if let Some(placeholder) = placeholder {
            gradients.register::<B>(placeholder.id, gradient);
        }
    }
}

/// The operation done again, in the backward pass.
#[derive(Debug)]
struct Again<B: Backend> {
    placeholder: NodeId,
    borrower: Borrower,
    backend: PhantomData<B>,
}

impl<B: Backend> RetroForward for Again<B> {
    fn forward(&self, states: &mut BackwardStates, out: NodeId) {
        let placeholder = states.get_state::<FloatTensor<B>>(&self.placeholder);
        self.borrower.loans.again(self.borrower.slot);
        let values = self.borrower.values::<B>(&placeholder);
        states.save(out, values);
    }
}
