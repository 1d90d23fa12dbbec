//! Parameters that are shared, unused, frozen, or read around their tap (trials BR-01 to BR-04).
use std::sync::Barrier;

use burn::module::{Module, Param};
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig, momentum::MomentumConfig};
use burn::tensor::{DType, Tensor};
use ddp::{DdpConfig, DistributedDataParallel, Error};

use crate::support::{caps, device, from_vec, ranks, values, vector};

/// Two weights of one element each.
#[derive(Module, Debug)]
pub(crate) struct Pair {
    pub(crate) a: Param<Tensor<1>>,
    pub(crate) b: Param<Tensor<1>>,
}

impl Pair {
    pub(crate) fn new(value: f32) -> Self {
        Self {
            a: Param::from_tensor(vector(&[value])),
            b: Param::from_tensor(vector(&[value])),
        }
    }
}

pub(crate) type PairOf = DistributedDataParallel<Pair>;

pub(crate) fn gradient(gradients: &GradientsParams, param: &Param<Tensor<1>>) -> Option<f32> {
    gradients
        .get::<1>(param.id)
        .map(|gradient| gradient.into_scalar::<f32>())
}

fn momentum() -> ModuleOptimizer {
    SgdConfig::new()
        .with_momentum(Some(
            MomentumConfig::new().with_momentum(0.9).with_dampening(0.0),
        ))
        .init()
}

pub(crate) fn weight(param: &Param<Tensor<1>>) -> f32 {
    param.val().into_scalar::<f32>()
}

#[test]
fn the_mean_divides_by_samples_and_the_rate_follows_its_schedule() {
    let trained = ranks(2, |communicator| {
        let mut model: PairOf = DdpConfig::new().init(Pair::new(1.0), communicator)?;
        let mut optimizer = SgdConfig::new().init();
        let mut seen = Vec::new();
        for rate in [0.1, 0.05] {
            let gradients = model.backward(model.a.val().sum(), 1)?;
            model.step(rate, &mut optimizer, gradients).unwrap();
            seen.push(weight(&model.a));
        }
        Ok(seen)
    });
    let first = 1.0f32 - 0.1;
    assert_eq!(trained, [[first, first - 0.05], [first, first - 0.05]]);
}

#[test]
fn uneven_ranks_weigh_by_their_samples() {
    // Per-sample gradients 1, 2, 3 and 10: 16 / 4.
    let gradients = ranks(2, |communicator| {
        let samples = [vec![1.0, 2.0, 3.0], vec![10.0]][communicator.rank()].clone();
        let mut model: PairOf = DdpConfig::new().init(Pair::new(0.0), communicator)?;
        let loss = (model.a.val() * vector(&samples)).mean();
        let gradients = model.backward(loss, samples.len())?;
        Ok(gradient(&gradients, &model.a))
    });
    assert_eq!(gradients, [Some(4.0), Some(4.0)]);
}

#[test]
fn an_unused_parameter_in_a_shared_bucket_stays_untouched() {
    let seen = ranks(2, |communicator| {
        let factor = communicator.rank() as f32 + 1.0;
        let mut model: PairOf = DdpConfig::new().init(Pair::new(1.0), communicator)?;
        let mut optimizer = momentum();
        for _ in 0..3 {
            let loss = model.a.val().mul_scalar(factor).sum();
            let gradients = model.backward(loss, 1)?;
            assert_eq!(gradient(&gradients, &model.a), Some(1.5));
            assert_eq!(gradient(&gradients, &model.b), None);
            assert_eq!(model.last_step().unused, ["b"]);
            model.step(0.125, &mut optimizer, gradients).unwrap();
        }
        assert_eq!(model.plan().len(), 1);
        Ok((weight(&model.a), weight(&model.b)))
    });
    assert_eq!(seen[0], seen[1]);
    assert_eq!(seen[0].1, 1.0);
}

#[test]
fn a_parameter_used_on_one_rank_gets_its_mean_on_all() {
    for config in [DdpConfig::new(), caps(0, 0)] {
        let seen = ranks(2, |communicator| {
            let rank = communicator.rank();
            let mut model: PairOf = config.init(Pair::new(0.0), communicator)?;
            let mut loss = model.a.val().sum();
            if rank == 0 {
                loss = loss + model.b.val().mul_scalar(2.0).sum();
            }
            let gradients = model.backward(loss, 1)?;
            assert!(model.last_step().unused.is_empty());
            Ok((
                gradient(&gradients, &model.a),
                gradient(&gradients, &model.b),
            ))
        });
        assert_eq!(seen, [(Some(1.0), Some(1.0)); 2]);
    }
}

#[test]
fn a_parameter_frozen_between_steps_keeps_its_value_in_spite_of_momentum() {
    let seen = ranks(2, |communicator| {
        let mut model: PairOf = DdpConfig::new().init(Pair::new(1.0), communicator)?;
        let mut optimizer = momentum();
        for step in 0..2 {
            let gradients = model.backward((model.a.val() + model.b.val()).sum(), 1)?;
            assert_eq!(gradient(&gradients, &model.a), (step == 0).then_some(1.0));
            model.step(0.1, &mut optimizer, gradients).unwrap();
            model.update(|module| Pair {
                a: module.a.set_require_grad(false),
                b: module.b,
            });
        }
        Ok(weight(&model.a))
    });
    assert_eq!(seen, [1.0 - 0.1f32; 2]);
}

#[test]
fn the_rank_that_uses_a_parameter_may_change_every_step() {
    let seen = ranks(2, |communicator| {
        let rank = communicator.rank();
        let mut model: PairOf = caps(0, 0).init(Pair::new(1.0), communicator)?;
        let mut optimizer = momentum();
        for step in 0..20 {
            let mut loss = (model.a.val() * model.a.val()).sum();
            if step % 2 == rank {
                loss = loss + (model.b.val() * model.b.val()).sum();
            }
            let gradients = model.backward(loss, 1)?;
            model.step(0.01, &mut optimizer, gradients).unwrap();
        }
        Ok((weight(&model.a), weight(&model.b)))
    });
    assert_eq!(seen[0], seen[1]);
    assert_ne!(seen[0].1, 1.0);
}

#[test]
fn a_shared_weight_counts_once_with_the_sum_of_its_uses() {
    let seen = ranks(2, |communicator| {
        let inputs = [[1.0, 2.0], [3.0, 4.0]][communicator.rank()];
        let mut model: PairOf = caps(0, 0).init(Pair::new(0.0), communicator)?;
        let mut all = Vec::new();
        for _ in 0..2 {
            let w = || model.a.val();
            let loss = (w() * vector(&inputs[..1]) + w() * vector(&inputs[1..])).sum();
            let gradients = model.backward(loss, 1)?;
            all.push(gradient(&gradients, &model.a));
            assert_eq!(model.last_step().buckets.len(), 2);
        }
        Ok(all)
    });
    assert_eq!(seen, [[Some(5.0); 2], [Some(5.0); 2]]);
}

#[test]
fn several_forward_passes_may_share_a_backward_pass() {
    let seen = ranks(2, |communicator| {
        let inputs = [[1.0, 2.0, 4.0], [3.0, 4.0, 6.0]][communicator.rank()];
        let mut model: PairOf = DdpConfig::new().init(Pair::new(0.0), communicator)?;
        let forward = |input: f32| model.a.val().mul_scalar(input).sum();
        let loss = forward(inputs[0]) + forward(inputs[1]) + forward(inputs[2]);
        let gradients = model.backward(loss, 1)?;
        Ok(gradient(&gradients, &model.a))
    });
    assert_eq!(seen, [Some(10.0); 2]);
}

#[test]
fn two_backward_passes_before_a_step_give_two_means() {
    let seen = ranks(2, |communicator| {
        let rank = communicator.rank() as f32;
        let mut model: PairOf = DdpConfig::new().init(Pair::new(0.0), communicator)?;
        let mut sum = 0.0;
        for input in [1.0, 10.0] {
            let loss = model.a.val().mul_scalar(input + rank).sum();
            let gradients = model.backward(loss, 1)?;
            sum += gradient(&gradients, &model.a).unwrap();
        }
        Ok(sum)
    });
    assert_eq!(seen, [12.0; 2]);
}

#[test]
fn two_live_losses_are_a_typed_error_on_the_rank_and_no_panic() {
    let errors = ranks(1, |communicator| {
        let mut model: PairOf = DdpConfig::new().init(Pair::new(0.0), communicator)?;
        let (one, two) = (model.a.val().sum(), model.a.val().sum());
        model.backward(one, 1)?;
        Ok(model.backward(two, 1).unwrap_err())
    });
    assert!(
        matches!(&errors[0], Error::Backward(message) if message.contains("already been consumed")),
        "{errors:?}"
    );
}

#[test]
fn a_discarded_forward_pass_and_an_evaluation_leave_no_trace() {
    let seen = ranks(2, |communicator| {
        let mut model: PairOf = DdpConfig::new().init(Pair::new(2.0), communicator)?;
        drop(model.b.val() * model.a.val());
        assert_eq!(weight(&model.valid().a), 2.0);
        let gradients = model.backward(model.a.val().sum(), 1)?;
        Ok((
            gradient(&gradients, &model.a),
            gradient(&gradients, &model.b),
        ))
    });
    assert_eq!(seen, [(Some(1.0), None); 2]);
}

#[test]
fn a_weight_read_around_its_tap_is_reduced_late() {
    let seen = ranks(2, |communicator| {
        let factor = communicator.rank() as f32 + 1.0;
        let mut model: PairOf = DdpConfig::new().init(Pair::new(0.0), communicator)?;
        let loss = (model.a.val() + model.b.base()).mul_scalar(factor).sum();
        let gradients = model.backward(loss, 1)?;
        Ok((
            gradient(&gradients, &model.a),
            gradient(&gradients, &model.b),
        ))
    });
    assert_eq!(seen, [(Some(1.5), Some(1.5)); 2]);
}

#[test]
fn a_weight_read_both_ways_is_an_error_that_names_it() {
    let made = Barrier::new(2);
    let errors = ranks(2, |communicator| {
        let mut model: PairOf = DdpConfig::new().init(Pair::new(0.0), communicator)?;
        made.wait();
        let loss = (model.b.val() + model.b.base()).sum();
        let error = model.backward(loss, 1).unwrap_err();
        // Final: the same cause at every later call.
        assert_eq!(model.backward(model.a.val().sum(), 1).unwrap_err(), error);
        Ok(error)
    });
    for error in errors {
        match error {
            Error::LeafGradient { parameter } => assert_eq!(parameter, "b"),
            Error::Collective(error) => {
                assert!(error.to_string().contains("parameter b"), "{error}")
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn outside_backward_a_tap_is_transparent() {
    ranks(2, |communicator| {
        let rank = communicator.rank() as f32;
        let model: PairOf = DdpConfig::new().init(Pair::new(0.0), communicator)?;
        let loss = model.a.val().mul_scalar(rank + 1.0).sum();
        let gradients = GradientsParams::from_grads(loss.backward(), model.module());
        assert_eq!(gradient(&gradients, &model.a), Some(rank + 1.0));
        Ok(())
    });
}

#[test]
fn one_parameter_held_twice_is_one_slot_and_stays_tied() {
    let seen = ranks(2, |communicator| {
        let rank = communicator.rank() as f32;
        let a = Param::from_tensor(vector(&[1.0]));
        let mut model: PairOf = caps(0, 0).init(Pair { b: a.clone(), a }, communicator)?;
        let mut optimizer = SgdConfig::new().init();
        for _ in 0..2 {
            let loss = (model.a.val() + model.b.val().mul_scalar(rank)).sum();
            let gradients = model.backward(loss, 1)?;
            assert_eq!(gradient(&gradients, &model.a), Some(1.5));
            model.step(0.5, &mut optimizer, gradients).unwrap();
        }
        assert_eq!(model.plan().len(), 1);
        Ok((weight(&model.a), weight(&model.b)))
    });
    assert_eq!(seen, [(-0.5, -0.5); 2]);
}

#[test]
fn a_model_with_nothing_to_train_still_counts_its_samples() {
    // A loss that depends on no parameter has no backward pass; one on a free tensor has.
    let seen = ranks(2, |communicator| {
        let rank = communicator.rank();
        let mut model: PairOf = DdpConfig::new().init(Pair::new(0.0).no_grad(), communicator)?;
        let free = vector(&[rank as f32]).require_grad();
        let gradients = model.backward(free.mul_scalar(2.0).sum(), rank + 1)?;
        assert!(gradients.is_empty());
        Ok((model.last_step().samples, model.last_step().loss))
    });
    assert_eq!(seen, [(3, 4.0 / 3.0); 2]);
}

#[test]
fn gradient_checkpointing_and_taps_get_along() {
    let seen = ranks(2, |communicator| {
        let rank = communicator.rank() as f32;
        let device = device().gradient_checkpointing();
        let vector = |value: f32| Tensor::<1>::from_floats([value, value], &device);
        let pair = Pair {
            a: Param::from_tensor(vector(2.0)),
            b: Param::from_tensor(vector(3.0)),
        };
        let mut model: PairOf = caps(0, 0).init(pair, communicator)?;
        for _ in 0..2 {
            let product = model.a.val() * vector(rank + 1.0) * model.b.val();
            let gradients = model.backward(product.sum(), 1)?;
            let values = |param: &Param<Tensor<1>>| gradients.get::<1>(param.id).map(values);
            assert_eq!(values(&model.a), Some(vec![4.5; 2]));
            assert_eq!(values(&model.b), Some(vec![3.0; 2]));
        }
        Ok(model
            .module()
            .a
            .device()
            .gradient_checkpointing_strategy()
            .is_some())
    });
    assert_eq!(seen, [true; 2]);
}

#[test]
fn a_parameter_without_elements_does_no_harm() {
    for config in [DdpConfig::new(), caps(0, 0)] {
        let seen = ranks(3, |communicator| {
            let empty = Tensor::<1>::zeros([0], &device());
            let pair = Pair {
                a: Param::from_tensor(vector(&[1.0])),
                b: Param::from_tensor(empty),
            };
            let mut model: PairOf = config.init(pair, communicator)?;
            let loss = (model.a.val().mul_scalar(3.0)).sum() + model.b.val().sum();
            let gradients = model.backward(loss, 1)?;
            let empty = gradients
                .get::<1>(model.b.id)
                .map(|gradient| gradient.dims());
            Ok((gradient(&gradients, &model.a), empty))
        });
        assert_eq!(seen, [(Some(3.0), Some([0])); 3]);
    }
}

#[test]
fn a_model_may_mix_f32_and_f64_and_no_bucket_does() {
    let seen = ranks(3, |communicator| {
        let rank = communicator.rank() as f64;
        let pair = Pair {
            a: Param::from_tensor(vector(&[1.0])),
            b: Param::from_tensor(from_vec(vec![1.0], [1], DType::F64)),
        };
        let mut model: PairOf = DdpConfig::new().init(pair, communicator)?;
        assert_eq!(model.plan().len(), 2);
        // A third is not a number of f32.
        let third = 1.0 / 3.0;
        for _ in 0..2 {
            let wide = (model.b.val() * from_vec(vec![third], [1], DType::F64)).sum();
            let loss = model.a.val().mul_scalar(rank).sum() + wide.cast(DType::F32);
            let gradients = model.backward(loss, 1)?;
            assert_eq!(gradient(&gradients, &model.a), Some(1.0));
            let wide = gradients.get::<1>(model.b.id).unwrap().into_data();
            assert_eq!(
                wide.iter::<f64>().collect::<Vec<_>>(),
                [(third + third + third) / 3.0]
            );
        }
        Ok(())
    });
    assert_eq!(seen.len(), 3);
}

#[test]
fn the_gradient_of_a_transposed_weight_arrives_in_order() {
    let seen = ranks(2, |communicator| {
        let factor = communicator.rank() as f64 + 1.0;
        let zeros = from_vec(vec![0.0; 6], [2, 3], DType::F32);
        let mut model = caps(0, 0).init(Param::from_tensor(zeros), communicator)?;
        let numbers = (0..6).map(|number| factor * f64::from(number)).collect();
        let loss = (model.val().transpose() * from_vec(numbers, [3, 2], DType::F32)).sum();
        let gradients = model.backward(loss, 1)?;
        Ok(values(gradients.get::<2>(model.id).unwrap()))
    });
    // 1.5 times the numbers, row by row of the transposed.
    assert_eq!(seen, vec![vec![0.0, 3.0, 6.0, 1.5, 4.5, 7.5]; 2]);
}

#[test]
fn a_record_with_other_ids_is_trained_on_from_where_it_was_loaded() {
    let seen = ranks(2, |communicator| {
        let mut model: PairOf = DdpConfig::new().init(Pair::new(1.0), communicator)?;
        let mut optimizer = SgdConfig::new().init();
        // Burn gives the parameters the ids of the record.
        model.update(|module| module.load_record(Pair::new(5.0).into_record()));
        let before = [weight(&model.a), weight(&model.b)];
        for _ in 0..2 {
            let gradients = model.backward((model.a.val() + model.b.val()).sum(), 1)?;
            assert_eq!(gradient(&gradients, &model.a), Some(1.0));
            model.step(0.5, &mut optimizer, gradients).unwrap();
        }
        assert_eq!(model.last_step().unused.len(), 0);
        Ok((before, [weight(&model.a), weight(&model.b)]))
    });
    assert_eq!(seen, [([5.0; 2], [4.0; 2]); 2]);
}

#[test]
fn a_replaced_parameter_is_trained_in_its_place() {
    let seen = ranks(2, |communicator| {
        let mut model: PairOf = DdpConfig::new().init(Pair::new(1.0), communicator)?;
        let mut optimizer = SgdConfig::new().init();
        model.update(|module| Pair {
            a: module.a,
            b: Param::from_tensor(vector(&[7.0])),
        });
        let gradients = model.backward((model.a.val() + model.b.val()).sum(), 1)?;
        model.step(0.5, &mut optimizer, gradients).unwrap();
        Ok([weight(&model.a), weight(&model.b)])
    });
    assert_eq!(seen, [[0.5, 6.5]; 2]);
}

#[test]
fn a_parameter_unfrozen_after_wrapping_is_an_error_that_names_it() {
    // Each rank finds out alone; the first would stop one that is still being made.
    let wrapped = Barrier::new(2);
    let seen = ranks(2, |communicator| {
        let module = Pair::new(1.0);
        let module = Pair {
            a: module.a,
            b: module.b.set_require_grad(false),
        };
        let mut model: PairOf = DdpConfig::new().init(module, communicator)?;
        model.update(|module| Pair {
            a: module.a,
            b: module.b.set_require_grad(true),
        });
        wrapped.wait();
        let loss = (model.a.val() + model.b.val()).sum();
        Ok(model.backward(loss, 1).unwrap_err())
    });
    let parameter = "b".to_owned();
    assert_eq!(seen[0], Error::NotWrapped { parameter });
    assert_eq!(seen[0], seen[1]);
}
