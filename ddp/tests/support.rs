//! Models, data and loops that the tests share.
use std::time::Duration;
use std::{env, process::Command};

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::Linear;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, Tensor, TensorData};
use collectives::{Algorithm, Communicator, CommunicatorConfig, Place, launch};
use ddp::{Batch, DdpConfig, DistributedSampler, Result};

pub(crate) fn device() -> Device {
    Device::flex().autodiff()
}

/// `f` on `world` thread ranks; every rank must succeed.
pub(crate) fn ranks<R: Send>(world: usize, f: impl Fn(Communicator) -> Result<R> + Sync) -> Vec<R> {
    launch::spawn(world, &config(), f).unwrap()
}

/// A sum in an order that does not depend on where in a buffer an element lies.
pub(crate) fn config() -> CommunicatorConfig {
    CommunicatorConfig::new()
        .with_algorithm(Algorithm::Tree)
        .with_timeout(Duration::from_secs(30))
}

/// Caps in bytes.
pub(crate) fn caps(first: usize, bucket: usize) -> DdpConfig {
    let mb = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    DdpConfig::new()
        .with_first_bucket_mb(mb(first))
        .with_bucket_cap_mb(mb(bucket))
}

/// Runs `body` in a process in which nothing else runs, since threads and memory are counted per
/// process. `test` is the full name of the calling test.
pub(crate) fn alone(test: &str, body: impl FnOnce()) {
    const INSIDE: &str = "LOCKSTEP_TEST_ALONE";
    if env::var_os(INSIDE).is_some() {
        return body();
    }
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Linear layers with ReLU between them; mean squared error against a target.
#[derive(Module, Debug)]
pub(crate) struct Mlp {
    pub(crate) layers: Vec<Linear>,
}

impl Mlp {
    /// The same weights at every call, up to 1 / sqrt(inputs).
    pub(crate) fn new(sizes: &[usize], dtype: DType) -> Self {
        let layers = sizes.windows(2).enumerate().map(|(layer, size)| {
            let scale = 1.0 / (size[0] as f64).sqrt();
            let tensor = |salt: usize, len: usize| {
                (0..len)
                    .map(|at| scale * noise(7919 * layer + salt, at))
                    .collect::<Vec<_>>()
            };
            Linear {
                weight: Param::from_tensor(from_vec(
                    tensor(1, size[0] * size[1]),
                    [size[0], size[1]],
                    dtype,
                )),
                bias: Some(Param::from_tensor(from_vec(
                    tensor(2, size[1]),
                    [size[1]],
                    dtype,
                ))),
            }
        });
        Self {
            layers: layers.collect(),
        }
    }

    pub(crate) fn forward(&self, mut input: Tensor<2>) -> Tensor<2> {
        let last = self.layers.len() - 1;
        for layer in &self.layers[..last] {
            input = relu(layer.forward(input));
        }
        self.layers[last].forward(input)
    }

    /// The mean over `rows` of made-up data.
    pub(crate) fn loss(&self, rows: &[usize]) -> Tensor<1> {
        let weight = self.layers[0].weight.base();
        let (inputs, dtype) = (weight.dims()[0], weight.dtype());
        let outputs = self.layers.last().unwrap().bias.as_ref().unwrap().dims()[0];
        let table = |salt: usize, width: usize| {
            let row = |&row: &usize| (0..width).map(move |column| noise(salt + row, column));
            from_vec(
                rows.iter().flat_map(row).collect(),
                [rows.len(), width],
                dtype,
            )
        };
        let error = self.forward(table(1000, inputs)) - table(2000, outputs);
        // Not `div_scalar`: in Burn 0.22.1 its gradient is rounded to f32, in f64 models too.
        (error.clone() * error).sum_dim(1).mean()
    }
}

/// Between -1 and 1, a function of its arguments.
pub(crate) fn noise(salt: usize, at: usize) -> f64 {
    let bits = (salt as u64 * 1_000_003 + at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let bits = (bits ^ (bits >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (bits >> 40) as f64 / f64::from(1 << 23) - 1.0
}

pub(crate) fn from_vec<const D: usize>(
    values: Vec<f64>,
    shape: [usize; D],
    dtype: DType,
) -> Tensor<D> {
    Tensor::from_data(
        TensorData::new(values, shape).convert_dtype(dtype),
        (&device(), dtype),
    )
}

pub(crate) fn vector(values: &[f32]) -> Tensor<1> {
    Tensor::from_floats(values, &device())
}

pub(crate) fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// All float parameters of a module, in visiting order, to the bit.
pub(crate) fn weights<M: Module>(module: &M) -> Vec<TensorData> {
    struct Collect(Vec<TensorData>);
    impl ModuleVisitor for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(param.base().into_data());
        }
    }
    let mut collect = Collect(Vec::new());
    module.visit(&mut collect);
    collect.0
}

/// Largest absolute difference between two lists of weights.
pub(crate) fn distance(a: &[TensorData], b: &[TensorData]) -> f64 {
    assert_eq!(a.len(), b.len());
    let difference = |(a, b): (&TensorData, &TensorData)| {
        let pairs = a.iter::<f64>().zip(b.iter::<f64>());
        pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
    };
    a.iter().zip(b).map(difference).fold(0.0, f64::max)
}

/// Where a training run ended.
#[derive(Debug, PartialEq)]
pub(crate) struct Run {
    pub(crate) losses: Vec<f64>,
    pub(crate) weights: Vec<TensorData>,
}

/// What to train.
pub(crate) struct Job<'a> {
    pub(crate) sizes: &'a [usize],
    pub(crate) dtype: DType,
    pub(crate) rows: usize,
    pub(crate) global_batch: usize,
    pub(crate) epochs: usize,
    pub(crate) learning_rate: f64,
    pub(crate) optimizer: fn() -> ModuleOptimizer,
}

impl Job<'_> {
    pub(crate) fn model(&self) -> Mlp {
        Mlp::new(self.sizes, self.dtype)
    }

    pub(crate) fn batches(&self, place: Place) -> Vec<Batch> {
        let mut sampler = DistributedSampler::new(self.rows, self.global_batch, place)
            .unwrap()
            .with_shuffle(3);
        (0..self.epochs)
            .flat_map(|_| sampler.epoch().collect::<Vec<_>>())
            .collect()
    }

    /// A plain Burn loop in one process.
    pub(crate) fn single(&self) -> Run {
        let (mut model, mut optimizer) = (self.model(), (self.optimizer)());
        let mut losses = Vec::new();
        for batch in self.batches(Place { rank: 0, world: 1 }) {
            let loss = model.loss(&batch.rows);
            losses.push(
                loss.clone()
                    .inner()
                    .into_data()
                    .iter::<f64>()
                    .next()
                    .unwrap(),
            );
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(self.learning_rate, model, gradients);
        }
        Run {
            losses,
            weights: weights(&model),
        }
    }

    /// The oracle, on `world` ranks.
    pub(crate) fn naive(&self, world: usize) -> Vec<Run> {
        ranks(world, |mut communicator| {
            let (mut model, mut optimizer) = (self.model(), (self.optimizer)());
            let mut losses = Vec::new();
            for batch in self.batches(communicator.place()) {
                let loss = model.loss(&batch.rows);
                let (gradients, loss) =
                    ddp::naive::backward(&model, loss, batch.samples, &mut communicator)?;
                losses.push(loss);
                model = optimizer.step(self.learning_rate, model, gradients);
            }
            Ok(Run {
                losses,
                weights: weights(&model),
            })
        })
    }

    pub(crate) fn ddp(&self, world: usize, config: DdpConfig) -> Vec<Run> {
        ranks(world, |communicator| {
            let mut optimizer = (self.optimizer)();
            let mut model = config.init(self.model(), communicator)?;
            let mut losses = Vec::new();
            for batch in self.batches(model.place()) {
                let gradients = model.backward(model.loss(&batch.rows), batch.samples)?;
                losses.push(model.last_step().loss);
                model
                    .step(self.learning_rate, &mut optimizer, gradients)
                    .unwrap();
            }
            Ok(Run {
                losses,
                weights: weights(&model.into_module()),
            })
        })
    }
}
