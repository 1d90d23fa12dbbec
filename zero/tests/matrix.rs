//! Stages, world sizes, optimizers and models, each with each: ddp's bits, those of one process, and
//! those of a plain loop.
use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{AvgPool2d, AvgPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdamConfig, AdamWConfig, AdanConfig, GradientsParams, LionConfig,
    ModuleOptimizer, RmsPropConfig, SgdConfig,
};
use burn::tensor::activation::relu;
use burn::tensor::{DType, Int, Tensor, TensorData};
use collectives::Place;
use ddp::{DdpConfig, DistributedSampler};
use zero::Stage;

use crate::run::Task;
use crate::support::{Mlp, caps, device, from_vec, noise, weights};

/// A way to make one, and its name.
pub(crate) type Optimizer = (&'static str, fn() -> ModuleOptimizer);

/// Every element-wise one of Burn, with what it has of settings that keep state.
pub(crate) const OPTIMIZERS: [Optimizer; 9] = [
    ("sgd", || SgdConfig::new().init()),
    ("momentum", || {
        SgdConfig::new()
            .with_momentum(Some(MomentumConfig::new().with_nesterov(true)))
            .with_weight_decay(Some(WeightDecayConfig::new(0.1)))
            .init()
    }),
    ("adam", || AdamConfig::new().init()),
    ("amsgrad", || AdamConfig::new().with_amsgrad(true).init()),
    ("adamw", || AdamWConfig::new().with_weight_decay(0.1).init()),
    ("rmsprop", || {
        RmsPropConfig::new().with_centered(true).init()
    }),
    ("adagrad", || AdaGradConfig::new().with_lr_decay(0.1).init()),
    ("lion", || LionConfig::new().with_weight_decay(0.1).init()),
    ("adan", || AdanConfig::new().with_weight_decay(0.1).init()),
];

fn param<const D: usize>(salt: usize, shape: [usize; D]) -> Param<Tensor<D>> {
    let numbers = (0..shape.iter().product()).map(|at| noise(salt, at));
    Param::from_tensor(from_vec(numbers.collect(), shape, DType::F32))
}

fn linear(salt: usize, inputs: usize, outputs: usize) -> Linear {
    Linear {
        weight: param(salt, [inputs, outputs]),
        bias: Some(param(salt + 1, [outputs])),
    }
}

/// Made-up numbers for each row.
fn table<const D: usize>(rows: &[usize], shape: [usize; D]) -> Tensor<D> {
    let width = shape[1..].iter().product();
    let row = |&row: &usize| (0..width).map(move |at| noise(3000 + row, at));
    from_vec(rows.iter().flat_map(row).collect(), shape, DType::F32)
}

fn mean_of_squares(output: Tensor<2>) -> Tensor<1> {
    (output.clone() * output).sum_dim(1).mean()
}

pub(crate) fn mlp() -> Mlp {
    Mlp::new(&[5, 7, 3], DType::F32)
}

/// One channel of 6 x 6 to two of 4 x 4, to two of 2 x 2, to three outputs.
#[derive(Module, Debug)]
struct Convolutional {
    conv: Conv2d,
    pool: AvgPool2d,
    head: Linear,
}

impl Convolutional {
    fn new() -> Self {
        let mut conv = Conv2dConfig::new([1, 2], [3, 3]).init(&device());
        conv.weight = param(10, [2, 1, 3, 3]);
        conv.bias = Some(param(11, [2]));
        Self {
            conv,
            pool: AvgPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            head: linear(12, 8, 3),
        }
    }

    fn loss(&self, rows: &[usize]) -> Tensor<1> {
        let images = table(rows, [rows.len(), 1, 6, 6]);
        let pooled = self.pool.forward(relu(self.conv.forward(images)));
        mean_of_squares(self.head.forward(pooled.flatten(1, 3)))
    }
}

/// Two words of seven a row. The table is the head too.
#[derive(Module, Debug)]
struct Words {
    embedding: Embedding,
    middle: Linear,
}

impl Words {
    fn new() -> Self {
        let mut embedding = EmbeddingConfig::new(7, 3).init(&device());
        embedding.weight = param(20, [7, 3]);
        Self {
            embedding,
            middle: linear(21, 3, 3),
        }
    }

    fn loss(&self, rows: &[usize]) -> Tensor<1> {
        let words = |&row: &usize| [(row * 5) as i64 % 7, (row * 3 + 1) as i64 % 7];
        let words: Vec<i64> = rows.iter().flat_map(words).collect();
        let words = Tensor::<2, Int>::from_data(TensorData::new(words, [rows.len(), 2]), &device());
        let mean = self.embedding.forward(words).mean_dim(1);
        let hidden = self.middle.forward(mean.squeeze_dim::<2>(1));
        mean_of_squares(hidden.matmul(self.embedding.weight.val().transpose()))
    }
}

/// Normalises over the rows that it is given, and keeps running state, which is compared too.
#[derive(Module, Debug)]
struct Normed {
    first: Linear,
    norm: BatchNorm,
    last: Linear,
}

impl Normed {
    fn new() -> Self {
        Self {
            first: linear(30, 4, 6),
            norm: BatchNormConfig::new(6).init(&device()),
            last: linear(32, 6, 3),
        }
    }

    fn loss(&self, rows: &[usize]) -> Tensor<1> {
        let hidden = self.first.forward(table(rows, [rows.len(), 4]));
        mean_of_squares(self.last.forward(relu(self.norm.forward(hidden))))
    }
}

/// One layer three times over, and once more beside it.
#[derive(Module, Debug)]
struct Recurrent {
    cell: Linear,
}

impl Recurrent {
    fn new() -> Self {
        Self {
            cell: linear(40, 4, 4),
        }
    }

    fn loss(&self, rows: &[usize]) -> Tensor<1> {
        let mut state = table(rows, [rows.len(), 4]);
        for _ in 0..3 {
            state = self.cell.forward(state).tanh();
        }
        mean_of_squares(state)
    }
}

/// Ten rows in batches of four: of the last, two rows, two ranks of four have none, and take part
/// with a weight of 0.
fn task<M: Module>(
    model: fn() -> M,
    loss: fn(&M, &[usize]) -> Tensor<1>,
    optimizer: fn() -> ModuleOptimizer,
) -> Task<M> {
    Task {
        model,
        loss,
        optimizer,
        rate: 0.02,
        rows: 10,
        global_batch: 4,
        epochs: 2,
    }
}

/// Small enough that a parameter lies by itself, and one lies over several ranks.
fn config() -> DdpConfig {
    caps(40, 120)
}

fn equals_ddp<M: Module>(model: fn() -> M, loss: fn(&M, &[usize]) -> Tensor<1>) {
    for (name, optimizer) in OPTIMIZERS {
        task(model, loss, optimizer).check(name, 1..=4, config());
    }
}

/// With twelve micro-shards, of which one, two, three and four ranks have as many each: six of the
/// last batch of six rows are empty.
fn equals_one_process<M: Module>(model: fn() -> M, loss: fn(&M, &[usize]) -> Tensor<1>) {
    let config = config().with_micro_shards(12).with_max_grad_norm(1.0);
    for (name, optimizer) in OPTIMIZERS {
        let task = Task {
            rows: 18,
            global_batch: 12,
            ..task(model, loss, optimizer)
        };
        let one = task.ddp(1, config);
        for stage in Stage::ALL {
            for world in 1..=4 {
                let sharded = task.zero(stage, world, config);
                assert_eq!(sharded, one, "{name}, {stage:?}, {world} ranks");
            }
        }
    }
}

/// On one rank, with batches of four, nothing is left of the wrapper but a factor of 4 and a
/// division by it, which are exact: an oracle of which nothing is ours.
fn equals_a_plain_loop<M: Module>(model: fn() -> M, loss: fn(&M, &[usize]) -> Tensor<1>) {
    for (name, optimizer) in OPTIMIZERS {
        let task = Task {
            rows: 8,
            ..task(model, loss, optimizer)
        };
        let alone = Place { rank: 0, world: 1 };
        let sampler = DistributedSampler::new(task.rows, task.global_batch, alone);
        let mut sampler = sampler.unwrap().with_shuffle(3);
        let (mut plain, mut optimizer) = ((task.model)(), (task.optimizer)());
        for _ in 0..task.epochs {
            for batch in sampler.epoch() {
                let leaves = loss(&plain, &batch.rows).backward();
                let gradients = GradientsParams::from_grads(leaves, &plain);
                plain = optimizer.step(task.rate, plain, gradients);
            }
        }
        let plain = weights(&plain);
        for stage in Stage::ALL {
            let sharded = task.zero(stage, 1, config());
            assert_eq!(sharded.weights, plain, "{name}, {stage:?}");
        }
    }
}

#[test]
fn an_mlp_has_the_bits_of_ddp_by_every_optimizer() {
    equals_ddp(mlp, Mlp::loss);
}

#[test]
fn a_convolutional_model_has_the_bits_of_ddp_by_every_optimizer() {
    equals_ddp(Convolutional::new, Convolutional::loss);
}

#[test]
fn an_embedding_with_a_tied_head_has_the_bits_of_ddp_by_every_optimizer() {
    equals_ddp(Words::new, Words::loss);
}

#[test]
fn batch_norm_and_its_running_state_have_the_bits_of_ddp_by_every_optimizer() {
    equals_ddp(Normed::new, Normed::loss);
}

#[test]
fn a_layer_used_three_times_has_the_bits_of_ddp_by_every_optimizer() {
    equals_ddp(Recurrent::new, Recurrent::loss);
}

#[test]
fn an_mlp_with_micro_shards_has_the_bits_of_one_process_by_every_optimizer() {
    equals_one_process(mlp, Mlp::loss);
}

#[test]
fn a_convolutional_model_with_micro_shards_has_the_bits_of_one_process_by_every_optimizer() {
    equals_one_process(Convolutional::new, Convolutional::loss);
}

#[test]
fn an_embedding_with_micro_shards_has_the_bits_of_one_process_by_every_optimizer() {
    equals_one_process(Words::new, Words::loss);
}

#[test]
fn one_rank_has_the_bits_of_a_plain_loop_by_every_optimizer() {
    equals_a_plain_loop(mlp, Mlp::loss);
    equals_a_plain_loop(Convolutional::new, Convolutional::loss);
    equals_a_plain_loop(Words::new, Words::loss);
}
