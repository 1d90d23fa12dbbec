//! Sharded training gives ddp's bits, and with micro-shards those of one process.
use burn::module::{Module, Param, ParamGroup};
use burn::optim::{AdamConfig, LionConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::{DType, Tensor};
use ddp::DdpConfig;
use zero::Stage;

use crate::run::Task;
use crate::support::{Mlp, caps, from_vec, vector};

/// 23 rows in global batches of 8: the last has 7, and no batch cuts evenly over three ranks.
fn task(optimizer: fn() -> ModuleOptimizer) -> Task<Mlp> {
    Task {
        model: || Mlp::new(&[6, 16, 8, 3], DType::F32),
        loss: Mlp::loss,
        optimizer,
        rate: 0.02,
        rows: 23,
        global_batch: 8,
        epochs: 2,
    }
}

fn adam() -> ModuleOptimizer {
    AdamConfig::new().init()
}

#[test]
fn buckets_of_every_size_have_the_bits_of_ddp() {
    // Each parameter by itself, all in one, and as by default; 10 ranks for parts without an element.
    for config in [caps(0, 0), caps(1 << 20, 1 << 20), DdpConfig::new()] {
        task(adam).check("adam", 3..=3, config);
    }
    task(adam).check("adam", 10..=10, caps(0, 0));
}

#[test]
fn parameters_of_64_bits_have_the_bits_of_ddp() {
    let task = Task {
        model: || Mlp::new(&[6, 16, 8, 3], DType::F64),
        ..task(adam)
    };
    task.check("f64", 2..=3, caps(100, 300));
}

#[test]
fn groups_with_rates_and_optimizers_of_their_own_have_the_bits_of_ddp() {
    let groups = || {
        let layer = |layer: usize| ParamGroup::from_predicate(format!("layers.{layer}").as_str());
        adam()
            .with_group(layer(0), SgdConfig::new().build(), None)
            .with_group(layer(1), LionConfig::new().build(), None)
    };
    task(groups).check("groups", 1..=4, caps(100, 300));
}

#[test]
fn reduced_in_line_or_after_backward_the_bits_are_the_same() {
    let after = caps(100, 300).with_overlap(false);
    task(adam).check("no overlap", 3..=3, after);
    let inline = caps(100, 300).with_comm_thread(false);
    task(adam).check("no thread", 3..=3, inline);
}

#[test]
fn with_micro_shards_the_bits_are_those_of_one_process_at_every_world_size() {
    let task = task(adam);
    let config = caps(100, 300).with_micro_shards(8).with_max_grad_norm(0.5);
    let one = task.ddp(1, config);
    for stage in Stage::ALL {
        // 8 shards close over 1, 2, 4 and 8 ranks, and travel as blocks over 3.
        for world in [1, 2, 3, 4, 8] {
            if stage == Stage::Three && world == 3 {
                // Three ranks would run 3, 3 and 2 forward passes.
                continue;
            }
            assert_eq!(task.zero(stage, world, config), one, "{stage:?}, {world}");
        }
    }
}

/// A parameter of each type, of which some rows use the one and some the other.
#[derive(Module, Debug)]
struct Mixed {
    single: Param<Tensor<1>>,
    double: Param<Tensor<1>>,
}

#[test]
fn a_module_of_two_types_keeps_the_bits_of_its_loss_with_micro_shards() {
    let task = Task {
        model: || Mixed {
            single: Param::from_tensor(vector(&[0.1, 0.7, 0.3])),
            double: Param::from_tensor(from_vec::<1>(vec![0.3, 0.2], [2], DType::F64)),
        },
        loss: |model: &Mixed, rows| match rows[0] % 2 {
            0 => model.single.val().mean(),
            _ => model.double.val().mean().cast(DType::F32),
        },
        optimizer: adam,
        rate: 0.1,
        rows: 21,
        global_batch: 7,
        epochs: 2,
    };
    let config = DdpConfig::new()
        .with_micro_shards(4)
        .with_max_grad_norm(0.5);
    let one = task.ddp(1, config);
    for stage in [Stage::One, Stage::Two] {
        for world in 1..=4 {
            assert_eq!(task.zero(stage, world, config), one, "{stage:?}, {world}");
        }
    }
}
