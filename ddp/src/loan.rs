//! Values of parameters that are not in the module, but lent to it while they are used.
//!
//! A module whose values lie elsewhere holds placeholders. Behind [`Param::val`] stands one more
//! operation, which takes the values of a whole bucket from a [`Lender`] and gives views of them. It
//! is marked as cheap to do again, so that Burn's graph keeps none of it: what the forward pass has
//! used is free when its last view is dropped, and the backward pass borrows it anew.
//!
//! While one bucket is in use the next one is on its way, if the pass goes the way of the last one.
//!
//! [`Param::val`]: burn::module::Param::val
use std::any::Any;
use std::fmt::Debug;
use std::marker::PhantomData;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

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
use collectives::Work;

use crate::bucket::{BucketPlan, Float};
use crate::{Buffer, Error, Result};

/// Has the values of a replica's parameters.
pub trait Lender: Debug + Send + Sync {
    /// Starts to bring all values of a bucket, without a tail, in the order of the plan.
    ///
    /// Called when the first parameter of the bucket is used and none of it is at hand, or one bucket
    /// ahead of that: in the same order on all ranks, if these use their modules alike. What was
    /// brought ahead and is not used next is dropped.
    ///
    /// # Errors
    ///
    /// If they cannot be had, at once or from the work; the pass ends in that error.
    fn lend(&self, bucket: usize) -> Result<Work<Buffer>>;
}

/// An error of a value that comes late, where nobody can be told of it: the replica tells it in its
/// next call. Clones are of the same.
#[derive(Clone, Debug, Default)]
pub struct Failure(Arc<OnceLock<Error>>);

impl Failure {
    /// Keeps the first error.
    ///
    /// ```
    /// let failure = ddp::Failure::default();
    /// failure.tell(ddp::Error::State("the first"));
    /// failure.clone().tell(ddp::Error::State("the second"));
    /// assert_eq!(failure.told(), Some(ddp::Error::State("the first")));
    /// ```
    pub fn tell(&self, error: Error) {
        self.0.get_or_init(|| error);
    }

    /// The error that is kept.
    pub fn told(&self) -> Option<Error> {
        self.0.get().cloned()
    }
}

/// What a replica has borrowed.
#[derive(Debug)]
pub(crate) struct Loans {
    lender: Arc<dyn Lender>,
    plan: BucketPlan,
    /// Whether a bucket is brought ahead of its use.
    ahead: bool,
    failure: Failure,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    buckets: Vec<Loan>,
    /// The bucket that is expected next, on its way.
    ahead: Option<(usize, Work<Buffer>)>,
    pass: Pass,
    forward: Route,
    backward: Route,
    /// The most bytes at hand and on their way at a time.
    most: usize,
    /// Per bucket, whether a backward pass has borrowed of it; empty before the first.
    again: Vec<bool>,
}

/// Which way the values are used now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    Forward,
    Backward,
}

/// One bucket's values.
#[derive(Debug)]
struct Loan {
    /// Of a type that only their backend knows.
    values: Option<Box<dyn Any + Send>>,
    /// Slots of the bucket that need no more of them.
    done: Vec<usize>,
}

/// In which order a pass borrows the buckets. It is guessed from the last one alone, so that ranks
/// whose passes are alike guess alike.
#[derive(Debug, Default)]
struct Route {
    /// Of the last training pass.
    known: Vec<usize>,
    now: Vec<usize>,
    /// Whether this pass has left the known way.
    left: bool,
}

impl Route {
    /// The bucket after `bucket`, which is being borrowed, if this pass goes on as the last one did.
    fn pass(&mut self, bucket: usize, buckets: usize) -> Option<usize> {
        self.left |= self.known.get(self.now.len()) != Some(&bucket);
        // Validation is a pass of its own, and nobody says where it ends.
        if self.left && self.known.first() == Some(&bucket) {
            self.now.clear();
            self.left = false;
        }
        // Without a backward pass nothing would end it.
        if self.now.len() == MOST_LOANS * buckets {
            self.now.clear();
        }
        self.now.push(bucket);
        match self.left {
            true => None,
            false => self.known.get(self.now.len()).copied(),
        }
    }

    /// The pass is over, and so will the next one be.
    fn learn(&mut self) {
        self.known = mem::take(&mut self.now);
        self.left = false;
    }

    fn forget(&mut self) {
        self.now.clear();
        self.left = false;
    }
}

/// How often a pass that is remembered may borrow a bucket, on average.
const MOST_LOANS: usize = 8;

impl Loans {
    pub(crate) fn new(
        lender: Arc<dyn Lender>,
        plan: BucketPlan,
        ahead: bool,
        failure: Failure,
    ) -> Self {
        let empty = |_| Loan {
            values: None,
            done: Vec::new(),
        };
        Self {
            lender,
            ahead,
            failure,
            state: Mutex::new(State {
                buckets: (0..plan.len()).map(empty).collect(),
                ahead: None,
                pass: Pass::Forward,
                forward: Route::default(),
                backward: Route::default(),
                most: 0,
                again: Vec::new(),
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
        let values = &state.buckets[bucket].values;
        if let Some(flat) = values.as_ref().and_then(|flat| flat.downcast_ref()) {
            return Some(FloatTensor::<B>::clone(flat));
        }
        if self.failure.told().is_some() {
            return None;
        }
        match self.bring(bucket, &mut state) {
            Ok(lent) => {
                let data = match lent {
                    Buffer::F32(lent) => {
                        let len = lent.len();
                        TensorData::new(lent, [len])
                    }
                    Buffer::F64(lent) => {
                        let len = lent.len();
                        TensorData::new(lent, [len])
                    }
                };
                let flat = B::float_from_data(data, device);
                state.buckets[bucket].values = Some(Box::new(flat.clone()));
                Some(flat)
            }
            Err(error) => {
                self.failure.tell(error);
                None
            }
        }
    }

    /// Waits for a bucket, when the one after it is on its way too.
    fn bring(&self, bucket: usize, state: &mut State) -> Result<Buffer> {
        let work = match state.ahead.take() {
            Some((expected, work)) if expected == bucket => work,
            // Another one was expected; it comes all the same, on all ranks, and is thrown away.
            _ => self.lender.lend(bucket)?,
        };
        let route = match state.pass {
            Pass::Forward => &mut state.forward,
            Pass::Backward => &mut state.backward,
        };
        let next = route.pass(bucket, self.plan.len());
        self.expect(next, state)?;
        let at_hand = |bucket: &usize| state.buckets[*bucket].values.is_some();
        let held = (0..self.plan.len()).filter(at_hand);
        let coming = state.ahead.iter().map(|&(bucket, _)| bucket);
        let bytes = |bucket| self.plan.gradients_in(bucket) * self.plan.dtype(bucket).bytes();
        let now = held.chain(coming).chain([bucket]).map(bytes).sum();
        state.most = state.most.max(now);
        Ok(work.wait()?)
    }

    /// Starts to bring the bucket that comes next.
    fn expect(&self, next: Option<usize>, state: &mut State) -> Result<()> {
        if let Some(next) = next
            && self.ahead
            && state.buckets[next].values.is_none()
        {
            state.ahead = Some((next, self.lender.lend(next)?));
        }
        Ok(())
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

    /// Gives everything back: a pass begins, or the values change.
    pub(crate) fn settle(&self, next: Pass) {
        let mut state = self.lock();
        for loan in &mut state.buckets {
            loan.values = None;
            loan.done.clear();
        }
        state.ahead = None;
        match (state.pass, next) {
            (Pass::Forward, Pass::Backward) => state.forward.learn(),
            (Pass::Backward, _) => state.backward.learn(),
            (Pass::Forward, Pass::Forward) => state.forward.forget(),
        }
        state.pass = next;
        if next == Pass::Backward && self.failure.told().is_none() {
            let first = state.backward.known.first().copied();
            if let Err(error) = self.expect(first, &mut state) {
                self.failure.tell(error);
            }
        }
    }

    /// The most bytes that were lent and on their way at a time.
    pub(crate) fn most(&self) -> usize {
        self.lock().most
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

#[cfg(test)]
mod tests {
    use burn::backend::Flex;
    use burn::backend::ops::FloatTensorOps;
    use burn::tensor::try_read_sync;
    use collectives::transport::Local;
    use collectives::{CommStream, Communicator, CommunicatorConfig};

    use super::*;
    use crate::bucket::{Caps, SlotSpec};

    /// Notes which buckets it has begun to bring. Each is full of its number.
    #[derive(Debug)]
    struct Log {
        stream: CommStream,
        begun: Mutex<Vec<usize>>,
    }

    impl Lender for Log {
        fn lend(&self, bucket: usize) -> Result<Work<Buffer>> {
            self.begun.lock().unwrap().push(bucket);
            let values = vec![bucket as f32; 2];
            Ok(self.stream.run(move |_| Ok(Buffer::F32(values))))
        }
    }

    struct Trial {
        loans: Loans,
        log: Arc<Log>,
    }

    impl Trial {
        /// Three slots, each a bucket.
        fn new(ahead: bool) -> Self {
            let slot = SlotSpec {
                len: 2,
                dtype: Float::F32,
            };
            let caps = Caps {
                first_bytes: 0,
                bucket_bytes: 0,
            };
            let plan = BucketPlan::new(&[slot; 3], &[0, 1, 2], caps);
            let link = Local::mesh(1).remove(0);
            let communicator = Communicator::new(link, &CommunicatorConfig::new()).unwrap();
            let log = Arc::new(Log {
                stream: CommStream::inline(communicator),
                begun: Mutex::default(),
            });
            let loans = Loans::new(log.clone(), plan, ahead, Failure::default());
            Self { loans, log }
        }

        /// Uses `slot`; which buckets begin to come with that.
        fn uses(&self, slot: usize) -> Vec<usize> {
            let device = Default::default();
            let values = self.loans.borrow::<Flex>(slot, Shape::new([2]), &device);
            let data = try_read_sync(Flex::float_into_data(values));
            let data = data.unwrap().unwrap();
            assert_eq!(data.try_to_vec::<f32>().unwrap(), [slot as f32; 2]);
            self.begun()
        }

        fn settle(&self, next: Pass) -> Vec<usize> {
            self.loans.settle(next);
            self.begun()
        }

        fn begun(&self) -> Vec<usize> {
            mem::take(&mut *self.log.begun.lock().unwrap())
        }

        /// A training pass; which buckets begin to come in it.
        fn trains(&self, forward: &[usize], backward: &[usize]) -> Vec<usize> {
            let used = forward.iter().flat_map(|&slot| self.uses(slot));
            let mut begun: Vec<usize> = used.collect();
            begun.extend(self.settle(Pass::Backward));
            begun.extend(backward.iter().flat_map(|&slot| self.uses(slot)));
            begun.extend(self.settle(Pass::Forward));
            begun
        }
    }

    #[test]
    fn the_next_bucket_begins_to_come_when_one_is_used() {
        let trial = Trial::new(true);
        trial.trains(&[0, 1, 2], &[2, 1]);
        assert_eq!(
            [0, 1, 2].map(|slot| trial.uses(slot)),
            [vec![0, 1], vec![2], vec![]]
        );
        assert_eq!(trial.settle(Pass::Backward), [2]);
        assert_eq!([2, 1].map(|slot| trial.uses(slot)), [vec![1], vec![]]);
        // Of 8 bytes each.
        assert_eq!(trial.loans.most(), 16);
    }

    #[test]
    fn without_that_each_comes_when_it_is_used() {
        let trial = Trial::new(false);
        for _ in 0..2 {
            assert_eq!([0, 1, 2].map(|slot| trial.uses(slot)), [[0], [1], [2]]);
            assert_eq!(trial.settle(Pass::Backward), [0; 0]);
            assert_eq!([2, 1].map(|slot| trial.uses(slot)), [[2], [1]]);
            assert_eq!(trial.settle(Pass::Forward), [0; 0]);
        }
        assert_eq!(trial.loans.most(), 8);
    }

    #[test]
    fn as_many_buckets_come_as_are_used_if_passes_are_alike() {
        let trial = Trial::new(true);
        for _ in 0..3 {
            let begun = trial.trains(&[0, 1, 0, 2], &[2, 0, 1]);
            assert_eq!(begun, [0, 1, 0, 2, 2, 0, 1]);
            // Validation, twice, and nobody says that it begins or ends.
            for _ in 0..2 {
                let begun = [0, 1, 0, 2].map(|slot| trial.uses(slot));
                assert_eq!(begun, [vec![0, 1], vec![0], vec![2], vec![]]);
            }
        }
    }

    #[test]
    fn a_bucket_that_came_in_vain_is_dropped_and_the_new_way_is_learnt() {
        let trial = Trial::new(true);
        trial.trains(&[0, 1, 2], &[2, 1]);
        assert_eq!(trial.trains(&[0, 2], &[2]), [0, 1, 2, 2, 1]);
        assert_eq!(trial.trains(&[0, 2], &[2]), [0, 2, 2]);
        assert_eq!(trial.trains(&[1], &[]), [1, 2]);
        assert_eq!(trial.trains(&[1], &[]), [1]);
    }

    #[test]
    fn what_came_ahead_is_not_used_when_values_have_changed_meanwhile() {
        let trial = Trial::new(true);
        trial.trains(&[0, 1, 2], &[2, 1]);
        assert_eq!(trial.uses(0), [0, 1]);
        trial.settle(Pass::Forward);
        assert_eq!(trial.uses(1), [1]);
    }

    #[test]
    fn who_never_trains_remembers_no_way() {
        let trial = Trial::new(true);
        for _ in 0..100 {
            assert_eq!([0, 1, 2].map(|slot| trial.uses(slot)), [[0], [1], [2]]);
        }
        assert!(trial.loans.lock().forward.now.len() <= 3 * MOST_LOANS);
    }

    #[test]
    fn after_a_failure_nothing_more_comes() {
        let trial = Trial::new(true);
        trial.trains(&[0, 1, 2], &[2, 1]);
        trial
            .loans
            .failure
            .tell(Error::State("by order of the test"));
        let device = Default::default();
        let zeros = trial.loans.borrow::<Flex>(1, Shape::new([2]), &device);
        let data = try_read_sync(Flex::float_into_data(zeros))
            .unwrap()
            .unwrap();
        assert_eq!(data.try_to_vec::<f32>().unwrap(), [0.0; 2]);
        assert_eq!(trial.settle(Pass::Backward), [0; 0]);
    }
}
