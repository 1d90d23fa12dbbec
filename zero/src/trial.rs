//! Whether an optimizer may be given a piece of a parameter: it is tried.
//!
//! Burn's `ModuleOptimizer` hides which optimizer steps which parameter. So each parameter of the
//! user's module, with its id and its path, stands for itself in a small trial: once whole, and once
//! in two pieces. Where the bits of the pieces are not those of the whole, the elements depend on
//! each other, as those of LAMB, Muon and Adafactor do, or as clipping by a parameter's norm makes
//! them.
use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::{GradientsParams, ModuleOptimizer, OptimizerRecord};
use burn::tensor::{Tensor, TensorData};
use burn_pack::{Bytes, DType};
use ddp::Slots;

use crate::{Error, Result, state};

/// Elements of a parameter on trial, as a matrix where it has two axes.
const LEN: usize = ROWS * COLUMNS;
const ROWS: usize = 8;
const COLUMNS: usize = 5;

/// Where it is cut.
const CUT: usize = 13;

/// How large the gradients of each step are. The last is beyond any norm that one clips at.
const SCALES: [f64; 3] = [1.0, 1e-3, 1e12];

/// What a trial has shown.
pub(crate) struct Trial {
    /// A hash of where it ended: the same on ranks whose optimizers are.
    pub(crate) hash: u64,
    /// By a parameter's id, how many numbers are kept for each of its elements.
    pub(crate) state_per_element: HashMap<u64, usize>,
}

impl Trial {
    /// The same by slot.
    pub(crate) fn by_slot(&self, slots: &Slots) -> Vec<usize> {
        let mut by_slot = vec![0; slots.len()];
        for (&id, &count) in &self.state_per_element {
            if let Some(slot) = slots.find(id.into()) {
                by_slot[slot] = count;
            }
        }
        by_slot
    }
}

/// Checks that every parameter can be stepped in pieces.
///
/// # Errors
///
/// [`Error::WholeTensor`] names the first that cannot.
pub(crate) fn element_wise<M: Module>(module: &M, optimizer: &ModuleOptimizer) -> Result<Trial> {
    let run = |start, end| {
        let run = || trial(module, optimizer, start, end);
        catch_unwind(AssertUnwindSafe(run)).map_err(|panic| message(panic.as_ref()))
    };
    let runs = (|| Ok([run(0, LEN)?, run(0, CUT)?, run(CUT, LEN)?]))();
    let runs = runs.map_err(|panic: String| Error::WholeTensor {
        parameter: "(one of them)".to_owned(),
        why: format!("in a trial step on a vector of {LEN} it panicked: {panic}"),
    })?;
    let [(whole, tried), (left, _), (right, _)] = runs;
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for ((whole, left), right) in whole.iter().zip(&left).zip(&right) {
        let pieces = left.values.iter().chain(&right.values);
        if !whole.values.iter().eq(pieces) {
            let why = match optimizer.has_gradient_clipping() {
                true => {
                    "two pieces of it come out unlike the whole, because the gradient clipping takes \
                     the norm of one parameter; leave that out and set `max_grad_norm`, the norm of \
                     all parameters over all ranks"
                }
                false => {
                    "two pieces of it come out unlike the whole, as with LAMB, Muon and Adafactor; \
                     take an element-wise one: SGD, Adam, AdamW, RMSProp, AdaGrad, Lion, Adan"
                }
            };
            return Err(Error::WholeTensor {
                parameter: whole.path.clone(),
                why: why.to_owned(),
            });
        }
        for &bits in &whole.values {
            hash = (hash ^ bits).wrapping_mul(0x0100_0000_01b3);
        }
    }
    let mut state_per_element = HashMap::new();
    for (id, state) in state::of(&tried)? {
        let elements = |(dtype, bytes): &(DType, Bytes)| bytes.len() / dtype.size();
        let elements: usize = state.tensors.values().map(elements).sum();
        state_per_element.insert(id, elements / LEN);
    }
    Ok(Trial {
        hash,
        state_per_element,
    })
}

/// Where elements `start` to `end` of every parameter end after a few steps, and the optimizer.
fn trial<M: Module>(
    module: &M,
    optimizer: &ModuleOptimizer,
    start: usize,
    end: usize,
) -> (Vec<Outcome>, ModuleOptimizer) {
    let mut optimizer = optimizer.clone().load_record(OptimizerRecord::default());
    let mut module = module.clone().map(&mut Shrink { start, end });
    for scale in SCALES {
        let mut gradients = Invent {
            start,
            scale,
            gradients: GradientsParams::new(),
        };
        module.visit(&mut gradients);
        module = optimizer.step(0.01, module, gradients.gradients);
    }
    let mut outcomes = Outcomes {
        path: Vec::new(),
        outcomes: Vec::new(),
    };
    module.visit(&mut outcomes);
    (outcomes.outcomes, optimizer)
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
    start: usize,
    scale: f64,
    gradients: GradientsParams,
}

impl ModuleVisitor for Invent {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.is_require_grad() {
            return;
        }
        let dims = param.dims();
        let range = self.start..self.start + dims.iter().product::<usize>();
        let data = TensorData::new(numbers(range, 3, self.scale), dims);
        let (device, dtype) = (param.device().without_autodiff(), param.dtype());
        let gradient = Tensor::<D>::from_data(data.convert_dtype(dtype), (&device, dtype));
        self.gradients.register(param.id, gradient);
    }
}

/// Where a parameter ended: the bits of its elements.
struct Outcome {
    path: String,
    values: Vec<u64>,
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
