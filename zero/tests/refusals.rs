//! What cannot be sharded is refused, by name, on every rank, before anything has moved.
use burn::grad_clipping::{GradientClipping, GradientClippingConfig};
use burn::module::ParamGroup;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdafactorConfig, AdamConfig, GradientsParams, LambConfig, ModuleOptimizer, MuonConfig,
    SgdConfig,
};
use burn::tensor::DType;
use collectives::launch;
use ddp::{DdpConfig, Hook};
use zero::{Error, Stage, ZeroConfig};

use crate::run::{Task, agree, deterministic};
use crate::support::{Mlp, caps};

fn mlp() -> Mlp {
    Mlp::new(&[4, 8, 2], DType::F32)
}

fn refusal(optimizer: impl Fn() -> ModuleOptimizer + Sync) -> Error {
    let mut errors = launch::spawn(2, &deterministic(), |communicator| {
        let config = ZeroConfig::new(Stage::Two);
        Ok::<_, Error>(config.init(mlp(), optimizer(), communicator).unwrap_err())
    })
    .unwrap();
    errors.swap_remove(0)
}

fn refused(optimizer: impl Fn() -> ModuleOptimizer + Sync) -> (String, String) {
    match refusal(optimizer) {
        Error::WholeTensor { parameter, why } => (parameter, why),
        other => panic!("{other}"),
    }
}

#[test]
fn optimizers_of_whole_tensors_are_refused_by_name_with_a_parameter() {
    let (parameter, why) = refused(|| LambConfig::new().init());
    assert_eq!(parameter, "layers.0.weight");
    assert!(why.contains("it is LAMB"), "{why}");
    let (parameter, why) = refused(|| AdafactorConfig::new().init());
    assert_eq!(parameter, "layers.0.weight");
    assert!(why.contains("it is Adafactor"), "{why}");
    // Of several optimizers the one at fault.
    let (parameter, why) = refused(|| {
        let weight = ParamGroup::from_predicate("layers.1.weight");
        let sgd = ModuleOptimizer::from(SgdConfig::new().build());
        sgd.with_group(weight, MuonConfig::new().build(), None)
    });
    assert_eq!(parameter, "layers.1.weight");
    assert!(why.contains("it is Muon"), "{why}");
    // A vector is nothing that Muon could step.
    let (parameter, why) = refused(|| MuonConfig::new().init());
    assert_eq!(parameter, "layers.0.bias");
    assert!(why.contains("it is Muon") && why.contains("2D"), "{why}");
}

/// Clipping is what a refusal says only where it is to blame.
#[test]
fn an_optimizer_that_clips_besides_is_refused_for_itself() {
    let norm = || Some(GradientClipping::Norm(0.5));
    let value = || Some(GradientClipping::Value(0.5));
    for clipping in [norm, value] {
        let (_, why) = refused(|| {
            let adam = ModuleOptimizer::from(AdamConfig::new().build());
            adam.with_group(ParamGroup::all(), LambConfig::new().build(), clipping())
        });
        assert!(why.contains("it is LAMB"), "{why}");
        let (_, why) = refused(|| {
            let sgd = ModuleOptimizer::from(SgdConfig::new().build());
            let weights = ParamGroup::from_predicate("weight");
            sgd.with_group(weights, MuonConfig::new().build(), clipping())
        });
        assert!(why.contains("it is Muon"), "{why}");
    }
    // It keeps what Muon keeps.
    let (_, why) = refused(|| {
        let momentum = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
        let sgd = ModuleOptimizer::from(SgdConfig::new().build());
        sgd.with_group(ParamGroup::all(), momentum.build(), norm())
    });
    assert!(why.contains("max_grad_norm"), "{why}");
}

#[test]
fn clipping_by_the_norm_of_a_parameter_is_refused_and_clipping_by_value_is_not() {
    let norm = GradientClippingConfig::Norm(0.5);
    let (_, why) = refused(|| {
        let config = AdamConfig::new().with_grad_clipping(Some(norm.clone()));
        config.init()
    });
    assert!(why.contains("max_grad_norm"), "{why}");
    // Also where it belongs to one group alone.
    let (parameter, _) = refused(|| {
        let weight = ParamGroup::from_predicate("layers.1.bias");
        let sgd = ModuleOptimizer::from(SgdConfig::new().build());
        let norm = GradientClipping::Norm(1e6);
        sgd.with_group(weight, SgdConfig::new().build(), Some(norm))
    });
    assert_eq!(parameter, "layers.1.bias");
    let task = Task {
        model: mlp,
        loss: Mlp::loss,
        optimizer: || {
            let value = GradientClippingConfig::Value(0.05);
            SgdConfig::new().with_gradient_clipping(Some(value)).init()
        },
        rate: 0.1,
        rows: 8,
        global_batch: 4,
        epochs: 2,
    };
    task.check("value", 1..=3, caps(100, 300));
}

#[test]
fn an_optimizer_with_state_is_refused() {
    let error = refusal(|| {
        let model = mlp();
        let mut optimizer = AdamConfig::new().init();
        let gradients = GradientsParams::from_grads(model.loss(&[0]).backward(), &model);
        drop(optimizer.step(0.1, model, gradients));
        optimizer
    });
    // Two moments of two weights and two biases.
    assert_eq!(error, Error::HasState(8));
}

#[test]
fn ranks_with_unlike_optimizers_or_stages_learn_of_it_all_alike() {
    let unlike = agree(3, |communicator| {
        let beta = [0.9, 0.9, 0.8][communicator.rank()];
        let optimizer = AdamConfig::new().with_beta_1(beta).init();
        let made = ZeroConfig::new(Stage::One).init(mlp(), optimizer, communicator);
        Ok(made.unwrap_err())
    });
    assert_eq!(unlike.ranks(), [2]);
    assert!(unlike.to_string().contains("optimizer"), "{unlike}");
    let unlike = agree(3, |communicator| {
        let stage = Stage::ALL[communicator.rank() % 2];
        let optimizer = AdamConfig::new().init();
        let made = ZeroConfig::new(stage).init(mlp(), optimizer, communicator);
        Ok(made.unwrap_err())
    });
    assert_eq!(unlike.ranks(), [1]);
    assert!(unlike.to_string().contains("stage: 2"), "{unlike}");
}

#[test]
fn settings_that_have_no_meaning_are_refused() {
    let parse = |text| serde_json::from_str::<ZeroConfig>(text).map_err(|error| error.to_string());
    let unknown = parse(r#"{"stage": 4}"#).unwrap_err();
    assert!(unknown.contains("stage = 4"), "{unknown}");
    assert!(parse(r#"{"stage": 1, "shard": 2}"#).is_err());
    let compressed = DdpConfig::new().with_comm_hook(Hook::Bf16);
    let of = |stage| ZeroConfig::new(stage).with_ddp(compressed).validate();
    assert!(of(Stage::One).is_ok());
    let error = of(Stage::Two).unwrap_err();
    assert!(error.to_string().contains("comm_hook"), "{error}");
}
