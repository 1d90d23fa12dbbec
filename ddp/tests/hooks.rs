//! Communication hooks: what they save, and what they cost.
use std::sync::{Arc, Mutex};

use burn::module::Param;
use burn::optim::SgdConfig;
use burn::tensor::{DType, Tensor};
use collectives::{Algorithm, Collective, Communicator, CommunicatorConfig, launch};
use ddp::{AllReduce, BucketSums, CommHook, DdpConfig, Error, Hook, Result, Values};

use crate::support::{Job, Mlp, ranks, values, vector};

/// The mean of each rank's gradient, over `samples`, by that hook.
fn mean_of(hook: Hook, gradients: &[&[f32]], samples: &[usize]) -> Vec<Vec<f32>> {
    ranks(gradients.len(), |communicator| {
        let rank = communicator.rank();
        let weight = Param::from_tensor(vector(&vec![0.0; gradients[rank].len()]));
        let mut weight = DdpConfig::new()
            .with_comm_hook(hook)
            .with_skip_non_finite(false)
            .init(weight, communicator)?;
        let loss = (weight.val() * vector(gradients[rank])).sum();
        let mean = weight.backward(loss, samples[rank])?;
        Ok(values(mean.get::<1>(weight.id).unwrap()))
    })
}

#[test]
fn compressed_means_are_exact_where_the_numbers_are() {
    for hook in [Hook::AllReduce, Hook::Bf16, Hook::Fp16] {
        let means = mean_of(hook, &[&[1.0, -2.0, 0.0], &[3.0, 6.0, 0.0]], &[4, 4]);
        assert_eq!(means, [[2.0, 2.0, 0.0]; 2], "{hook:?}");
        // Weights of 1 and 3 in 4: (1 + 3 x 5) / 4.
        let means = mean_of(hook, &[&[1.0], &[5.0]], &[1, 3]);
        assert_eq!(means, [[4.0]; 2], "{hook:?}");
        let means = mean_of(hook, &[&[1.0], &[f32::NAN]], &[2, 0]);
        assert_eq!(means, [[1.0]; 2], "{hook:?}");
    }
}

#[test]
fn half_precision_sums_do_not_overflow_where_the_means_do_not() {
    // Both near the largest half, 65504; over 1000 samples a rank the sums are far above it.
    let means = mean_of(
        Hook::Fp16,
        &[&[65504.0, -65504.0], &[65504.0, 1.0]],
        &[1000, 1000],
    );
    assert_eq!(means, [[65504.0, -32752.0]; 2]);
    // bfloat16 has the range of f32.
    let means = mean_of(Hook::Bf16, &[&[1e30], &[1e30]], &[1, 1]);
    assert!((means[0][0] / 1e30 - 1.0).abs() <= 1.0 / 256.0, "{means:?}");
    let overflowed = mean_of(Hook::Fp16, &[&[70000.0], &[1.0]], &[1, 1]);
    assert_eq!(overflowed, [[f32::INFINITY]; 2]);
}

#[test]
fn rounding_is_within_what_a_hook_says() {
    let gradient = |rank: usize| -> Vec<f32> {
        let value = |at: usize| (1.0 + (at * 7 + rank * 3) as f32 / 1000.0) * 0.37;
        (0..500).map(value).collect()
    };
    let gradients: Vec<Vec<f32>> = (0..3).map(gradient).collect();
    let slices: Vec<&[f32]> = gradients.iter().map(Vec::as_slice).collect();
    let exact = |at: usize| gradients.iter().map(|g| f64::from(g[at])).sum::<f64>() / 3.0;
    for (hook, unit) in [(Hook::Bf16, 2f64.powi(-9)), (Hook::Fp16, 2f64.powi(-12))] {
        let means = mean_of(hook, &slices, &[2, 2, 2]);
        assert!(means.iter().all(|mean| *mean == means[0]));
        let worst = (0..500).map(|at| (f64::from(means[0][at]) / exact(at) - 1.0).abs());
        let worst = worst.fold(0.0, f64::max);
        // One rounding of what is sent, one of the mean; f32 around them is 2^-22 at most.
        assert!(worst <= 2.0 * unit + 2f64.powi(-21), "{hook:?}: {worst:e}");
        assert!(worst > 0.0, "{hook:?} did not round");
    }
}

#[test]
fn compression_halves_the_bytes_of_gradients_and_noop_sends_none() {
    let sent = |hook: Hook| {
        let settings = CommunicatorConfig::new().with_algorithm(Algorithm::Direct);
        let rows = launch::spawn(2, &settings, |communicator| {
            let model = Mlp::new(&[64, 64], DType::F32);
            let mut model = DdpConfig::new()
                .with_comm_hook(hook)
                .init(model, communicator)?;
            let before = model.stats()?.of(Collective::AllReduce).bytes_sent;
            model.backward(model.loss(&[0]), 1)?;
            let sent = model.stats()?.of(Collective::AllReduce).bytes_sent - before;
            Ok::<_, Error>((sent, model.last_step().buckets[0].algorithm.clone()))
        });
        rows.unwrap()
    };
    let elements = 64 * 64 + 64;
    // All in one bucket, which two ranks exchange by halves; its tail has 5 totals, 2 use counts,
    // and one flag.
    assert_eq!(
        sent(Hook::AllReduce)[0],
        (4 * (elements + 8), "direct".into())
    );
    for hook in [Hook::Bf16, Hook::Fp16] {
        assert_eq!(sent(hook)[0], (2 * elements + 4 * 8, "direct".into()));
    }
    assert_eq!(sent(Hook::Noop)[0], (0, "none".into()));
}

#[test]
fn noop_leaves_each_rank_its_own_mean() {
    let means = mean_of(Hook::Noop, &[&[1.0], &[3.0]], &[2, 4]);
    assert_eq!(means, [[1.0], [3.0]]);
}

#[test]
fn compressed_training_keeps_replicas_equal() {
    for hook in [Hook::Bf16, Hook::Fp16] {
        let job = Job {
            sizes: &[6, 16, 3],
            dtype: DType::F64,
            rows: 22,
            global_batch: 8,
            epochs: 2,
            learning_rate: 0.02,
            optimizer: || SgdConfig::new().init(),
        };
        let runs = job.ddp(
            3,
            DdpConfig::new()
                .with_comm_hook(hook)
                .with_bucket_cap_mb(0.0),
        );
        assert!(runs.iter().all(|run| *run == runs[0]));
        assert_ne!(
            runs[0],
            job.ddp(3, DdpConfig::new())[0],
            "{hook:?} did nothing"
        );
    }
}

/// Counts buckets, and scales their gradients.
#[derive(Debug, Default)]
struct Doubling(Mutex<Vec<u64>>);

impl CommHook for Doubling {
    fn name(&self) -> &'static str {
        "doubling"
    }

    fn reduce(
        &self,
        bucket: &mut BucketSums<'_>,
        communicator: &mut Communicator,
    ) -> collectives::Result<()> {
        bucket.all_reduce(communicator)?;
        if let Values::F32(gradients) = bucket.gradients() {
            gradients.iter_mut().for_each(|x| *x *= 2.0);
        }
        self.0.lock().unwrap().push(bucket.samples());
        Ok(())
    }
}

#[test]
fn a_hook_of_ones_own_sees_every_bucket_with_the_sample_total() {
    let seen = ranks(2, |communicator| {
        let rank = communicator.rank();
        let pair: Vec<_> = (0..2).map(|_| Param::from_tensor(vector(&[0.0]))).collect();
        let mut pair = DdpConfig::new()
            .with_bucket_cap_mb(0.0)
            .init(pair, communicator)?;
        let hook = Arc::new(Doubling::default());
        pair.register_comm_hook(hook.clone())?;
        let loss = pair[0].val() * (rank + 1) as f32 + pair[1].val();
        let means = pair.backward(loss, 1 + rank)?;
        assert_eq!(pair.last_step().samples, 3);
        let mean = |at: usize| values(means.get::<1>(pair[at].id).unwrap())[0];
        // (1 + 2 x 2) / 3, and 1, doubled.
        assert_eq!((mean(0), mean(1)), (5.0 / 3.0 * 2.0, 2.0));
        pair.register_comm_hook(Arc::new(AllReduce))?;
        pair.backward(pair[0].val() + pair[1].val(), 1)?;
        let seen = hook.0.lock().unwrap().clone();
        Ok(seen)
    });
    assert_eq!(seen, [[3, 3], [3, 3]]);
}

#[test]
fn ranks_with_other_hooks_are_told_before_they_start() {
    let errors = launch::spawn(
        2,
        &CommunicatorConfig::new(),
        |communicator| -> Result<Error> {
            let hook = [Hook::AllReduce, Hook::Bf16][communicator.rank()];
            let weight: Param<Tensor<1>> = Param::from_tensor(vector(&[0.0]));
            let config = DdpConfig::new().with_comm_hook(hook);
            Ok(config.init(weight, communicator).unwrap_err())
        },
    );
    let errors = errors.unwrap();
    assert_eq!(errors[0], errors[1]);
    assert!(
        errors[0].to_string().contains("comm_hook: bf16"),
        "{}",
        errors[0]
    );
}
