//! What a rank holds, and the most it comes to: predicted by formula, and counted.
//!
//! Predicted is what lies in the plan of the buckets and the cut over the ranks. The model's
//! activations, and what Burn works with beside one gradient or one updated piece, are not in it.
use std::fmt::{self, Display, Formatter};

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::Tensor;
use ddp::{BucketPlan, DistributedDataParallel, Slots};
use serde::{Deserialize, Serialize};

use crate::pieces::Pieces;
use crate::state::{self, State};
use crate::trial::Kept;
use crate::{Result, Stage, trial};

/// Bytes that one rank holds, and the most that a step comes to.
///
/// Made by [`ShardedDataParallel::memory_report`](crate::ShardedDataParallel::memory_report), for
/// ddp's replicas by [`of_ddp`](Self::of_ddp). The model's activations, and parameters that are not
/// trained, are not in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryReport {
    /// The rank.
    pub rank: usize,
    /// The stage; none where every rank holds all.
    pub stage: Option<Stage>,
    /// What is held between a backward pass and its step, by the formula, whatever has happened so far.
    pub predicted: Memory,
    /// Of what is there now: gradients after a backward pass, state after the first step.
    pub measured: Memory,
    /// By the formula, the most bytes of buckets at a time that are no gradients yet: filling and under
    /// way.
    pub buckets: usize,
    /// By the formula, the most bytes of gathered parameters at a time: in use and being brought.
    pub gathered: usize,
    /// By the formula, the most that is held in a step with Adam or AdamW.
    pub peak: Peak,
}

/// Bytes of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Of trained parameters.
    pub parameters: usize,
    /// Of their gradients.
    pub gradients: usize,
    /// Of the optimizer's state.
    pub state: usize,
}

/// The most bytes in each part of a training step, what is held all the time included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peak {
    /// In the forward pass.
    pub forward: usize,
    /// In the backward pass, with the gradient that Burn has just formed.
    pub backward: usize,
    /// In the optimizer's step, with the piece that it is just updating.
    pub step: usize,
}

impl Memory {
    /// All of them.
    ///
    /// ```
    /// let memory = zero::Memory { parameters: 4, gradients: 4, state: 8 };
    /// assert_eq!(memory.total(), 16);
    /// ```
    pub fn total(&self) -> usize {
        self.parameters + self.gradients + self.state
    }
}

impl Peak {
    /// The largest of them.
    ///
    /// ```
    /// let peak = zero::Peak { forward: 4, backward: 9, step: 8 };
    /// assert_eq!(peak.most(), 9);
    /// ```
    pub fn most(&self) -> usize {
        self.forward.max(self.backward).max(self.step)
    }
}

impl MemoryReport {
    /// What a replica of ddp holds with its `optimizer`, in the same terms: all of everything, on every
    /// rank. `gradients` are those of the last backward pass, while they wait for their step.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::optim::AdamConfig;
    /// use burn::tensor::Device;
    /// use collectives::{CommunicatorConfig, launch};
    /// use ddp::DdpConfig;
    /// use zero::MemoryReport;
    ///
    /// let reports = launch::spawn(2, &CommunicatorConfig::new(), |communicator| {
    ///     let model = LinearConfig::new(3, 1).init(&Device::flex().autodiff());
    ///     let model = DdpConfig::new().init(model, communicator)?;
    ///     MemoryReport::of_ddp(&model, &AdamConfig::new().init(), None)
    /// })?;
    /// // 4 parameters, and 8 bytes of state for each.
    /// assert_eq!((reports[0].predicted.parameters, reports[0].predicted.state), (16, 32));
    /// # Ok::<(), collectives::launch::LaunchError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::WholeTensor`](crate::Error::WholeTensor) for an optimizer that the formula does not
    /// cover; [`Error::Record`](crate::Error::Record) if Burn's record of it is not what it was.
    ///
    /// # Cost
    ///
    /// A copy of the optimizer's state, and a trial of nine steps on 40 elements of each parameter.
    pub fn of_ddp<M: Module>(
        model: &DistributedDataParallel<M>,
        optimizer: &ModuleOptimizer,
        gradients: Option<&GradientsParams>,
    ) -> Result<Self> {
        let slots = model.slots();
        let trial = trial::element_wise(model.module(), optimizer)?;
        let mut sizes = Sizes {
            slots,
            of_gradients: gradients,
            parameters: 0,
            gradients: 0,
        };
        model.module().visit(&mut sizes);
        let measured = Memory {
            parameters: sizes.parameters,
            gradients: sizes.gradients,
            state: state::of(optimizer)?.values().map(State::bytes).sum(),
        };
        let forecast = Forecast {
            stage: None,
            pieces: &Pieces::new(model.plan().clone(), model.place()),
            slots,
            kept: &trial.by_slot(slots),
            lent_again: &[],
            reduced: Reduced::AtOnce,
            ahead: false,
        };
        Ok(forecast.report(measured))
    }

    /// The most bytes of buckets and of gathered parameters, beside what is held.
    pub fn in_flight(&self) -> usize {
        self.buckets + self.gathered
    }
}

/// Of the module's trained parameters, and of their gradients.
struct Sizes<'a> {
    slots: &'a Slots,
    of_gradients: Option<&'a GradientsParams>,
    parameters: usize,
    gradients: usize,
}

impl ModuleVisitor for Sizes<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.slots.find(param.id).is_none() {
            return;
        }
        let bytes = |tensor: Tensor<D>| tensor.shape().num_elements() * tensor.dtype().size();
        self.parameters += bytes(param.base());
        let gradient = self.of_gradients.and_then(|all| all.get::<D>(param.id));
        self.gradients += gradient.map_or(0, bytes);
    }
}

/// When a bucket that is full is reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reduced {
    /// Before the backward pass goes on.
    AtOnce,
    /// By a thread, while the next one fills.
    Meanwhile,
    /// When the pass is over.
    Afterwards,
}

/// What the formula needs to know.
pub(crate) struct Forecast<'a> {
    pub(crate) stage: Option<Stage>,
    pub(crate) pieces: &'a Pieces,
    pub(crate) slots: &'a Slots,
    /// What the optimizer keeps of each slot.
    pub(crate) kept: &'a [Kept],
    /// The buckets that a backward pass gathers.
    pub(crate) lent_again: &'a [bool],
    pub(crate) reduced: Reduced,
    /// Whether a bucket of parameters is gathered while the one before it is in use.
    pub(crate) ahead: bool,
}

/// While Burn forms a gradient there are two of its size: the product's memory, and what it is moved
/// to. A test holds that against Burn alone.
const FORMING: usize = 2;

/// And two of a piece's size beside it while Adam updates it: the step, and the root that it is
/// divided by.
const UPDATING: usize = 2;

impl Forecast<'_> {
    pub(crate) fn report(&self, measured: Memory) -> MemoryReport {
        let predicted = self.held();
        // Where gradients are whole buckets, these stay for the next pass.
        let idle = match self.whole_gradients() {
            true => predicted.total(),
            false => predicted.total() - predicted.gradients,
        };
        let lent = self.lent_forward();
        let pass = self.backward();
        let given_back = match self.whole_gradients() {
            true => 0,
            false => predicted.gradients,
        };
        MemoryReport {
            rank: self.pieces.place().rank,
            stage: self.stage,
            predicted,
            measured,
            buckets: pass.buckets,
            gathered: lent.max(pass.gathered),
            peak: Peak {
                forward: idle + lent,
                backward: idle + pass.peak,
                step: idle + given_back + self.update(),
            },
        }
    }

    fn plan(&self) -> &BucketPlan {
        self.pieces.plan()
    }

    fn whole_gradients(&self) -> bool {
        self.stage.is_none_or(|stage| stage == Stage::One)
    }

    /// Bytes of a whole parameter.
    fn slot(&self, slot: usize) -> usize {
        let (bucket, range) = self.plan().locate(slot);
        range.len() * self.plan().dtype(bucket).bytes()
    }

    /// Bytes of what this rank updates of it.
    fn piece(&self, slot: usize) -> usize {
        let (bucket, range) = self.plan().locate(slot);
        let len = match self.stage {
            None => range.len(),
            Some(_) => self.pieces.of(slot).len(),
        };
        len * self.plan().dtype(bucket).bytes()
    }

    /// Bytes of a bucket's values, without a tail.
    fn whole(&self, bucket: usize) -> usize {
        self.plan().gradients_in(bucket) * self.plan().dtype(bucket).bytes()
    }

    fn part(&self, bucket: usize) -> usize {
        self.pieces.part(bucket).len() * self.plan().dtype(bucket).bytes()
    }

    /// What is held between a backward pass and its step.
    fn held(&self) -> Memory {
        let plan = self.plan();
        let mut memory = Memory::default();
        for bucket in 0..plan.len() {
            memory.parameters += match self.stage {
                Some(Stage::Three) => self.part(bucket),
                _ => self.whole(bucket),
            };
            memory.gradients += match self.stage {
                None => self.whole(bucket),
                Some(Stage::One) => plan.bytes(bucket),
                Some(Stage::Two | Stage::Three) => self.part(bucket),
            };
            for &slot in plan.slots_in(bucket) {
                memory.state += self.piece(slot) * self.kept[slot].per_element;
            }
        }
        memory
    }

    /// The most that a forward pass has gathered at a time. Parameters of one submodule are used
    /// together; a bucket stays until all of it has been used.
    fn lent_forward(&self) -> usize {
        let submodules = self.submodules();
        let mut order = Vec::new();
        for &slot in submodules.iter().flatten() {
            let (bucket, _) = self.plan().locate(slot);
            if !order.contains(&bucket) {
                order.push(bucket);
            }
        }
        let mut lent = Lent::new(self, order);
        let mut most = 0;
        for submodule in submodules {
            for &slot in &submodule {
                lent.take(slot);
            }
            most = lent.bytes().max(most);
            submodule.into_iter().for_each(|slot| lent.done(slot));
        }
        most
    }

    /// The slots in visiting order, those of one submodule together.
    fn submodules(&self) -> Vec<Vec<usize>> {
        let path = |slot: usize| {
            let name = self.slots.name(slot);
            name.rsplit_once('.').map_or("", |(path, _)| path)
        };
        let slots: Vec<usize> = (0..self.slots.len()).collect();
        let together = slots.chunk_by(|&left, &right| path(left) == path(right));
        together.map(<[usize]>::to_vec).collect()
    }

    /// What a backward pass comes to beside what is held all the time: the gradients in plan order, each
    /// into its bucket, of which this rank's part is left.
    fn backward(&self) -> Pass {
        let plan = self.plan();
        let largest = (0..self.slots.len()).map(|slot| self.slot(slot)).max();
        let mut pass = Pass::default();
        if self.whole_gradients() {
            // The buckets are there already.
            pass.peak = FORMING * largest.unwrap_or_default();
            return pass;
        }
        let lent_again = |bucket: &usize| self.lent_again.get(*bucket).copied().unwrap_or(true);
        let mut lent = Lent::new(self, (0..plan.len()).filter(lent_again).collect());
        lent.expect(0);
        let (mut parts, mut waiting) = (0, 0);
        for bucket in 0..plan.len() {
            let mut buffers = waiting;
            let slots = plan.slots_in(bucket);
            for (at, &slot) in slots.iter().enumerate() {
                if lent_again(&bucket) {
                    lent.take(slot);
                }
                pass.reach(parts, buffers, FORMING * self.slot(slot), lent.bytes());
                lent.done(slot);
                if at == 0 {
                    buffers = self.filling(bucket, waiting);
                }
                pass.reach(parts, buffers, self.slot(slot), lent.bytes());
            }
            waiting = buffers;
            parts += self.part(bucket);
            let last = slots.last().map_or(0, |&slot| self.slot(slot));
            pass.reach(parts, buffers, last, lent.bytes());
        }
        pass
    }

    /// Bytes of buffers while `bucket` fills, if those of `waiting` could be used again.
    fn filling(&self, bucket: usize, waiting: usize) -> usize {
        let plan = self.plan();
        let (size, needed) = (plan.dtype(bucket).bytes(), plan.bytes(bucket));
        // As the pool of ddp has it: a new one has room for both tails.
        let new = needed + (plan.totals().len() + plan.slots() + 1) * size;
        let largest = |buckets: std::ops::Range<usize>| buckets.map(|at| plan.bytes(at)).max();
        match self.reduced {
            Reduced::AtOnce if needed <= waiting => waiting,
            Reduced::AtOnce => new,
            Reduced::Meanwhile => new + largest(0..bucket).unwrap_or_default(),
            Reduced::Afterwards => waiting + new,
        }
    }

    /// What the optimizer's step comes to, beside what is held: every parameter's update is there until
    /// all are, in visiting order.
    fn update(&self) -> usize {
        let plan = self.plan();
        let mut most = 0;
        let (mut new, mut old) = (0, vec![0; plan.len()]);
        for slot in 0..self.slots.len() {
            let piece = self.piece(slot);
            most = most.max(new + UPDATING * piece);
            match self.stage {
                // Each in the place of the old one.
                None => {}
                Some(Stage::One | Stage::Two) => new += piece,
                Some(Stage::Three) => {
                    new += piece;
                    let (bucket, _) = plan.locate(slot);
                    old[bucket] += 1;
                    if old[bucket] == plan.slots_in(bucket).len() {
                        new = new.saturating_sub(self.part(bucket));
                    }
                }
            }
        }
        match self.stage {
            // Then they are copied to the parts of the buckets.
            Some(Stage::Three) => most.max((0..plan.len()).map(|at| self.part(at)).sum()),
            _ => most,
        }
    }
}

/// How far a backward pass has come.
#[derive(Default)]
struct Pass {
    peak: usize,
    buckets: usize,
    gathered: usize,
}

impl Pass {
    fn reach(&mut self, parts: usize, buckets: usize, gradient: usize, gathered: usize) {
        self.peak = self.peak.max(parts + buckets + gradient + gathered);
        self.buckets = self.buckets.max(buckets);
        self.gathered = self.gathered.max(gathered);
    }
}

/// The buckets of parameters that are gathered.
struct Lent<'a> {
    forecast: &'a Forecast<'a>,
    /// The buckets in the order in which they are used.
    order: Vec<usize>,
    /// The one that is on its way.
    next: Option<usize>,
    /// Per bucket whether it is there, and how many of its slots need no more of it.
    buckets: Vec<(bool, usize)>,
}

impl<'a> Lent<'a> {
    fn new(forecast: &'a Forecast<'a>, order: Vec<usize>) -> Self {
        Self {
            forecast,
            order,
            next: None,
            buckets: vec![(false, 0); forecast.plan().len()],
        }
    }

    /// The bucket at `place` of the order is on its way from now on.
    fn expect(&mut self, place: usize) {
        let next = self.order.get(place).copied();
        self.next = next.filter(|&next| self.forecast.ahead && !self.buckets[next].0);
    }

    fn take(&mut self, slot: usize) {
        let (bucket, _) = self.forecast.plan().locate(slot);
        if self.forecast.stage == Some(Stage::Three) && !self.buckets[bucket].0 {
            self.buckets[bucket].0 = true;
            if let Some(place) = self.order.iter().position(|&one| one == bucket) {
                self.expect(place + 1);
            }
        }
    }

    fn done(&mut self, slot: usize) {
        let plan = self.forecast.plan();
        let (bucket, _) = plan.locate(slot);
        let (there, done) = &mut self.buckets[bucket];
        *done += 1;
        if *done == plan.slots_in(bucket).len() {
            (*there, *done) = (false, 0);
        }
    }

    fn bytes(&self) -> usize {
        let there = self.buckets.iter().enumerate().filter(|(_, one)| one.0);
        let there = there.map(|(bucket, _)| bucket);
        let buckets = there.chain(self.next);
        buckets.map(|bucket| self.forecast.whole(bucket)).sum()
    }
}

/// The reports of all ranks as a table, in MB of 2^20 bytes.
///
/// `parameters`, `gradients`, `state` and their `total` are what lies there now. `predicted` is what that total
/// should be between a backward pass and its step (after the step, gradients have gone). By formula too
/// are `buckets` and `gathered`, the most that is under way beside it, and `peak`, the most that a step
/// with Adam or AdamW comes to.
///
/// ```
/// use zero::{Memory, MemoryReport, Peak, Stage};
/// let held = Memory { parameters: 4 << 20, gradients: 2 << 20, state: 4 << 20 };
/// let report = MemoryReport {
///     rank: 0, stage: Some(Stage::Two), predicted: held, measured: held, buckets: 1 << 20, gathered: 0,
///     peak: Peak { forward: 8 << 20, backward: 12 << 20, step: 13 << 20 },
/// };
/// let table = zero::memory_table(&[report]);
/// assert!(table.lines().nth(1).unwrap().ends_with("10.00      10.00     1.00      0.00   13.00"));
/// ```
pub fn memory_table(reports: &[MemoryReport]) -> String {
    let head = "rank  stage  parameters  gradients      state      total  predicted  buckets  gathered    peak";
    let rows = reports.iter().map(|report| format!("\n{report}"));
    head.to_owned() + &rows.collect::<String>()
}

impl Display for MemoryReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mb = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        let Memory {
            parameters,
            gradients,
            state,
        } = self.measured;
        write!(
            f,
            "{:>4}  {:>5}  {:>10.2}  {:>9.2}  {:>9.2}  {:>9.2}  {:>9.2}  {:>7.2}  {:>8.2}  {:>6.2}",
            self.rank,
            self.stage.map_or(0, u8::from),
            mb(parameters),
            mb(gradients),
            mb(state),
            mb(self.measured.total()),
            mb(self.predicted.total()),
            mb(self.buckets),
            mb(self.gathered),
            mb(self.peak.most())
        )
    }
}
