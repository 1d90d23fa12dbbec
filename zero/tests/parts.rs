//! Stage 3: nobody holds a whole parameter that he does not use.
use burn::backend::{BackendTensor, DispatchTensor, DispatchTensorKind};
use burn::module::Module;
use burn::optim::{AdamConfig, SgdConfig};
use burn::tensor::{DType, Tensor};
use collectives::{Collective, CommunicatorConfig, launch};
use ddp::DdpConfig;
use zero::{Error, Stage, ZeroConfig};

use crate::run::{agree, seen};
use crate::support::{Mlp, caps, weights};

fn mlp() -> Mlp {
    Mlp::new(&[32, 64, 64, 64, 8], DType::F32)
}

/// Every parameter a bucket of its own.
fn config() -> ZeroConfig {
    ZeroConfig::new(Stage::Three).with_ddp(caps(0, 0))
}

pub(crate) fn flex(tensor: Tensor<2>) -> burn::backend::flex::FlexTensor {
    match tensor.into_dispatch() {
        DispatchTensor {
            kind: DispatchTensorKind::Flex(BackendTensor::Float(tensor)),
            ..
        } => tensor,
        _ => panic!("the tests run on flex"),
    }
}

#[test]
fn a_weight_is_free_between_its_use_in_the_forward_pass_and_the_backward_pass() {
    agree(2, |communicator| {
        let optimizer = AdamConfig::new().init();
        let mut model = config().init(mlp(), optimizer, communicator)?;
        for _ in 0..2 {
            let before = model.stats()?.of(Collective::AllGather).calls;
            // The memory of the second layer's weight, watched and not held.
            let watched = {
                let weight = model.layers[1].weight.val();
                std::sync::Arc::downgrade(&flex(weight.inner()).data_arc())
            };
            assert!(watched.upgrade().is_none());
            let loss = model.loss(&[0, 1]);
            let forward = model.stats()?.of(Collective::AllGather).calls - before;
            // One and eight parameters, and nothing of them is at hand in the backward pass: it gathers
            // the weights of all layers but the first.
            assert_eq!(forward, 1 + 8);
            model.backward(loss, 2)?;
            let backward = model.stats()?.of(Collective::AllGather).calls - before - forward;
            assert_eq!(backward, 3 + 1);
            model.step(0.1)?;
        }
        Ok(())
    });
}

#[test]
fn the_module_holds_placeholders_of_the_right_shapes() {
    agree(3, |communicator| {
        let optimizer = AdamConfig::new().init();
        let model = config().init(mlp(), optimizer, communicator)?;
        let plain = mlp();
        for (layer, due) in model.layers.iter().zip(&plain.layers) {
            assert_eq!(layer.weight.dims(), due.weight.dims());
            assert!(layer.weight.is_require_grad());
            let memory = flex(layer.weight.base().inner()).data_arc();
            assert_eq!(memory.len(), 4);
        }
        assert_eq!(model.num_params(), plain.num_params());
        assert_eq!(seen(model.module()), weights(&plain));
        assert_eq!(weights(&model.into_module()?), weights(&plain));
        Ok(())
    });
}

#[test]
fn validation_gathers_too_and_changes_nothing() {
    agree(2, |communicator| {
        let optimizer = SgdConfig::new().init();
        let mut model = config().init(mlp(), optimizer, communicator)?;
        let mut losses = Vec::new();
        for _ in 0..2 {
            let valid = model.module().valid();
            let loss = |model: &Mlp| model.loss(&[3, 4]).into_data();
            let expected = loss(model.module());
            assert_eq!(loss(&valid), expected);
            losses.push(expected);
            model.backward(model.loss(&[0, 1]), 2)?;
            model.step(0.1)?;
        }
        assert_ne!(losses[0], losses[1]);
        Ok(())
    });
}

#[test]
fn ranks_that_use_their_modules_unlike_are_told_so() {
    // All parameters of one length, so that nothing but their names could tell them apart.
    let square = || Mlp::new(&[8; 4], DType::F32);
    let settings = CommunicatorConfig::new();
    let errors = launch::spawn(2, &settings, |communicator| {
        let rank = communicator.rank();
        let optimizer = SgdConfig::new().init();
        let mut model = config().init(square(), optimizer, communicator)?;
        let weight = model.layers[rank].weight.val();
        let error = model.backward(weight.sum(), 1).unwrap_err();
        // It is final, and nothing panics.
        assert_eq!(model.step(0.1).unwrap_err(), error);
        assert_eq!(model.into_module().err(), Some(error.clone()));
        Ok::<_, Error>(error)
    })
    .unwrap();
    for error in errors {
        assert!(
            matches!(error, Error::Ddp(ddp::Error::Collective(_))),
            "{error}"
        );
        assert!(!error.ranks().is_empty(), "{error}");
    }
}

#[test]
fn what_needs_whole_parameters_is_refused_by_name() {
    agree(3, |communicator| {
        let optimizer = || SgdConfig::new().init();
        let shards = DdpConfig::new().with_micro_shards(8);
        let compared = DdpConfig::new().with_check_replicas_every(1);
        let refused = |ddp: DdpConfig| config().with_ddp(ddp).validate().unwrap_err().to_string();
        assert!(refused(compared).contains("check_replicas_every"));
        let zero = config().with_ddp(shards);
        let error = zero.init(mlp(), optimizer(), communicator).unwrap_err();
        assert!(error.to_string().contains("micro_shards = 8"), "{error}");
        Ok(())
    });
    agree(2, |communicator| {
        let mut model = config().init(mlp(), SgdConfig::new().init(), communicator)?;
        assert!(model.check_replicas().is_err());
        assert!(model.update(|module| module).is_err());
        // Neither was final.
        model.backward(model.loss(&[0]), 1)?;
        model.step(0.1)
    });
}
