//! Convolutions, embeddings, normalisation, and layers that are shared, frozen or unused.
use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{AvgPool2d, AvgPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{
    AdamConfig, AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig, momentum::MomentumConfig,
};
use burn::tensor::activation::relu;
use burn::tensor::{DType, Int, Tensor, TensorData};
use collectives::Place;
use ddp::{Batch, DdpConfig, DistributedSampler};

use crate::positive::{Positive, Sensitivity, Trial, lift, table};
use crate::support::{Mlp, caps, device, from_vec, noise, ranks, values, weights};

fn momentum() -> ModuleOptimizer {
    let momentum = MomentumConfig::new().with_dampening(0.0);
    SgdConfig::new().with_momentum(Some(momentum)).init()
}

fn adam() -> ModuleOptimizer {
    AdamConfig::new().init()
}

/// Trains by momentum and by Adam, whose errors are explained in `optimizers`.
fn check<M: Positive>(name: &str, model: fn() -> M, rate: f64) {
    let (optimizer, sensitivity) = (momentum as fn() -> _, Sensitivity::relative(1.0));
    Trial {
        model,
        optimizer,
        rate,
        sensitivity,
    }
    .check(name);
    let (optimizer, sensitivity) = (adam as fn() -> _, Sensitivity::relative(2.0));
    Trial {
        model,
        optimizer,
        rate: 0.01,
        sensitivity,
    }
    .check(name);
}

/// 1 channel of 6 x 6 to 2 of 4 x 4, to 2 of 2 x 2, to 3 outputs.
#[derive(Module, Debug)]
struct Convolutional {
    conv: Conv2d,
    pool: AvgPool2d,
    head: Linear,
}

impl Positive for Convolutional {
    const DEGREE: f64 = 2.0;

    /// Forward 9 + 1, the pool 4 + 1, the head 8 + 1; the target 1, the square and its mean 6;
    /// backward 3 + 1, the pool 1, and 8 rows of 16 places + 1; weight, sum and mean 5: 170.
    const ROUNDINGS: f64 = 200.0;

    fn output(&self, rows: &[usize]) -> Tensor<2> {
        let images = table(4000, rows, [rows.len(), 1, 6, 6], 0.25, 0.5);
        let pooled = self.pool.forward(relu(self.conv.forward(images)));
        self.head.forward(pooled.flatten(1, 3))
    }
}

#[test]
fn a_convolutional_model_on_n_ranks_equals_one_process() {
    check(
        "convolutional",
        || {
            lift(Convolutional {
                conv: Conv2dConfig::new([1, 2], [3, 3]).init(&device()),
                pool: AvgPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
                head: LinearConfig::new(8, 3).init(&device()),
            })
        },
        0.001,
    );
}

/// The mean of 3 words' embeddings, compared with every word's: one weight, used both ways.
#[derive(Module, Debug)]
struct Words {
    embedding: Embedding,
}

const VOCABULARY: usize = 7;

impl Positive for Words {
    const DEGREE: f64 = 2.0;

    /// Forward 3 + 1 and 4, the target 1, the square and its mean 6; backward 7 + 1 and the mean
    /// 1, and 24 words + 1, plus the other use; weight, sum and mean 5: 60.
    const ROUNDINGS: f64 = 80.0;

    fn output(&self, rows: &[usize]) -> Tensor<2> {
        let word = |row: &usize| {
            let row = *row;
            (0..3).map(move |at| (row * 5 + at * 3) as i64 % VOCABULARY as i64)
        };
        let words: Vec<i64> = rows.iter().flat_map(word).collect();
        let words = Tensor::<2, Int>::from_data(TensorData::new(words, [rows.len(), 3]), &device());
        let mean = self
            .embedding
            .forward(words)
            .mean_dim(1)
            .squeeze_dim::<2>(1);
        mean.matmul(self.embedding.weight.val().transpose())
    }
}

#[test]
fn an_embedding_with_a_tied_head_on_n_ranks_equals_one_process() {
    let model: fn() -> Words = || {
        lift(Words {
            embedding: EmbeddingConfig::new(VOCABULARY, 4).init(&device()),
        })
    };
    check("embedding", model, 0.01);
    ranks(2, |communicator| {
        let mut model = caps(0, 0).init(model(), communicator)?;
        let loss = crate::positive::loss(model.module(), &[0, 1]);
        model.backward(loss, 2)?;
        assert_eq!(model.plan().slots(), 1);
        assert_eq!(model.last_step().buckets.len(), 1);
        Ok(())
    });
}

/// A frozen layer between two trained ones, and a layer that takes no part.
#[derive(Module, Debug)]
struct Partial {
    first: Linear,
    frozen: Linear,
    last: Linear,
    unused: Linear,
}

impl Positive for Partial {
    const DEGREE: f64 = 2.0;

    /// Forward 4 + 1 three times, the target 1, the square and its mean 6; backward 3 + 1, 4 + 1
    /// and 8 + 1; weight, sum and mean 5: 45.
    const ROUNDINGS: f64 = 60.0;

    fn output(&self, rows: &[usize]) -> Tensor<2> {
        let input = table(5000, rows, [rows.len(), 4], 0.25, 0.5);
        let hidden = relu(self.frozen.forward(relu(self.first.forward(input))));
        self.last.forward(hidden)
    }
}

impl Partial {
    fn new() -> Self {
        let layer = |outputs| LinearConfig::new(4, outputs).init(&device());
        lift(Self {
            first: layer(4),
            frozen: layer(4).no_grad(),
            last: layer(3),
            unused: layer(2),
        })
    }
}

#[test]
fn frozen_and_unused_layers_stay_while_the_others_equal_one_process() {
    check("partial", Partial::new, 0.002);
    let trained = ranks(3, |communicator| {
        // A gradient of zero would show, as decay.
        let mut optimizer = AdamWConfig::new().with_weight_decay(0.1).init();
        let mut model = caps(0, 0).init(Partial::new(), communicator)?;
        for _ in 0..3 {
            let loss = crate::positive::loss(model.module(), &[0, 1]);
            let gradients = model.backward(loss, 2)?;
            assert_eq!(model.last_step().unused, ["unused.weight", "unused.bias"]);
            model.step(0.01, &mut optimizer, gradients)?;
        }
        Ok(model.into_module())
    });
    let start = Partial::new();
    for end in trained {
        assert_eq!(weights(&end.frozen), weights(&start.frozen));
        assert_eq!(weights(&end.unused), weights(&start.unused));
        assert_ne!(weights(&end.first), weights(&start.first));
    }
}

/// Normalises over the rows that it is given.
#[derive(Module, Debug)]
struct Normed {
    first: Linear,
    norm: BatchNorm,
    last: Linear,
}

impl Normed {
    fn new() -> Self {
        let [first, last] = Mlp::new(&[4, 6, 3], DType::F32)
            .layers
            .try_into()
            .expect("two layers");
        let norm = BatchNormConfig::new(6).init(&device());
        Self { first, norm, last }
    }

    fn loss(&self, rows: &[usize]) -> Tensor<1> {
        let row = |&row: &usize| (0..4).map(move |at| noise(6000 + row, at));
        let input = from_vec(
            rows.iter().flat_map(row).collect(),
            [rows.len(), 4],
            DType::F32,
        );
        let output = self
            .last
            .forward(relu(self.norm.forward(self.first.forward(input))));
        (output.clone() * output).sum_dim(1).mean()
    }

    fn running(&self) -> [Vec<f32>; 2] {
        [&self.norm.running_mean, &self.norm.running_var].map(|state| values(state.value_sync()))
    }
}

fn normed_batches(place: Place) -> Vec<Batch> {
    let mut sampler = DistributedSampler::new(19, 8, place)
        .unwrap()
        .with_shuffle(5);
    (0..2)
        .flat_map(|_| sampler.epoch().collect::<Vec<_>>())
        .collect()
}

/// The parts of `world` ranks one after the other in one process, each in a module of its own, so
/// that each has its own running state; their gradients times their rows, summed in the order of
/// the tree, by the total.
fn parts_in_one_process(world: usize, optimizer: fn() -> ModuleOptimizer) -> Vec<Normed> {
    let mut modules: Vec<Normed> = (0..world).map(|_| Normed::new()).collect();
    let mut optimizers: Vec<ModuleOptimizer> = (0..world).map(|_| optimizer()).collect();
    let batches: Vec<Vec<Batch>> = (0..world)
        .map(|rank| normed_batches(Place { rank, world }))
        .collect();
    for step in 0..batches[0].len() {
        let rows: Vec<usize> = batches
            .iter()
            .map(|batches| batches[step].samples)
            .collect();
        let sums = modules.iter().zip(&batches).map(|(module, batches)| {
            let batch = &batches[step];
            let leaves = module.loss(&batch.rows).backward();
            weighted(
                module,
                &GradientsParams::from_grads(leaves, module),
                if world == 1 { 1 } else { batch.samples },
            )
        });
        let sum = tree(&sums.collect::<Vec<_>>());
        // One rank alone has the mean already.
        let total = match world {
            1 => 1.0,
            _ => rows.iter().sum::<usize>() as f32,
        };
        let mean: Vec<Vec<f32>> = sum
            .into_iter()
            .map(|values| values.into_iter().map(|value| value / total).collect())
            .collect();
        modules = modules
            .into_iter()
            .zip(&mut optimizers)
            .map(|(module, optimizer)| {
                let gradients = gradients(&module, &mean);
                optimizer.step(0.05, module, gradients)
            })
            .collect();
    }
    modules
}

/// T(n) = T(p) + T(n - p), p the largest power of two below n.
fn tree(parts: &[Vec<Vec<f32>>]) -> Vec<Vec<f32>> {
    if let [part] = parts {
        return part.clone();
    }
    let (low, high) = parts.split_at(parts.len().next_power_of_two() / 2);
    let (low, high) = (tree(low), tree(high));
    let add = |(low, high): (Vec<f32>, Vec<f32>)| {
        let pairs = low.into_iter().zip(high);
        pairs.map(|(low, high)| low + high).collect()
    };
    low.into_iter().zip(high).map(add).collect()
}

/// Each trained parameter's gradient times `samples`, in visiting order.
fn weighted(module: &Normed, gradients: &GradientsParams, samples: usize) -> Vec<Vec<f32>> {
    let of = |values: Vec<f32>| {
        values
            .into_iter()
            .map(|value| value * samples as f32)
            .collect()
    };
    let matrix = |param: &Param<Tensor<2>>| of(values(gradients.get::<2>(param.id).unwrap()));
    let vector = |param: &Param<Tensor<1>>| of(values(gradients.get::<1>(param.id).unwrap()));
    vec![
        matrix(&module.first.weight),
        vector(module.first.bias.as_ref().unwrap()),
        vector(&module.norm.gamma),
        vector(&module.norm.beta),
        matrix(&module.last.weight),
        vector(module.last.bias.as_ref().unwrap()),
    ]
}

/// The other way round.
fn gradients(module: &Normed, mean: &[Vec<f32>]) -> GradientsParams {
    fn put<const D: usize>(
        gradients: &mut GradientsParams,
        param: &Param<Tensor<D>>,
        mean: &[f32],
    ) {
        let data = TensorData::new(mean.to_vec(), param.dims());
        gradients.register::<D>(param.id, Tensor::from_data(data, &device().inner()));
    }
    let mut gradients = GradientsParams::new();
    put(&mut gradients, &module.first.weight, &mean[0]);
    put(
        &mut gradients,
        module.first.bias.as_ref().unwrap(),
        &mean[1],
    );
    put(&mut gradients, &module.norm.gamma, &mean[2]);
    put(&mut gradients, &module.norm.beta, &mean[3]);
    put(&mut gradients, &module.last.weight, &mean[4]);
    put(&mut gradients, module.last.bias.as_ref().unwrap(), &mean[5]);
    gradients
}

/// Each rank normalises by its own rows, as everywhere where statistics are not synchronised. The
/// oracle runs the same operations on the same rows, so both agree to the bit.
#[test]
fn batch_norm_on_n_ranks_equals_its_parts_normalised_by_themselves_to_the_bit() {
    for optimizer in [momentum as fn() -> ModuleOptimizer, adam] {
        for world in 1..=4 {
            let parts = parts_in_one_process(world, optimizer);
            let trained = ranks(world, |communicator| {
                let mut optimizer = optimizer();
                let config = caps(100, 200).with_broadcast_buffers(false);
                let mut model = config.init(Normed::new(), communicator)?;
                for batch in normed_batches(model.place()) {
                    let loss = model.loss(&batch.rows);
                    let gradients = model.backward(loss, batch.samples)?;
                    model.step(0.05, &mut optimizer, gradients)?;
                }
                let running = model.running();
                let [first, last] = [&model.first, &model.last].map(weights);
                let norm = [&model.norm.gamma, &model.norm.beta].map(|param| values(param.val()));
                Ok((running, first, norm, last))
            });
            for (rank, (running, first, norm, last)) in trained.into_iter().enumerate() {
                let part = &parts[rank];
                assert_eq!(first, weights(&part.first), "rank {rank} of {world}");
                assert_eq!(last, weights(&part.last), "rank {rank} of {world}");
                let expected = [&part.norm.gamma, &part.norm.beta].map(|param| values(param.val()));
                assert_eq!(norm, expected, "rank {rank} of {world}");
                assert_eq!(running, part.running(), "rank {rank} of {world}");
            }
            if world > 1 {
                assert_ne!(
                    parts[0].running(),
                    parts[1].running(),
                    "the parts are alike"
                );
            }
        }
    }
}

/// On one rank nothing is left of the wrapper but a factor of 8 and a division by it, which are
/// exact: a plain loop, to the bit.
#[test]
fn batch_norm_on_one_rank_is_a_plain_loop_to_the_bit() {
    let place = Place { rank: 0, world: 1 };
    let mut batches = normed_batches(place);
    batches.retain(|batch| batch.samples == 8);
    let (mut plain, mut optimizer) = (Normed::new(), adam());
    for batch in &batches {
        let leaves = plain.loss(&batch.rows).backward();
        let gradients = GradientsParams::from_grads(leaves, &plain);
        plain = optimizer.step(0.05, plain, gradients);
    }
    let running = ranks(1, |communicator| {
        let mut optimizer = adam();
        let mut model = DdpConfig::new().init(Normed::new(), communicator)?;
        for batch in &batches {
            let gradients = model.backward(model.loss(&batch.rows), batch.samples)?;
            model.step(0.05, &mut optimizer, gradients)?;
        }
        let running = model.running();
        Ok((running, weights(&model.into_module().first)))
    });
    assert_eq!(running, [(plain.running(), weights(&plain.first))]);
}
/// Training does not look at the running state, so the weights are those of the parts, and the
/// state is that of the first.
#[test]
fn with_broadcast_buffers_every_rank_has_rank_0s_running_state() {
    for world in 1..=4 {
        let parts = parts_in_one_process(world, adam);
        let trained = ranks(world, |communicator| {
            let mut optimizer = adam();
            let config = caps(100, 200).with_broadcast_buffers(true);
            let mut model = config.init(Normed::new(), communicator)?;
            for batch in normed_batches(model.place()) {
                let loss = model.loss(&batch.rows);
                let gradients = model.backward(loss, batch.samples)?;
                model.step(0.05, &mut optimizer, gradients)?;
            }
            Ok((model.running(), weights(&model.first)))
        });
        for (running, first) in trained {
            assert_eq!(running, parts[0].running(), "{world} ranks");
            assert_eq!(first, weights(&parts[0].first), "{world} ranks");
        }
    }
}
