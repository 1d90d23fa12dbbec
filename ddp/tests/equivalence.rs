//! Training on N ranks is training on one.
use burn::optim::{AdamConfig, ModuleOptimizer, SgdConfig, momentum::MomentumConfig};
use burn::tensor::DType;
use ddp::DdpConfig;

use crate::support::{Job, Run, caps, distance};

fn sgd() -> ModuleOptimizer {
    SgdConfig::new().init()
}

fn momentum() -> ModuleOptimizer {
    SgdConfig::new()
        .with_momentum(Some(MomentumConfig::new().with_dampening(0.0)))
        .init()
}

/// Its epsilon bounds how much a rounding error in a gradient can grow: by 1 / epsilon.
fn adam() -> ModuleOptimizer {
    AdamConfig::new().with_epsilon(1e-3).init()
}

/// 22 rows in global batches of 8: the ranks' shares are uneven, and the last batch is short.
fn job(dtype: DType, optimizer: fn() -> ModuleOptimizer) -> Job<'static> {
    Job {
        sizes: &[6, 16, 8, 3],
        dtype,
        rows: 22,
        global_batch: 8,
        epochs: 2,
        learning_rate: 0.02,
        optimizer,
    }
}

/// How far N ranks may drift from one process.
///
/// Both take the same per-sample gradients and sum them in another order: at most 8 samples, 4
/// ranks, and 3 roundings for weight, mean and loss, so 15 roundings of terms that together are
/// below G = 8 for this data. A step of SGD turns that into `rate` x 15 G u per weight, Adam at
/// worst into 1 / epsilon times that. 6 steps, errors doubling in each at worst: 2^6.
fn bound(dtype: DType, amplification: f64) -> f64 {
    let unit = if dtype == DType::F32 {
        f64::from(f32::EPSILON)
    } else {
        f64::EPSILON
    } / 2.0;
    0.02 * 15.0 * 8.0 * unit * 64.0 * amplification
}

fn all_equal(runs: &[Run]) -> bool {
    runs.iter()
        .all(|run| run.weights == runs[0].weights && run.losses == runs[0].losses)
}

#[test]
fn replicas_are_bit_equal_and_equal_the_oracle_bit_for_bit() {
    for optimizer in [sgd, momentum, adam] {
        for world in 1..=4 {
            let job = job(DType::F32, optimizer);
            let naive = job.naive(world);
            assert!(all_equal(&naive));
            for config in [
                DdpConfig::new(),
                caps(100, 300),
                caps(0, 0),
                caps(100, 300).with_overlap(false),
            ] {
                let runs = job.ddp(world, config);
                assert!(all_equal(&runs), "{world} ranks, {config:?}");
                assert_eq!(
                    runs[0].weights, naive[0].weights,
                    "{world} ranks, {config:?}"
                );
            }
        }
    }
}

#[test]
fn sgd_on_n_ranks_equals_one_process() {
    for dtype in [DType::F32, DType::F64] {
        let single = job(dtype, sgd).single();
        for world in 1..=4 {
            let run = &job(dtype, sgd).ddp(world, caps(200, 400))[0];
            let far = distance(&run.weights, &single.weights);
            assert!(
                far <= bound(dtype, 1.0),
                "{world} ranks, {dtype:?}: {far:e}"
            );
            assert_eq!(run.losses.len(), single.losses.len());
            for (a, b) in run.losses.iter().zip(&single.losses) {
                // The loss moves by at most the gradient, below 8, per unit of weight change,
                // in each of 259 weights.
                let bound = 259.0 * 8.0 * bound(dtype, 1.0);
                assert!((a - b).abs() <= bound, "{world} ranks, {dtype:?}: {a} {b}");
            }
        }
    }
}

#[test]
fn adam_on_n_ranks_equals_one_process() {
    let single = job(DType::F64, adam).single();
    for world in 1..=4 {
        let run = &job(DType::F64, adam).ddp(world, caps(200, 400))[0];
        let far = distance(&run.weights, &single.weights);
        assert!(far <= bound(DType::F64, 1e3), "{world} ranks: {far:e}");
    }
}

#[test]
fn a_last_batch_smaller_than_the_world_equals_one_process() {
    // 10 rows in batches of 4 over 4 ranks: in the third step two ranks have no row.
    for dtype in [DType::F32, DType::F64] {
        let job = Job {
            rows: 10,
            global_batch: 4,
            ..job(dtype, sgd)
        };
        let (single, runs) = (job.single(), job.ddp(4, caps(200, 400)));
        assert!(all_equal(&runs));
        assert!(distance(&runs[0].weights, &single.weights) <= bound(dtype, 1.0));
        assert!((runs[0].losses[2] - single.losses[2]).abs() <= 259.0 * 8.0 * bound(dtype, 1.0));
    }
}
