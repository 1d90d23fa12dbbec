//! Whether an optimizer may be given a piece of a parameter: it is tried.
//!
//! Burn's `ModuleOptimizer` hides which optimizer steps which parameter. So each parameter of the
//! user's module, with its id and its path, stands for itself in a small trial: once whole, and once
//! in two pieces. Where the bits of the pieces are not those of the whole, the elements depend on
//! each other, as those of LAMB, Muon and Adafactor do, or as clipping by a parameter's norm makes
//! them.
use std::any::Any;
use std::collections::{BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer, OptimizerRecord};
use burn::tensor::{Tensor, TensorData};
use burn_pack::{Bytes, DType};
use ddp::Slots;

use crate::state::{self, State};
use crate::{Error, Result};

/// Elements of a parameter on trial, as a matrix where it has two axes.
const LEN: usize = ROWS * COLUMNS;
const ROWS: usize = 8;
const COLUMNS: usize = 5;

/// Where it is cut.
const CUT: usize = 13;

/// How large the gradients of each step are. The last is beyond any norm that one clips at.
const SCALES: [f64; 3] = [1.0, 1e-3, 1e12];

/// Below any norm that one clips at: what comes out unlike here is not unlike by clipping.
const SMALL: [f64; 3] = [1e-6; 3];

/// What a trial has shown.
pub(crate) struct Trial {
    /// A hash of where it ended: the same on ranks whose optimizers are.
    pub(crate) hash: u64,
    /// By a parameter's id, what is kept for it; nothing for those that are not here.
    pub(crate) kept: HashMap<u64, Kept>,
}

/// What an optimizer keeps of one parameter.
#[derive(Clone, Debug, Default)]
pub(crate) struct Kept {
    /// How many numbers for each of its elements.
    pub(crate) per_element: usize,
    /// The names of its tensors and numbers.
    pub(crate) names: BTreeSet<String>,
}

impl Trial {
    /// The same by slot.
    pub(crate) fn by_slot(&self, slots: &Slots) -> Vec<Kept> {
        let mut by_slot = vec![Kept::default(); slots.len()];
        for (&id, kept) in &self.kept {
            if let Some(slot) = slots.find(id.into()) {
                by_slot[slot] = kept.clone();
            }
        }
        by_slot
    }
}

/// Checks that every parameter can be stepped in pieces.
///
/// # Errors
///
/// [`Error::WholeTensor`] names the first that cannot, and what steps it, as far as that shows.
pub(crate) fn element_wise<M: Module>(module: &M, optimizer: &ModuleOptimizer) -> Result<Trial> {
    let panicked = |panic: String| {
        let alone = |outcome: &Outcome| {
            let part = Part {
                only: Some(outcome.id),
                ..Part::new(0, LEN)
            };
            run(module, optimizer, part).is_err()
        };
        // Which of them it is shows when it has the only gradient.
        let found = outcomes(module).into_iter().find(alone);
        // Of Burn's it is one that says so.
        let name = match panic.contains("Newton-Schulz") {
            true => "it is Muon, which ",
            false => "it ",
        };
        Error::WholeTensor {
            parameter: found.map_or_else(|| "(one of them)".to_owned(), |found| found.path),
            why: format!("{name}panicked in a trial step on {LEN} elements: {panic}"),
        }
    };
    let parts = [Part::new(0, LEN), Part::new(0, CUT), Part::new(CUT, LEN)];
    let [(whole, tried), (left, _), (right, _)] =
        trials(module, optimizer, parts).map_err(panicked)?;
    let states = state::of(&tried)?;
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for (at, whole) in whole.iter().enumerate() {
        if !whole.is_made_up_of(&left[at], &right[at]) {
            let small = parts.map(|part| Part {
                scales: SMALL,
                ..part
            });
            let by_clipping = optimizer.has_gradient_clipping()
                && trials(module, optimizer, small).is_ok_and(
                    |[(whole, _), (left, _), (right, _)]| {
                        whole[at].is_made_up_of(&left[at], &right[at])
                    },
                );
            let why = match by_clipping {
                true => {
                    "two pieces of it come out unlike the whole, because the gradient clipping takes \
                     the norm of one parameter; leave that out and set `max_grad_norm`, the norm of \
                     all parameters over all ranks"
                        .to_owned()
                }
                false => format!(
                    "two pieces of it come out unlike the whole, {}; take an element-wise one: SGD, \
                     Adam, AdamW, RMSProp, AdaGrad, Lion, Adan",
                    whole_tensor_name(states.get(&whole.id.val()))
                ),
            };
            return Err(Error::WholeTensor {
                parameter: whole.path.clone(),
                why,
            });
        }
        for &bits in &whole.values {
            hash = (hash ^ bits).wrapping_mul(0x0100_0000_01b3);
        }
    }
    let elements = |(dtype, bytes): &(DType, Bytes)| bytes.len() / dtype.size();
    let kept = |state: &State| Kept {
        per_element: state.tensors.values().map(elements).sum::<usize>() / LEN,
        names: state
            .tensors
            .keys()
            .chain(state.scalars.keys())
            .cloned()
            .collect(),
    };
    Ok(Trial {
        hash,
        kept: states
            .iter()
            .map(|(&id, state)| (id, kept(state)))
            .collect(),
    })
}

/// Burn hides the type of an optimizer, but not what it keeps: by that, those of its own that need
/// whole tensors differ.
fn whole_tensor_name(state: Option<&State>) -> &'static str {
    let keeps = |field| state.is_some_and(|state| state.tensors.contains_key(field));
    if keeps("second_moment") {
        "and by the state it keeps it is Adafactor"
    } else if keeps("moment_1") {
        "and by the state it keeps it is LAMB"
    } else if keeps("momentum.velocity") {
        "and by the state it keeps it is Muon"
    } else {
        "as with LAMB, Muon and Adafactor"
    }
}

/// What a trial is of.
#[derive(Clone, Copy)]
struct Part {
    /// Elements of every parameter.
    start: usize,
    end: usize,
    scales: [f64; 3],
    /// The one parameter with a gradient, if not all have one.
    only: Option<ParamId>,
}

impl Part {
    fn new(start: usize, end: usize) -> Self {
        Self {
            start,
            end,
            scales: SCALES,
            only: None,
        }
    }
}

type Ended = (Vec<Outcome>, ModuleOptimizer);

fn trials<M: Module>(
    module: &M,
    optimizer: &ModuleOptimizer,
    [whole, left, right]: [Part; 3],
) -> Result<[Ended; 3], String> {
    let run = |part| run(module, optimizer, part);
    Ok([run(whole)?, run(left)?, run(right)?])
}

/// A trial, or what it said when it panicked.
fn run<M: Module>(module: &M, optimizer: &ModuleOptimizer, part: Part) -> Result<Ended, String> {
    let trial = || trial(module, optimizer, part);
    catch_unwind(AssertUnwindSafe(trial)).map_err(|panic| message(panic.as_ref()))
}

/// Where a part of every parameter ends after a few steps, and the optimizer.
fn trial<M: Module>(module: &M, optimizer: &ModuleOptimizer, part: Part) -> Ended {
    let mut optimizer = optimizer.clone().load_record(OptimizerRecord::default());
    let mut module = module.clone().map(&mut Shrink {
        start: part.start,
        end: part.end,
    });
    for scale in part.scales {
        let mut gradients = Invent {
            part,
            scale,
            gradients: GradientsParams::new(),
        };
        module.visit(&mut gradients);
        module = optimizer.step(0.01, module, gradients.gradients);
    }
    (outcomes(&module), optimizer)
}

fn outcomes<M: Module>(module: &M) -> Vec<Outcome> {
    let mut outcomes = Outcomes {
        path: Vec::new(),
        outcomes: Vec::new(),
    };
    module.visit(&mut outcomes);
    outcomes.outcomes
}

/// A number for an element, between -1 and 1, of either sign.
fn number(at: usize, salt: usize) -> f64 {
    ((at * 37 + salt * 11) % 41) as f64 / 20.5 - 1.0
}

fn numbers(range: std::ops::Range<usize>, salt: usize, scale: f64) -> Vec<f64> {
    range.map(|at| number(at, salt) * scale).collect()
}

fn shape<const D: usize>(len: usize) -> [usize; D] {
    let mut shape = [1; D];
    shape[0] = len;
    if D > 1 && len == LEN {
        (shape[0], shape[1]) = (ROWS, COLUMNS);
    }
    shape
}

struct Shrink {
    start: usize,
    end: usize,
}

impl ModuleMapper for Shrink {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !param.is_require_grad() {
            return param;
        }
        let values = numbers(self.start..self.end, 0, 1.0);
        let data = TensorData::new(values, shape::<D>(self.end - self.start));
        let (device, dtype) = (param.device(), param.dtype());
        let tensor = Tensor::from_data(data.convert_dtype(dtype), (&device, dtype));
        Param::initialized(param.id, tensor.require_grad())
    }
}

struct Invent {
    part: Part,
    scale: f64,
    gradients: GradientsParams,
}

impl ModuleVisitor for Invent {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.is_require_grad() || self.part.only.is_some_and(|only| only != param.id) {
            return;
        }
        let dims = param.dims();
        let start = self.part.start;
        let range = start..start + dims.iter().product::<usize>();
        let data = TensorData::new(numbers(range, 3, self.scale), dims);
        let (device, dtype) = (param.device().without_autodiff(), param.dtype());
        let gradient = Tensor::<D>::from_data(data.convert_dtype(dtype), (&device, dtype));
        self.gradients.register(param.id, gradient);
    }
}

/// Where a parameter ended: the bits of its elements.
struct Outcome {
    id: ParamId,
    path: String,
    values: Vec<u64>,
}

impl Outcome {
    fn is_made_up_of(&self, left: &Self, right: &Self) -> bool {
        let pieces = left.values.iter().chain(&right.values);
        self.values.iter().eq(pieces)
    }
}

struct Outcomes {
    path: Vec<String>,
    outcomes: Vec<Outcome>,
}

impl ModuleVisitor for Outcomes {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_require_grad() {
            let values = param.base().into_data();
            self.outcomes.push(Outcome {
                id: param.id,
                path: self.path.join("."),
                // Widening f32 keeps apart what differs.
                values: values.iter::<f64>().map(f64::to_bits).collect(),
            });
        }
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_default()
}
