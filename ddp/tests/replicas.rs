//! Ranks are threads of one process, and share nothing of their replicas (trial BR-08).
use burn::module::{Module, Param, RunningState};
use burn::nn::{BatchNorm, BatchNormConfig, LinearConfig};
use burn::optim::{AdamConfig, SgdConfig};
use burn::tensor::{DType, Int, Tensor, TensorData};
use ddp::{DdpConfig, DistributedSampler};

use crate::support::{Mlp, caps, device, ranks, values, weights};

/// 6 ranks, one leaf each of 256 x 256, 300 rounds; `step` makes it a fresh leaf every round.
fn rounds(step: bool) {
    let shared = Param::from_tensor(Tensor::<2>::zeros([256, 256], &device()));
    ranks(6, |communicator| {
        let rank = communicator.rank() as f32;
        // Clones of one module: the wrapper must unshare them.
        let mut model = DdpConfig::new().init(shared.clone(), communicator)?;
        let mut optimizer = SgdConfig::new().init();
        for round in 0..300 {
            let loss = model.val().mul_scalar(rank + 1.0).sum();
            let gradients = model.backward(loss, 1)?;
            let gradient = gradients
                .get::<2>(model.id)
                .expect("a used parameter has a gradient");
            assert!(
                values(gradient).iter().all(|&value| value == 3.5),
                "round {round}"
            );
            if step {
                model.step(0.0, &mut optimizer, gradients).unwrap();
            }
        }
        Ok(())
    });
}

#[test]
fn six_ranks_keep_every_gradient_of_a_reused_leaf() {
    rounds(false);
}

#[test]
fn six_ranks_keep_every_gradient_of_a_fresh_leaf() {
    rounds(true);
}

#[test]
fn four_ranks_stay_bit_equal_over_many_steps() {
    let steps = if std::env::var_os("LOCKSTEP_SOAK").is_some() {
        2000
    } else {
        300
    };
    let model = Mlp::new(&[16, 32, 32, 4], DType::F32);
    let trained = ranks(4, |communicator| {
        let mut model = caps(1024, 4096).init(model.clone(), communicator)?;
        let mut optimizer = AdamConfig::new().init();
        let mut sampler = DistributedSampler::new(101, 16, model.place())?.with_shuffle(1);
        let mut step = 0;
        while step < steps {
            for batch in sampler.epoch() {
                let gradients = model.backward(model.loss(&batch.rows), batch.samples)?;
                assert_eq!(gradients.len(), 6, "step {step}");
                model.step(1e-3, &mut optimizer, gradients).unwrap();
                step += 1;
            }
        }
        Ok(weights(model.module()))
    });
    assert!(trained.iter().all(|weights| *weights == trained[0]));
    assert_ne!(trained[0], weights(&model), "nothing was trained");
}

#[test]
fn every_parameter_starts_from_rank_0_frozen_ones_and_whole_numbers_too() {
    #[derive(Module, Debug)]
    struct Mixed {
        trained: Param<Tensor<2>>,
        frozen: Param<Tensor<1>>,
        counts: Param<Tensor<1, Int>>,
        state: RunningState<Tensor<1>>,
    }
    let seen = ranks(3, |communicator| {
        let value = communicator.rank() as f32 + 7.0;
        let float = |len: usize| Tensor::<1>::full([len], value, &device());
        let module = Mixed {
            // More than one piece of 4 MB.
            trained: Param::from_tensor(Tensor::full([1025, 1024], value, &device())),
            frozen: Param::from_tensor(float(3)).set_require_grad(false),
            counts: Param::initialized(
                burn::module::ParamId::new(),
                Tensor::from_data(TensorData::from([value as i64]), &device()),
            ),
            state: RunningState::new(float(2)),
        };
        let module = DdpConfig::new().init(module, communicator)?;
        assert!(module.trained.is_require_grad() && !module.frozen.is_require_grad());
        assert!(
            values(module.trained.val())
                .iter()
                .all(|&value| value == 7.0)
        );
        let counts = module
            .counts
            .val()
            .into_data()
            .iter::<i64>()
            .collect::<Vec<_>>();
        Ok((
            values(module.frozen.val()),
            counts,
            values(module.state.value()),
        ))
    });
    assert_eq!(seen, vec![(vec![7.0; 3], vec![7], vec![7.0; 2]); 3]);
}

#[test]
fn clones_with_batch_norm_do_not_mix_their_running_statistics() {
    #[derive(Module, Debug)]
    struct Normed {
        norm: BatchNorm,
    }
    let shared = Normed {
        norm: BatchNormConfig::new(1).init(&device()),
    };
    let original = shared.clone();
    let means = ranks(2, |communicator| {
        let rank = communicator.rank() as f32;
        let mut model = DdpConfig::new().init(shared.clone(), communicator)?;
        assert_eq!(
            model.plan().slots(),
            2,
            "gamma and beta, not the running state"
        );
        for _ in 0..2 {
            let input = Tensor::<3>::full([4, 1, 2], 10.0 * (rank + 1.0), &device());
            let loss = model.norm.forward(input).sum();
            model.backward(loss, 4)?;
        }
        Ok(values(model.norm.running_mean.value_sync()))
    });
    // Momentum 0.1 from 0, twice: 0.19 x 10 and 0.19 x 20; mixed, both would be between.
    let expected = |input: f32| {
        let once = 0.0f32 * 0.9 + input * 0.1;
        once * 0.9 + input * 0.1
    };
    for (mean, input) in means.iter().zip([10.0, 20.0]) {
        assert!(
            (mean[0] - expected(input)).abs() <= 4.0 * f32::EPSILON * input,
            "{mean:?}"
        );
    }
    assert_eq!(
        values(original.norm.running_mean.value_sync()),
        [0.0],
        "the caller's module changed"
    );
}

#[test]
fn a_module_made_without_autodiff_is_trained_all_the_same() {
    let trained = ranks(2, |communicator| {
        let plain = LinearConfig::new(2, 1).init(&device().inner());
        let mut model = DdpConfig::new().init(plain, communicator)?;
        let gradients = model.backward(
            model.forward(Tensor::<2>::ones([3, 2], &device())).mean(),
            3,
        )?;
        Ok(gradients.len())
    });
    assert_eq!(trained, [2, 2]);
}
