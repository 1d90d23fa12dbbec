//! Parameters of unusual sizes and kinds.
use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::optim::{AdamConfig, ModuleOptimizer};
use burn::tensor::{DType, Tensor};
use zero::{Stage, ZeroConfig};

use crate::run::{Task, agree};
use crate::support::{Mlp, caps, from_vec, noise, values, vector, weights};

fn param<const D: usize>(salt: usize, shape: [usize; D]) -> Param<Tensor<D>> {
    let len = shape.iter().product();
    let numbers = (0..len).map(|at| noise(salt, at)).collect();
    Param::from_tensor(from_vec(numbers, shape, DType::F32).require_grad())
}

/// Parameters of 0, 1 and 3 elements and of five axes, one without a use, one without training, and
/// one that is held twice.
#[derive(Module, Debug)]
struct Odd {
    none: Param<Tensor<1>>,
    one: Param<Tensor<1>>,
    three: Param<Tensor<1>>,
    cube: Param<Tensor<5>>,
    unused: Param<Tensor<2>>,
    frozen: Param<Tensor<1>>,
    first: Linear,
    again: Linear,
}

impl Odd {
    fn new() -> Self {
        let shared = Linear {
            weight: param(5, [3, 3]),
            bias: Some(param(6, [3])),
        };
        let frozen = param(7, [3]);
        Self {
            none: param(8, [0]),
            one: param(1, [1]),
            three: param(2, [3]),
            cube: param(3, [1, 2, 1, 3, 2]),
            unused: param(4, [5, 2]),
            frozen: frozen.set_require_grad(false),
            first: shared.clone(),
            again: shared,
        }
    }

    fn loss(&self, rows: &[usize]) -> Tensor<1> {
        let row = |&row: &usize| (0..3).map(move |at| noise(100 + row, at));
        let input = from_vec(
            rows.iter().flat_map(row).collect(),
            [rows.len(), 3],
            DType::F32,
        );
        let scale = self.three.val() * self.frozen.val() + self.one.val();
        let output = self.first.forward(input) * scale.unsqueeze::<2>();
        let rest = self.cube.val().sum() + self.none.val().sum();
        let output = self.again.forward(output) + rest.unsqueeze::<2>();
        (output.clone() * output).sum_dim(1).mean()
    }
}

fn adam() -> ModuleOptimizer {
    AdamConfig::new().init()
}

fn task() -> Task<Odd> {
    Task {
        model: Odd::new,
        loss: Odd::loss,
        optimizer: adam,
        rate: 0.05,
        rows: 11,
        global_batch: 4,
        epochs: 2,
    }
}

#[test]
fn tiny_unused_frozen_and_tied_parameters_have_the_bits_of_ddp() {
    // Up to more ranks than most parameters have elements.
    task().check("odd", 1..=5, caps(0, 0));
    task().check("odd", 1..=5, caps(1 << 20, 1 << 20));
}

#[test]
fn what_is_not_trained_or_not_used_keeps_its_values() {
    let start = Odd::new();
    for stage in Stage::ALL {
        let kept = agree(2, |communicator| {
            let config = ZeroConfig::new(stage);
            let mut model = config.init(Odd::new(), adam(), communicator)?;
            model.backward(model.loss(&[0, 1]), 2)?;
            assert_eq!(model.last_step().unused, ["unused"]);
            model.step(0.1)?;
            let model = model.into_module()?;
            assert!(!model.frozen.is_require_grad());
            assert!(model.unused.is_require_grad());
            assert_ne!(values(model.one.val()), values(Odd::new().one.val()));
            Ok((values(model.frozen.val()), values(model.unused.val())))
        });
        let due = (values(start.frozen.val()), values(start.unused.val()));
        assert_eq!(kept, due);
    }
}

#[test]
fn a_module_without_a_trained_parameter_takes_steps() {
    #[derive(Module, Debug)]
    struct Constant {
        value: Param<Tensor<1>>,
    }
    for stage in Stage::ALL {
        let losses = agree(2, |communicator| {
            let value = param(1, [1]).set_require_grad(false);
            let start = values(value.val());
            let config = ZeroConfig::new(stage);
            let mut model = config.init(Constant { value }, adam(), communicator)?;
            let input = vector(&[2.0]).require_grad();
            model.backward(model.value.val() * input, 1)?;
            model.step(0.1)?;
            assert_eq!(values(model.value.val()), start);
            Ok(model.last_step().loss)
        });
        assert_eq!(losses, f64::from(values(param(1, [1]).val())[0] * 2.0));
    }
}

#[test]
fn a_clone_that_the_user_keeps_keeps_its_values() {
    for stage in [Stage::One, Stage::Two] {
        agree(2, |communicator| {
            let config = ZeroConfig::new(stage).with_ddp(caps(100, 300));
            let model = Mlp::new(&[4, 8, 2], DType::F32);
            let mut model = config.init(model, adam(), communicator)?;
            let mut kept = Vec::new();
            for _ in 0..3 {
                kept.push((model.module().clone(), weights(model.module())));
                model.backward(model.loss(&[0, 1, 2]), 3)?;
                model.step(0.1)?;
            }
            for (clone, values) in &kept {
                assert_eq!(&weights(clone), values);
            }
            assert_ne!(kept[0].1, kept[1].1);
            Ok(())
        });
    }
}
