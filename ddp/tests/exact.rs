//! The same bits at every world size.
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, GaussianNoise};
use burn::nn::{GaussianNoiseConfig, Linear};
use burn::optim::{AdaGradConfig, RmsPropConfig, momentum::MomentumConfig};
use burn::optim::{AdamConfig, AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{DType, Tensor};
use collectives::{Algorithm, Choice, CommunicatorConfig, Place, launch};
use ddp::{DdpConfig, DistributedSampler, Error, Hook, Result, Shards};

use crate::support::{Job, Mlp, Run, caps, device, vector, weights};

/// V, which 1, 2, 4 and 8 ranks share by powers of two and 3, 5, 6 and 7 do not.
const SHARDS: usize = 8;

/// 23 rows in global batches of 16 cut into 8 shards: the last batch of 7 leaves a shard empty.
fn job(optimizer: fn() -> ModuleOptimizer) -> Job<'static> {
    Job {
        sizes: &[6, 16, 8, 3],
        dtype: DType::F32,
        rows: 23,
        global_batch: 16,
        epochs: 3,
        learning_rate: 0.05,
        optimizer,
    }
}

fn sgd() -> ModuleOptimizer {
    SgdConfig::new().init()
}

fn momentum() -> ModuleOptimizer {
    SgdConfig::new()
        .with_momentum(Some(MomentumConfig::new()))
        .init()
}

/// Every step's loss and the final weights of rank 0; all ranks must agree.
fn train(job: &Job<'_>, world: usize, choice: impl Into<Choice>, config: DdpConfig) -> Run {
    let settings = CommunicatorConfig::new()
        .with_algorithm(choice)
        .with_deterministic(true);
    let mut runs = launch::spawn(world, &settings, |communicator| {
        let mut optimizer = (job.optimizer)();
        let mut sampler =
            DistributedSampler::new(job.rows, job.global_batch, communicator.place())?
                .with_shuffle(3)
                .with_micro_shards(config.micro_shards)?;
        let mut model = config.init(job.model(), communicator)?;
        let mut losses = Vec::new();
        for _ in 0..job.epochs {
            for batch in sampler.epoch() {
                let gradients = model.accumulate(batch.micro_shards(), |model, shard| {
                    (model.loss(&shard.rows), shard.samples)
                })?;
                losses.push(model.last_step().loss);
                model.step(job.learning_rate, &mut optimizer, gradients)?;
            }
        }
        Ok::<_, Error>(Run {
            losses,
            weights: weights(&model.into_module()),
        })
    })
    .unwrap();
    let run = runs.swap_remove(0);
    assert!(runs.iter().all(|other| *other == run), "ranks differ");
    run
}

fn config() -> DdpConfig {
    caps(100, 300).with_micro_shards(SHARDS)
}

/// T(n) by its definition, over whole leaves.
fn tree(leaves: &[Vec<f32>]) -> Vec<f32> {
    let [leaf] = leaves else {
        let middle = leaves.len().next_power_of_two() / 2;
        let (left, right) = (tree(&leaves[..middle]), tree(&leaves[middle..]));
        return left.iter().zip(right).map(|(a, b)| a + b).collect();
    };
    leaf.clone()
}

/// A plain Burn loop in one process, without our wrapper: gradients of each shard by
/// `loss.backward()`, weighted, summed by [`tree`], divided.
fn plain(job: &Job<'_>) -> Run {
    struct Leaf<'a>(&'a GradientsParams, f32, Vec<f32>);
    impl ModuleVisitor for Leaf<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let gradient = self.0.get::<D>(param.id).unwrap().into_data();
            self.2.extend(gradient.iter::<f32>().map(|x| x * self.1));
        }
    }
    struct Means<'a>(&'a [f32], GradientsParams);
    impl ModuleVisitor for Means<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let (own, rest) = self.0.split_at(param.dims().iter().product());
            self.0 = rest;
            self.1
                .register::<D>(param.id, vector(own).inner().reshape(param.dims()));
        }
    }
    let alone = Place { rank: 0, world: 1 };
    let mut sampler = DistributedSampler::new(job.rows, job.global_batch, alone)
        .and_then(|sampler| sampler.with_shuffle(3).with_micro_shards(SHARDS))
        .unwrap();
    let (mut model, mut optimizer) = (job.model(), (job.optimizer)());
    let mut losses = Vec::new();
    for batch in (0..job.epochs).flat_map(|_| sampler.epoch().collect::<Vec<_>>()) {
        let leaves: Vec<Vec<f32>> = batch
            .micro_shards()
            .iter()
            .map(|shard| {
                let loss = model.loss(&shard.rows);
                let weighted = loss.clone().into_scalar::<f32>() * shard.samples as f32;
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                let mut leaf = Leaf(&gradients, shard.samples as f32, Vec::new());
                model.visit(&mut leaf);
                leaf.2.push(weighted);
                leaf.2
            })
            .collect();
        let mut sum = tree(&leaves);
        let loss = sum.pop().unwrap();
        losses.push(f64::from(loss) / batch.samples as f64);
        sum.iter_mut().for_each(|x| *x /= batch.samples as f32);
        let mut means = Means(&sum, GradientsParams::new());
        model.visit(&mut means);
        model = optimizer.step(job.learning_rate, model, means.1);
    }
    Run {
        losses,
        weights: weights(&model),
    }
}

#[test]
fn losses_and_weights_are_those_of_a_plain_loop_over_the_shards() {
    for optimizer in [sgd, momentum] {
        let job = job(optimizer);
        assert_eq!(train(&job, 1, Algorithm::Ring, config()), plain(&job));
        assert_eq!(train(&job, 4, Algorithm::Tree, config()), plain(&job));
    }
}

#[test]
fn every_world_size_and_algorithm_gives_the_same_bits() {
    let job = job(sgd);
    let one = train(&job, 1, Algorithm::Ring, config());
    for world in 2..=SHARDS {
        for &algorithm in Algorithm::ALL {
            let run = train(&job, world, algorithm, config());
            assert_eq!(run, one, "{algorithm}, {world} ranks");
        }
    }
}

#[test]
fn every_bucket_size_gives_the_same_bits() {
    let job = job(momentum);
    let one = train(&job, 1, Algorithm::Ring, config());
    for sizes in [
        caps(0, 0),
        caps(1 << 20, 1 << 20),
        caps(64, 600).with_overlap(false),
    ] {
        for world in [1, 3, 4] {
            let run = train(
                &job,
                world,
                Algorithm::Ring,
                sizes.with_micro_shards(SHARDS),
            );
            assert_eq!(run, one, "{world} ranks, {sizes:?}");
        }
    }
}

#[test]
fn every_optimizer_and_a_clipped_norm_keep_the_bits() {
    let optimizers: [fn() -> ModuleOptimizer; 5] = [
        momentum,
        || AdamConfig::new().init(),
        || AdamWConfig::new().init(),
        || RmsPropConfig::new().init(),
        || AdaGradConfig::new().init(),
    ];
    for optimizer in optimizers {
        let job = job(optimizer);
        for config in [config(), config().with_max_grad_norm(0.25)] {
            let one = train(&job, 1, Algorithm::Ring, config);
            for (world, algorithm) in [
                (2, Algorithm::Ring),
                (4, Algorithm::Halving),
                (5, Algorithm::Direct),
                (8, Algorithm::Tree),
            ] {
                assert_eq!(train(&job, world, algorithm, config), one, "{world} ranks");
            }
        }
    }
}

#[test]
fn without_micro_shards_the_bits_depend_on_the_world_size() {
    // The control: were they equal anyway, the tests above would prove nothing.
    let job = job(sgd);
    let runs = job.ddp(2, DdpConfig::new());
    assert_ne!(runs[0], job.ddp(4, DdpConfig::new())[0]);
    // Other shards are other sums.
    let run = |shards| {
        let config = caps(100, 300).with_micro_shards(shards);
        train(&job, 2, Algorithm::Tree, config)
    };
    assert_ne!(run(8), run(6));
}

#[test]
fn twelve_shards_agree_where_a_rank_has_six() {
    let job = job(sgd);
    let config = caps(100, 300).with_micro_shards(12);
    let one = train(&job, 1, Algorithm::Ring, config);
    for world in [2, 3, 4, 5, 6, 12] {
        assert_eq!(train(&job, world, Algorithm::Ring, config), one);
    }
}

#[test]
fn blocks_are_used_where_shards_do_not_close_and_cost_what_is_said() {
    let lens = |world| {
        let runs = launch::spawn(
            world,
            &CommunicatorConfig::new().with_deterministic(true),
            |communicator| {
                let mut model = config().init(Mlp::new(&[4, 2], DType::F32), communicator)?;
                let own = model.shards().unwrap().own();
                let before = model.stats()?;
                model.accumulate(own, |model, shard| (model.loss(&[shard]), 1))?;
                let after = model.stats()?;
                let total = after.total().bytes_sent - before.total().bytes_sent;
                let ran = model.last_step().buckets[0].algorithm.clone();
                let elements = model.plan().buckets().iter().sum::<usize>();
                Ok::<_, Error>((ran, total, elements))
            },
        );
        runs.unwrap()
    };
    assert!(lens(4).iter().all(|(ran, ..)| ran != "blocks"));
    // 3, 3 and 2 shards: 2, 2 and 1 blocks. Each rank sends two thirds of each of its blocks, and
    // its third of the sum twice; the first step's broadcast of the order comes on top.
    let runs = lens(3);
    assert!(runs.iter().all(|(ran, ..)| ran == "blocks"));
    for (rank, (_, total, elements)) in runs.into_iter().enumerate() {
        let blocks = [2, 2, 1][rank];
        let own = collectives::Partition::new(elements, 3).range(rank).len();
        let exchanged = 4 * blocks * (elements - own);
        let order = 2 * 8 * 2;
        let least = (exchanged + 4 * own) as u64;
        let most = (exchanged + 4 * elements + order) as u64;
        assert!((least..=most).contains(&total), "rank {rank}: {total}");
    }
}

#[test]
fn weighted_means_over_shards_keep_the_bits() {
    let mean = |world| {
        let settings = CommunicatorConfig::new().with_deterministic(true);
        let means = launch::spawn(world, &settings, |communicator| {
            let mut model = config().init(Mlp::new(&[2, 2], DType::F32), communicator)?;
            let shards = model.shards().unwrap().own();
            model.weighted_mean(shards.map(|shard| ([0.1 * shard as f64, 1.0], shard)))
        });
        let means = means.unwrap();
        assert!(means.iter().all(|mean| *mean == means[0]));
        means[0].map(f64::to_bits)
    };
    let one = mean(1);
    assert_eq!(f64::from_bits(one[1]), 1.0);
    (2..=SHARDS).for_each(|world| assert_eq!(mean(world), one, "{world} ranks"));
}

#[test]
fn the_shards_of_a_batch_do_not_depend_on_the_world_size() {
    let shards = |world| {
        let all = (0..world).flat_map(|rank| {
            let sampler = DistributedSampler::new(23, 16, Place { rank, world }).unwrap();
            let mut sampler = sampler.with_shuffle(1).with_micro_shards(SHARDS).unwrap();
            let batch = sampler.epoch().nth(1).unwrap();
            let shards = batch.micro_shards();
            let own = Shards::new(SHARDS, Place { rank, world }).unwrap().own();
            assert_eq!(shards.len(), own.len());
            assert!(shards.iter().all(|shard| !shard.rows.is_empty()));
            shards
        });
        all.map(|shard| shard.rows[..shard.samples].to_vec())
            .collect::<Vec<_>>()
    };
    let one = shards(1);
    assert_eq!(
        one.iter().map(Vec::len).collect::<Vec<_>>(),
        [1, 1, 1, 1, 1, 1, 1, 0]
    );
    (2..=SHARDS).for_each(|world| assert_eq!(shards(world), one));
}

/// The error of every rank.
fn refused(world: usize, config: DdpConfig, deterministic: bool) -> Vec<Error> {
    let settings = CommunicatorConfig::new().with_deterministic(deterministic);
    launch::spawn(world, &settings, |communicator| {
        let model = Mlp::new(&[2, 2], DType::F32);
        Ok::<_, Error>(config.init(model, communicator).unwrap_err())
    })
    .unwrap()
}

#[test]
fn what_cannot_keep_the_promise_is_refused() {
    let errors = refused(2, config(), false);
    assert!(
        errors
            .iter()
            .any(|e| e.to_string().contains("deterministic")),
        "{errors:?}"
    );
    let errors = refused(2, DdpConfig::new().with_micro_shards(1), true);
    assert!(
        errors
            .iter()
            .any(|e| e.to_string().contains("micro_shards = 1")),
        "{errors:?}"
    );
    let errors = refused(1, config().with_comm_hook(Hook::Bf16), true);
    assert!(errors[0].to_string().contains("comm_hook"), "{errors:?}");
    assert!(DdpConfig::new().with_micro_shards(4097).validate().is_err());
}

#[derive(Module, Debug)]
struct Block {
    linear: Linear,
    dropout: Option<Dropout>,
    noise: Option<GaussianNoise>,
    norm: Vec<BatchNorm>,
}

#[derive(Module, Debug)]
struct Nested {
    blocks: Vec<Block>,
}

fn nested(dropout: bool, noise: bool, norm: bool) -> Nested {
    let linear = Mlp::new(&[2, 2], DType::F32).layers.remove(0);
    let block = |dropout: bool, noise: bool, norm: bool| Block {
        linear: linear.clone(),
        dropout: dropout.then(|| DropoutConfig::new(0.5).init()),
        noise: noise.then(|| GaussianNoiseConfig::new(0.5).init()),
        norm: Vec::from_iter(norm.then(|| BatchNormConfig::new(2).init(&device()))),
    };
    Nested {
        blocks: vec![block(false, false, false), block(dropout, noise, norm)],
    }
}

#[test]
fn layers_that_cannot_keep_the_promise_are_refused_by_name() {
    let init = |module: Nested, config: DdpConfig| {
        let settings = CommunicatorConfig::new().with_deterministic(true);
        let outcome = launch::spawn(1, &settings, |communicator| {
            Ok::<_, Error>(config.init(module.clone(), communicator).map(drop))
        });
        outcome.unwrap().remove(0)
    };
    for (module, layer, path) in [
        (nested(true, false, false), "Dropout", "blocks.1.dropout"),
        (
            nested(false, true, false),
            "GaussianNoise",
            "blocks.1.noise",
        ),
        (nested(false, false, true), "BatchNorm", "blocks.1.norm.0"),
    ] {
        let error = init(module.clone(), config()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(layer) && text.contains(path), "{text}");
        // Without the promise nothing is refused, and frozen layers are harmless.
        init(module.clone(), DdpConfig::new()).unwrap();
        let mut frozen = module;
        frozen.blocks[1].dropout = frozen.blocks[1].dropout.take().map(Module::freeze);
        frozen.blocks[1].noise = frozen.blocks[1].noise.take().map(Module::freeze);
        frozen.blocks[1].norm = frozen.blocks[1]
            .norm
            .drain(..)
            .map(Module::freeze)
            .collect();
        init(frozen, config()).unwrap();
    }
}

#[test]
fn a_rank_that_leaves_out_a_shard_is_named_on_every_rank() {
    let settings = CommunicatorConfig::new().with_deterministic(true);
    let errors = launch::spawn(2, &settings, |communicator| -> Result<Error> {
        let rank = communicator.rank();
        let mut model = config().init(Mlp::new(&[2, 2], DType::F32), communicator)?;
        let micro_batches = 0..4 - rank;
        let outcome = model.accumulate(micro_batches, |model, row| (model.loss(&[row]), 1));
        Ok(outcome.unwrap_err())
    });
    let errors = errors.unwrap();
    assert_eq!(
        errors[1],
        Error::MicroShards {
            call: "accumulate",
            rank: 1,
            due: 4,
            got: 3,
            shards: 8
        }
    );
    assert_eq!(errors[0].ranks(), [1], "{}", errors[0]);
}
