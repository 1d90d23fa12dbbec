//! A checkpoint goes on at another world size and stage, by every optimizer, and in plain Burn.
use std::collections::HashMap;
use std::fs;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Bytes, DType, Tensor, TensorData};
use burn_pack::{Reader, Scalar, Writer};
use collectives::Communicator;
use ddp::{Batch, DistributedSampler};
use safetensors::SafeTensors;
use zero::{Result, ShardedDataParallel, Stage, ZeroConfig};

use crate::checkpoint::Place;
use crate::matrix::{OPTIMIZERS, mlp};
use crate::run::agree;
use crate::support::{Mlp, caps, weights};

/// One, two, three and four ranks have as many each.
const SHARDS: usize = 12;

fn init(
    stage: Stage,
    optimizer: ModuleOptimizer,
    communicator: Communicator,
) -> Result<ShardedDataParallel<Mlp>> {
    let ddp = caps(40, 120).with_micro_shards(SHARDS);
    ZeroConfig::new(stage)
        .with_ddp(ddp)
        .init(mlp(), optimizer, communicator)
}

/// Steps `from` to `to`, three an epoch.
fn train(model: &mut ShardedDataParallel<Mlp>, from: usize, to: usize) -> Result<()> {
    let sampler = DistributedSampler::new(30, 12, model.place())?;
    let mut sampler = sampler.with_shuffle(3).with_micro_shards(SHARDS)?;
    let mut batches: Vec<Batch> = Vec::new();
    while batches.len() < to {
        batches.extend(sampler.epoch());
    }
    for batch in &batches[from..to] {
        model.accumulate(batch.micro_shards(), |model, shard| {
            (model.loss(&shard.rows), shard.samples)
        })?;
        model.step(0.02)?;
    }
    Ok(())
}

#[test]
fn saved_by_four_ranks_at_stage_3_training_goes_on_anywhere_to_the_bit_by_every_optimizer() {
    for (name, optimizer) in OPTIMIZERS {
        let place = Place::new(&format!("resumed-{name}"));
        let straight = agree(4, |communicator| {
            let mut model = init(Stage::Three, optimizer(), communicator)?;
            train(&mut model, 0, 4)?;
            model.save(&place.0)?;
            train(&mut model, 4, 8)?;
            Ok(weights(&model.into_module()?))
        });
        for (world, stage) in [(3, Stage::One), (2, Stage::Three), (1, Stage::Two)] {
            let resumed = agree(world, |communicator| {
                let mut model = init(stage, optimizer(), communicator)?;
                model.load(&place.0)?;
                train(&mut model, 4, 8)?;
                Ok(weights(&model.into_module()?))
            });
            assert_eq!(resumed, straight, "{name}, {stage:?}, {world} ranks");
        }
    }
}

/// The path of every parameter, by its id.
struct Paths {
    path: Vec<String>,
    found: Vec<(u64, String)>,
}

impl ModuleVisitor for Paths {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.found.push((param.id.val(), self.path.join(".")));
    }
}

fn paths(module: &Mlp) -> HashMap<u64, String> {
    let mut paths = Paths {
        path: Vec::new(),
        found: Vec::new(),
    };
    module.visit(&mut paths);
    paths.found.into_iter().collect()
}

/// A loop of Burn's alone.
fn plain(mut model: Mlp, optimizer: &mut ModuleOptimizer, steps: std::ops::Range<usize>) -> Mlp {
    for step in steps {
        let leaves = model.loss(&[step, step + 1]).backward();
        let gradients = GradientsParams::from_grads(leaves, &model);
        model = optimizer.step(0.05, model, gradients);
    }
    model
}

/// Saves after three steps on two ranks, both on the rows of the plain loop: the sum of two equal
/// numbers and its half are exact.
fn saved(place: &Place, stage: Stage, optimizer: fn() -> ModuleOptimizer) {
    agree(2, |communicator| {
        let zero = ZeroConfig::new(stage).with_ddp(caps(40, 120));
        let mut model = zero.init(mlp(), optimizer(), communicator)?;
        for step in 0..3 {
            model.backward(model.loss(&[step, step + 1]), 2)?;
            model.step(0.05)?;
        }
        model.save(&place.0)
    });
}

#[test]
fn the_state_in_the_file_is_what_a_plain_loop_keeps_in_its_record() {
    for (name, optimizer) in OPTIMIZERS {
        let mut own = optimizer();
        let end = plain(mlp(), &mut own, 0..3);
        let paths = paths(&end);
        let record = Reader::from_bytes(own.into_bytes().unwrap()).unwrap();
        let named = |key: &str| {
            let (id, field) = key.split_once('.').unwrap();
            format!("optimizer.{}.{field}", paths[&id.parse().unwrap()])
        };
        let numbers: HashMap<String, Scalar> = record
            .scalars()
            .iter()
            .map(|(key, &number)| (named(key), number))
            .collect();
        let tensors: HashMap<String, (Vec<usize>, Vec<u8>)> = record
            .into_tensors()
            .unwrap()
            .into_iter()
            .map(|tensor| {
                let name = named(&tensor.name);
                let (_, _, shape, _, bytes) = tensor.into_parts().unwrap();
                (name, (shape.to_vec(), bytes.to_vec()))
            })
            .collect();
        for stage in Stage::ALL {
            let place = Place::new(&format!("state-{name}-{}", u8::from(stage)));
            saved(&place, stage, optimizer);
            let bytes = fs::read(&place.0).unwrap();
            let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
            let metadata = metadata.metadata().clone().unwrap_or_default();
            let found: HashMap<String, Scalar> = metadata
                .into_iter()
                .map(|(name, json)| (name, serde_json::from_str(&json).unwrap()))
                .collect();
            assert_eq!(found, numbers, "{name}, {stage:?}");
            let file = SafeTensors::deserialize(&bytes).unwrap();
            let state = file
                .iter()
                .filter(|(name, _)| name.starts_with("optimizer."));
            let state: HashMap<_, _> = state
                .map(|(name, tensor)| {
                    let (shape, data) = (tensor.shape().to_vec(), tensor.data().to_vec());
                    (name.to_owned(), (shape, data))
                })
                .collect();
            assert!(state == tensors, "{name}, {stage:?}");
        }
    }
}

/// Takes a module's values from the file, as a program would that knows nothing of ours.
struct Fill<'a> {
    file: &'a SafeTensors<'a>,
    path: Vec<String>,
}

impl ModuleMapper for Fill<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let name = format!("model.{}", self.path.join("."));
        let saved = self.file.tensor(&name).unwrap();
        let (bytes, shape) = (saved.data().to_vec(), saved.shape().to_vec());
        param.map(|old| {
            let data = TensorData::from_bytes_vec(bytes, shape, DType::F32);
            Tensor::from_data(data, &old.device()).set_require_grad(old.is_require_grad())
        })
    }
}

#[test]
fn plain_burn_goes_on_from_the_file_to_the_bit() {
    let optimizer = || AdamConfig::new().init();
    let straight = weights(&plain(mlp(), &mut optimizer(), 0..6));
    for stage in Stage::ALL {
        let place = Place::new(&format!("plain-{}", u8::from(stage)));
        saved(&place, stage, optimizer);
        let bytes = fs::read(&place.0).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut fill = Fill {
            file: &file,
            path: Vec::new(),
        };
        let model = mlp().map(&mut fill);
        // Burn's record of an optimizer names parameters by ids, which are those of a process.
        let ids: HashMap<String, u64> = paths(&model)
            .into_iter()
            .map(|(id, path)| (path, id))
            .collect();
        let of = |name: &str| {
            let rest = name.strip_prefix("optimizer.")?;
            let owner = ids
                .iter()
                .find(|(path, _)| rest.starts_with(&format!("{path}.")));
            let (path, id) = owner?;
            Some((*id, format!("{id}{}", &rest[path.len()..])))
        };
        let tensors = file.iter().filter_map(|(name, tensor)| {
            let (id, name) = of(name)?;
            let bytes = Bytes::from_bytes_vec(tensor.data().to_vec());
            let shape = tensor.shape().to_vec();
            Some(burn_pack::Tensor::new(
                name,
                DType::F32,
                shape,
                Some(id),
                bytes,
            ))
        });
        let mut record = Writer::new(tensors.collect());
        let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        for (name, json) in metadata.metadata().clone().unwrap() {
            let number: Scalar = serde_json::from_str(&json).unwrap();
            record = record.with_scalar(&of(&name).unwrap().1, number);
        }
        let mut own = optimizer()
            .from_bytes(record.into_bytes().unwrap())
            .unwrap();
        let end = plain(model, &mut own, 3..6);
        assert_eq!(weights(&end), straight, "{stage:?}");
    }
}
