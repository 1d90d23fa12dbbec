//! Training without a subtraction, so that the drift from one process can be derived.
//!
//! Inputs, weights, biases and targets are positive and the loss is the mean of `(output +
//! target)^2`: no difference is taken before the optimizer. Of positive terms a sum has at most
//! the largest relative error of its terms, and a product the sum of its factors' errors, so
//! relative errors of the gradients only add up, in whatever order and by however many ranks they
//! were summed. What an optimizer makes of them is said case by case, as [`Sensitivity`].
use burn::module::{Module, ModuleMapper, Param};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Tensor, TensorData};
use collectives::Place;
use ddp::{Batch, DdpConfig, DistributedSampler};

use crate::support::{caps, from_vec, noise, ranks, weights};

/// A model whose every weight stands in sums of products only.
pub(crate) trait Positive: Module {
    /// Weights that are multiplied on the longest way from an input to an output. The error is of
    /// that degree in each weight, and so is the gradient at most `2 x DEGREE - 1`.
    const DEGREE: f64;

    /// Roundings on the longest way through forward, backward and the mean, see [`drift`].
    const ROUNDINGS: f64;

    /// One positive row for each of `rows`.
    fn output(&self, rows: &[usize]) -> Tensor<2>;
}

/// 19 rows in global batches of 8, twice: uneven parts for 3 ranks, and a last batch of 3 rows,
/// of which the fourth of 4 ranks has none.
const ROWS: usize = 19;
const GLOBAL_BATCH: usize = 8;
const EPOCHS: usize = 2;
const STEPS: usize = EPOCHS * ROWS.div_ceil(GLOBAL_BATCH);

/// What an optimizer does to a relative error of the gradients it was given so far.
#[derive(Clone, Copy)]
pub(crate) struct Sensitivity {
    /// An update of size 1 changes by this times the relative error of the gradients.
    pub(crate) amplification: f64,
    /// Roundings within the optimizer on the way from its first gradient to an update, in units
    /// of an update of size 1.
    pub(crate) roundings: f64,
    pub(crate) size: Size,
}

/// How large the updates are in which the amplification is told.
#[derive(Clone, Copy)]
pub(crate) enum Size {
    /// As large as the updates turn out to be: the amplification is a ratio of relative errors.
    AsSeen,
    /// The learning rate.
    Rate,
}

impl Sensitivity {
    /// Of an optimizer that takes no differences: relative errors of updates are at most
    /// `amplification` times those of the gradients. 128 roundings are 6 steps of at most 3 for a
    /// moving average of a gradient and 4 for one of its square, 25 for the norm of the largest
    /// weight, and as many again for what is computed of them.
    pub(crate) const fn relative(amplification: f64) -> Self {
        Self {
            amplification,
            roundings: 128.0,
            size: Size::AsSeen,
        }
    }
}

/// What is trained, and how.
pub(crate) struct Trial<M> {
    pub(crate) model: fn() -> M,
    pub(crate) optimizer: fn() -> ModuleOptimizer,
    pub(crate) rate: f64,
    pub(crate) sensitivity: Sensitivity,
}

/// What one process did, and what the bound needs to know of it.
pub(crate) struct Single {
    pub(crate) weights: Vec<TensorData>,
    /// The largest part of its value that a weight moved by in a step.
    moved: f64,
    /// The smallest weight there was.
    smallest: f64,
    /// The largest ratio between two gradients of one weight.
    pub(crate) swing: f64,
}

impl<M: Positive> Trial<M> {
    fn batches(place: Place) -> Vec<Batch> {
        let mut sampler = DistributedSampler::new(ROWS, GLOBAL_BATCH, place)
            .unwrap()
            .with_shuffle(5);
        (0..EPOCHS)
            .flat_map(|_| sampler.epoch().collect::<Vec<_>>())
            .collect()
    }

    /// A plain Burn loop in one process.
    pub(crate) fn single(&self) -> Single {
        let (mut model, mut optimizer) = ((self.model)(), (self.optimizer)());
        let mut weights_before = numbers(&weights(&model));
        let (mut moved, mut smallest) = (0.0f64, f64::INFINITY);
        let mut extremes = vec![(f64::INFINITY, 0.0f64); weights_before.len()];
        for batch in Self::batches(Place { rank: 0, world: 1 }) {
            let gradients =
                GradientsParams::from_grads(loss(&model, &batch.rows).backward(), &model);
            for (at, gradient) in gradients_of(&model, &gradients).into_iter().enumerate() {
                if let Some(gradient) = gradient {
                    assert!(gradient > 0.0, "the model is not positive: {gradient}");
                    let (low, high) = extremes[at];
                    extremes[at] = (low.min(gradient), high.max(gradient));
                }
            }
            model = optimizer.step(self.rate, model, gradients);
            let now = numbers(&weights(&model));
            for (before, now) in weights_before.iter().zip(&now) {
                moved = moved.max((now - before).abs() / before);
                smallest = smallest.min(*now);
            }
            weights_before = now;
        }
        assert!(smallest > 0.0, "a weight went through zero");
        assert!(moved > 0.0, "nothing was trained");
        let swing = |(low, high): &(f64, f64)| if low.is_finite() { high / low } else { 1.0 };
        Single {
            weights: weights(&model),
            moved,
            smallest,
            swing: extremes.iter().map(swing).fold(1.0, f64::max),
        }
    }

    /// The same on `world` ranks: the weights of each.
    pub(crate) fn ddp(&self, world: usize, config: DdpConfig) -> Vec<Vec<TensorData>> {
        ranks(world, |communicator| {
            let mut optimizer = (self.optimizer)();
            let mut model = config.init((self.model)(), communicator)?;
            for batch in Self::batches(model.place()) {
                let loss = loss(model.module(), &batch.rows);
                let gradients = model.backward(loss, batch.samples)?;
                model.step(self.rate, &mut optimizer, gradients)?;
            }
            Ok(weights(&model.into_module()))
        })
    }

    /// Trains on 1 to 4 ranks, by one bucket and by several, and holds all against one process.
    pub(crate) fn check(&self, name: &str) -> Single {
        let single = self.single();
        let bound = self.drift(&single);
        // A wrong gradient moves the weights by another length: one in 10,000 shows.
        let moved = single.moved;
        assert!(
            bound < 1e-4 * moved,
            "{name}: {bound:e} of {moved:e} says nothing"
        );
        for (world, config) in [
            (1, DdpConfig::new()),
            (2, caps(100, 200)),
            (3, caps(0, 0)),
            (4, DdpConfig::new()),
        ] {
            let all = self.ddp(world, config);
            for other in &all {
                assert_eq!(*other, all[0], "{name}: {world} ranks part");
            }
            let far = relative_distance(&all[0], &single.weights);
            assert!(
                far <= bound,
                "{name}, {world} ranks: {far:e} away, at most {bound:e}"
            );
        }
        single
    }

    /// How far N ranks may be from one process in the end, relative to each weight.
    ///
    /// Say the weights differ by at most d, relatively. The gradients then differ by at most
    ///
    ///   g = (2 x DEGREE - 1) d + 2 x ROUNDINGS x u,
    ///
    /// u half an epsilon: each run is within ROUNDINGS of the exact value, whatever the order of
    /// its sums. An update of size s of a weight, both relative to it, differs by at most
    /// s (a g + 2 b u), with the optimizer's amplification a and roundings b. The new weight is at
    /// least 1 - m of the old, if m is the most it moves, and is rounded once in each run:
    ///
    ///   d' = (d + s (a g + 2 b u)) / (1 - m) + 2 u.
    ///
    /// A hundredth on top is for products of errors, which are below 1e-8 themselves.
    fn drift(&self, single: &Single) -> f64 {
        let unit = f64::EPSILON / 2.0;
        let how = self.sensitivity;
        let size = match how.size {
            Size::AsSeen => single.moved,
            Size::Rate => self.rate / single.smallest,
        };
        let mut drift = 0.0;
        for _ in 0..STEPS {
            let gradient = (2.0 * M::DEGREE - 1.0) * drift + 2.0 * M::ROUNDINGS * unit;
            let update = size * (how.amplification * gradient + 2.0 * how.roundings * unit);
            drift = (drift + update) / (1.0 - single.moved) + 2.0 * unit;
        }
        1.01 * drift
    }
}

/// The mean over `rows` of the squared distance from targets below zero, made small by a power
/// of two, so that gradients are about 1.
pub(crate) fn loss<M: Positive>(model: &M, rows: &[usize]) -> Tensor<1> {
    let output = model.output(rows);
    let [_, outputs] = output.dims();
    let below = output + table(2000, rows, [rows.len(), outputs], 4.0, 5.0);
    (below.clone() * below)
        .sum_dim(1)
        .mean()
        .mul_scalar(1.0 / 256.0)
}

/// Made-up numbers from `low` to `high`, a function of the row and the place in it.
pub(crate) fn table<const D: usize>(
    salt: usize,
    rows: &[usize],
    shape: [usize; D],
    low: f64,
    high: f64,
) -> Tensor<D> {
    let width = shape[1..].iter().product::<usize>();
    let middle = (low + high) / 2.0;
    let row = |&row: &usize| {
        (0..width).map(move |at| middle + (high - low) / 2.0 * noise(salt + row, at))
    };
    from_vec(rows.iter().flat_map(row).collect(), shape, DType::F64)
}

/// Gives every parameter f64 values from 0.5 to 0.75, the same at every call.
pub(crate) fn lift<M: Module>(module: M) -> M {
    struct Lift(usize);
    impl ModuleMapper for Lift {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            self.0 += 1;
            let shape = param.dims();
            let values = (0..shape.iter().product()).map(|at| 0.625 + noise(self.0, at) / 8.0);
            let (trained, values) = (param.is_require_grad(), values.collect());
            let (id, _, mapper) = param.consume();
            let leaf = from_vec(values, shape, DType::F64).set_require_grad(trained);
            Param::from_mapped_value(id, leaf, mapper)
        }
    }
    module.map(&mut Lift(0))
}

fn numbers(weights: &[TensorData]) -> Vec<f64> {
    weights
        .iter()
        .flat_map(|data| data.iter::<f64>().collect::<Vec<_>>())
        .collect()
}

/// Per element of all parameters, in visiting order: its gradient, if it has one.
fn gradients_of<M: Module>(module: &M, gradients: &GradientsParams) -> Vec<Option<f64>> {
    struct Collect<'a>(&'a GradientsParams, Vec<Option<f64>>);
    impl burn::module::ModuleVisitor for Collect<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            match self.0.get::<D>(param.id) {
                Some(gradient) => self.1.extend(gradient.into_data().iter::<f64>().map(Some)),
                None => {
                    let len = param.dims().iter().product::<usize>();
                    self.1.extend(vec![None; len]);
                }
            }
        }
    }
    let mut collect = Collect(gradients, Vec::new());
    module.visit(&mut collect);
    collect.1
}

fn relative_distance(a: &[TensorData], b: &[TensorData]) -> f64 {
    let (a, b) = (numbers(a), numbers(b));
    assert_eq!(a.len(), b.len());
    let pairs = a.iter().zip(&b);
    pairs.map(|(a, b)| ((a - b) / b).abs()).fold(0.0, f64::max)
}
