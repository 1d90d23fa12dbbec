//! When something goes wrong every rank hears of it, soon, with the cause.
use std::sync::Barrier;
use std::time::{Duration, Instant};

use burn::module::{Lora, Module, Param};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{DType, Tensor};
use ddp::{DdpConfig, Error};

use crate::support::{Mlp, caps, config, device, ranks, vector};

/// Far below the communicators' deadline of 30 s.
const PROMPT: Duration = Duration::from_secs(10);

#[test]
fn a_rank_that_runs_out_of_batches_is_named_promptly() {
    for early in 0..3 {
        let began = Instant::now();
        let errors = ranks(3, |communicator| {
            let rank = communicator.rank();
            let mut model = caps(0, 0).init(Mlp::new(&[4, 4], DType::F32), communicator)?;
            for _ in 0..if rank == early { 2 } else { 3 } {
                let loss = model.loss(&[0, 1]);
                if let Err(error) = model.backward(loss, 2) {
                    assert_eq!(model.stats().unwrap_err(), error);
                    return Ok(Some(error));
                }
            }
            Ok(None)
        });
        for (rank, error) in errors.iter().enumerate() {
            match error {
                None => assert_eq!(rank, early),
                Some(error) => assert_eq!(error.ranks(), [early], "rank {rank}: {error}"),
            }
        }
        assert!(began.elapsed() < PROMPT);
    }
}

#[test]
fn a_rank_that_panics_between_steps_leaves_nobody_hanging() {
    let began = Instant::now();
    let error = collectives::launch::spawn(3, &config(), |communicator| {
        let rank = communicator.rank();
        let mut model = DdpConfig::new().init(Mlp::new(&[4, 4], DType::F32), communicator)?;
        model.backward(model.loss(&[0]), 1)?;
        assert_ne!(rank, 1, "by order of the test");
        model.backward(model.loss(&[0]), 1)?;
        Ok::<_, Error>(())
    })
    .unwrap_err();
    assert_eq!(error.rank(), Some(1));
    assert!(
        error.to_string().contains("by order of the test"),
        "{error}"
    );
    assert!(began.elapsed() < PROMPT);
}

#[test]
fn a_loss_that_is_not_one_number_stops_all_ranks() {
    let began = Instant::now();
    let made = Barrier::new(2);
    let errors = ranks(2, |communicator| {
        let rank = communicator.rank();
        let mut model = DdpConfig::new().init(Mlp::new(&[4, 4], DType::F32), communicator)?;
        made.wait();
        let loss = model.loss(&[0]);
        let loss = if rank == 0 {
            loss.repeat_dim(0, 2)
        } else {
            loss
        };
        Ok(model.backward(loss, 1).unwrap_err())
    });
    assert_eq!(errors[0], Error::LossShape(2));
    assert_eq!(errors[1].ranks(), [0], "{}", errors[1]);
    assert!(
        errors[1].to_string().contains("the loss has 2 elements"),
        "{}",
        errors[1]
    );
    assert!(began.elapsed() < PROMPT);
}

#[test]
fn a_panic_in_the_backward_pass_is_an_error_here_and_there() {
    let made = Barrier::new(2);
    let errors = ranks(2, |communicator| {
        let rank = communicator.rank();
        let mut model = caps(0, 0).init(Mlp::new(&[4, 4], DType::F32), communicator)?;
        made.wait();
        // Without a graph there is nothing to run backward through.
        let loss = if rank == 1 {
            vector(&[1.0])
        } else {
            model.loss(&[0])
        };
        Ok(model.backward(loss, 1).unwrap_err())
    });
    assert!(matches!(errors[1], Error::Backward(_)), "{}", errors[1]);
    assert_eq!(errors[0].ranks(), [1], "{}", errors[0]);
}

#[test]
fn another_model_is_an_error_on_every_rank_that_shows_both_sides() {
    let errors = ranks(4, |communicator| {
        let sizes: &[usize] = if communicator.rank() >= 2 {
            &[4, 5, 2]
        } else {
            &[4, 4, 2]
        };
        Ok(DdpConfig::new()
            .init(Mlp::new(sizes, DType::F32), communicator)
            .err())
    });
    for error in errors {
        let error = error.unwrap();
        assert_eq!(error.ranks(), [2, 3]);
        let text = error.to_string();
        assert!(
            text.contains("rank 0: layers.0.weight F32 [4, 4] trained"),
            "{text}"
        );
        assert!(
            text.contains("rank 2: layers.0.weight F32 [4, 5] trained"),
            "{text}"
        );
    }
}

#[test]
fn a_missing_layer_another_type_a_frozen_layer_and_other_caps_are_told_apart() {
    type Case = (
        fn(usize) -> Mlp,
        fn(usize) -> DdpConfig,
        &'static str,
        &'static str,
    );
    let mlp = |_| Mlp::new(&[4, 4, 4], DType::F32);
    let plain = |_| DdpConfig::new();
    let cases: [Case; 4] = [
        (
            |rank| Mlp::new(&[4, 4, 4][rank..], DType::F32),
            plain,
            "layers.1.weight F32 [4, 4] trained",
            "(no such parameter)",
        ),
        (
            |rank| Mlp::new(&[4, 4], [DType::F32, DType::F64][rank]),
            plain,
            "layers.0.weight F32 [4, 4] trained",
            "layers.0.weight F64 [4, 4] trained",
        ),
        (
            |rank| {
                if rank == 0 {
                    Mlp::new(&[4, 4], DType::F32)
                } else {
                    Mlp::new(&[4, 4], DType::F32).no_grad()
                }
            },
            plain,
            "layers.0.weight F32 [4, 4] trained",
            "layers.0.weight F32 [4, 4] not trained",
        ),
        (
            mlp,
            |rank| DdpConfig::new().with_bucket_cap_mb(rank as f64),
            "first_bucket_mb, bucket_cap_mb: 1 0",
            "first_bucket_mb, bucket_cap_mb: 1 1",
        ),
    ];
    for (model, config, here, there) in cases {
        let errors = ranks(2, |communicator| {
            let rank = communicator.rank();
            Ok(config(rank).init(model(rank), communicator).err())
        });
        for error in errors {
            match error {
                Some(Error::ModelMismatch {
                    ranks, zero, other, ..
                }) => {
                    assert_eq!(
                        (ranks, zero.as_str(), other.as_str()),
                        (vec![1], here, there)
                    );
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn a_module_with_adapters_is_refused_by_name() {
    let errors = ranks(2, |communicator| {
        let model = Mlp::new(&[4, 4], DType::F32).apply_lora(Lora::new(2, 4.0));
        Ok(DdpConfig::new().init(model, communicator).err())
    });
    for error in errors {
        assert!(
            matches!(&error, Some(Error::Reparameterized { parameter, .. }) if parameter == "layers.0.weight"),
            "{error:?}"
        );
    }
}

#[test]
fn a_wrapped_module_cannot_be_wrapped_again_until_its_taps_are_off() {
    ranks(1, |communicator| {
        let model = DdpConfig::new().init(Mlp::new(&[4, 4], DType::F32), communicator)?;
        let (tapped, plain) = (model.module().clone(), model.into_module());
        for (module, refused) in [(tapped, true), (plain, false)] {
            let again = collectives::launch::spawn(1, &config(), |communicator| {
                Ok::<_, Error>(DdpConfig::new().init(module.clone(), communicator).is_err())
            });
            assert_eq!(again.unwrap(), [refused]);
        }
        Ok(())
    });
}

#[test]
fn a_half_precision_parameter_is_refused_by_name_and_welcome_if_frozen() {
    let make = || Param::from_tensor(Tensor::<1>::zeros([3], &device()).cast(DType::F16).detach());
    for (frozen, refused) in [(false, true), (true, false)] {
        let errors = ranks(2, |communicator| {
            let param = make().set_require_grad(!frozen);
            Ok(DdpConfig::new().init(param, communicator).err())
        });
        for error in errors {
            assert_eq!(
                matches!(&error, Some(Error::UnsupportedDtype { .. })),
                refused,
                "{error:?}"
            );
        }
    }
}

#[test]
fn settings_without_meaning_are_typed_errors_and_unknown_keys_too() {
    for mb in [-1.0, f64::NAN, f64::INFINITY] {
        let errors = ranks(1, |communicator| {
            let config = DdpConfig::new().with_bucket_cap_mb(mb);
            Ok(config
                .init(Mlp::new(&[2, 2], DType::F32), communicator)
                .err())
        });
        assert!(matches!(
            errors[0],
            Some(Error::Config {
                name: "bucket_cap_mb",
                ..
            })
        ));
    }
    let config: DdpConfig = serde_json::from_str(r#"{"bucket_cap_mb": 0}"#).unwrap();
    assert_eq!(config, DdpConfig::new().with_bucket_cap_mb(0.0));
    assert!(serde_json::from_str::<DdpConfig>(r#"{"bucket_cap": 0}"#).is_err());
}

#[test]
fn a_step_with_gradients_of_this_rank_alone_is_refused() {
    ranks(2, |communicator| {
        let mut model = DdpConfig::new().init(Mlp::new(&[4, 4], DType::F32), communicator)?;
        let mut optimizer = SgdConfig::new().init();
        let loss = model.loss(&[0, 1]);
        // The line that is forgotten when a plain loop is made data-parallel.
        let alone = GradientsParams::from_grads(loss.backward(), model.module());
        let error = model.step(0.1, &mut optimizer, alone).unwrap_err();
        assert!(
            error.to_string().contains("no mean over the ranks"),
            "{error}"
        );
        Ok(())
    });
}
