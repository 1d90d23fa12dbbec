//! Loops that are not forward, backward, step: several models, clones, layers thawed, weights read
//! around their tap. The right result or a typed error; no panic, and nobody waits in vain.
use std::sync::Barrier;

use burn::module::{Module, Param};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::Tensor;
use ddp::{DdpConfig, DistributedDataParallel, Error};

use crate::parameters::{Pair, PairOf, gradient, weight};
use crate::support::{caps, ranks, vector};

type Weight = Param<Tensor<1>>;

fn one(value: f32) -> Weight {
    Param::from_tensor(vector(&[value]))
}

/// A generator g and a critic d on four rows, by turns: the critic's loss goes through a detached
/// generator, the generator's through the critic, which it must leave alone.
///
/// Whole numbers and a rate of 1/2 on 1, 2 or 4 ranks: every sum is exact.
fn adversaries(world: usize) -> Vec<[f32; 2]> {
    const REAL: [f32; 4] = [3.0, 5.0, 2.0, 6.0];
    const NOISE: [f32; 4] = [1.0, -2.0, 4.0, 1.0];
    ranks(world, |mut communicator| {
        let part = communicator.part(4);
        let other = communicator.split(Some(0), 0)?.expect("all have a color");
        let mut generator = DdpConfig::new().init(one(1.0), communicator)?;
        let mut critic = caps(0, 0).init(one(0.5), other)?;
        let mut optimizers = [SgdConfig::new().init(), SgdConfig::new().init()];
        let (real, noise) = (vector(&REAL[part.clone()]), vector(&NOISE[part.clone()]));
        for _ in 0..3 {
            let fake = (generator.val() * noise.clone()).detach();
            let loss = (critic.val() * (fake - real.clone())).mean();
            let gradients = critic.backward(loss, part.len())?;
            critic.step(0.5, &mut optimizers[0], gradients)?;

            let before = weight(&critic);
            let loss = (critic.val() * generator.val() * noise.clone())
                .mean()
                .neg();
            let gradients = generator.backward(loss, part.len())?;
            assert_eq!(gradients.len(), 1, "the critic's gradient came along");
            generator.step(0.5, &mut optimizers[1], gradients)?;
            assert_eq!(weight(&critic), before);
        }
        Ok([weight(&generator), weight(&critic)])
    })
}

#[test]
fn two_wrapped_models_in_each_rank_train_by_turns_as_in_one_process() {
    // By hand: the mean of real is 4, of noise 1; d -= (g - 4) / 2, then g += d / 2.
    let (mut generator, mut critic) = (1.0f32, 0.5);
    for _ in 0..3 {
        critic -= (generator - 4.0) / 2.0;
        generator += critic / 2.0;
    }
    for world in [1, 2, 4] {
        assert_eq!(adversaries(world), vec![[generator, critic]; world]);
    }
}

#[test]
fn a_layer_frozen_and_thawed_again_trains_on() {
    let seen = ranks(2, |communicator| {
        let mut model: PairOf = caps(0, 0).init(Pair::new(8.0), communicator)?;
        let mut optimizer = SgdConfig::new().init();
        let mut seen = Vec::new();
        for step in 0..4 {
            let trained = !(1..3).contains(&step);
            model.update(|module| Pair {
                a: module.a.set_require_grad(trained),
                b: module.b,
            });
            let gradients = model.backward((model.a.val() + model.b.val()).sum(), 1)?;
            assert_eq!(gradient(&gradients, &model.a), trained.then_some(1.0));
            assert_eq!(model.last_step().unused.is_empty(), trained);
            model.step(1.0, &mut optimizer, gradients)?;
            seen.push([weight(&model.a), weight(&model.b)]);
        }
        Ok(seen)
    });
    let expected = [[7.0, 7.0], [7.0, 6.0], [7.0, 5.0], [6.0, 4.0]];
    assert_eq!(seen, [expected; 2]);
}

#[test]
fn two_live_losses_are_a_typed_error_on_every_rank() {
    let made = Barrier::new(2);
    let errors = ranks(2, |communicator| {
        let mut model: PairOf = DdpConfig::new().init(Pair::new(0.0), communicator)?;
        let (one, two) = (model.a.val().sum(), model.a.val().sum());
        model.backward(one, 1)?;
        made.wait();
        Ok(model.backward(two, 1).unwrap_err())
    });
    for error in &errors {
        assert!(
            error.to_string().contains("already been consumed"),
            "{error}"
        );
    }
    assert!(
        errors
            .iter()
            .any(|error| matches!(error, Error::Backward(_)))
    );
}

#[test]
fn a_weight_read_around_its_tap_on_one_rank_only_is_averaged_all_the_same() {
    for config in [DdpConfig::new(), caps(0, 0)] {
        let seen = ranks(2, |communicator| {
            let rank = communicator.rank();
            let mut model: PairOf = config.init(Pair::new(0.0), communicator)?;
            let mut seen = Vec::new();
            for _ in 0..3 {
                let b = if rank == 0 {
                    model.b.val()
                } else {
                    model.b.base()
                };
                let loss = (model.a.val() + b.mul_scalar(2 * rank as i32 + 1)).sum();
                let gradients = model.backward(loss, 1)?;
                seen.push([&model.a, &model.b].map(|param| gradient(&gradients, param)));
            }
            Ok(seen)
        });
        assert_eq!(seen, vec![vec![[Some(1.0), Some(2.0)]; 3]; 2]);
    }
}

#[test]
fn forward_passes_that_nobody_uses_change_nothing() {
    let seen = ranks(2, |communicator| {
        let mut model: PairOf = caps(0, 0).init(Pair::new(1.0), communicator)?;
        let mut optimizer = SgdConfig::new().init();
        for step in 0..3 {
            for _ in 0..step {
                drop(model.a.val() * model.b.val());
            }
            let kept = model.b.val() * model.a.val();
            let gradients = model.backward((model.a.val() + model.b.val()).sum(), 1)?;
            model.step(0.25, &mut optimizer, gradients)?;
            drop(kept);
        }
        Ok([weight(&model.a), weight(&model.b)])
    });
    assert_eq!(seen, [[0.25; 2]; 2]);
}

#[test]
fn a_backward_pass_on_a_clone_between_steps_leaves_the_replica_alone() {
    let seen = ranks(2, |communicator| {
        let rank = communicator.rank() as f32;
        let mut model: PairOf = caps(0, 0).init(Pair::new(1.0), communicator)?;
        let mut optimizer = SgdConfig::new().init();
        let mut alone = Vec::new();
        for _ in 0..3 {
            let clone = model.module().clone();
            let loss = clone.a.val().mul_scalar(rank + 1.0).sum();
            let gradients = GradientsParams::from_grads(loss.backward(), &clone);
            alone.push(gradient(&gradients, &clone.a));
            let gradients = model.backward((model.a.val() + model.b.val()).sum(), 1)?;
            model.step(0.25, &mut optimizer, gradients)?;
        }
        assert_eq!(alone, [Some(rank + 1.0); 3]);
        Ok([weight(&model.a), weight(&model.b)])
    });
    assert_eq!(seen, [[0.25; 2]; 2]);
}

/// The teacher is a clone of an older replica, whose output is a target; student and teacher see
/// two views by turns, so that the student's weight is used before and after the teacher's.
#[test]
fn a_teacher_that_is_an_older_clone_may_run_between_two_uses_of_the_student() {
    let seen = ranks(2, |communicator| {
        let rank = communicator.rank() as f32;
        let mut model: DistributedDataParallel<Weight> = caps(0, 0).init(one(1.0), communicator)?;
        let mut optimizer = SgdConfig::new().init();
        let mut teacher = model.module().clone();
        let mut seen = Vec::new();
        for _ in 0..3 {
            let mut loss = vector(&[0.0]);
            for view in [1.0, 3.0] {
                let student = model.val().mul_scalar(view + rank);
                let target = teacher.val().mul_scalar(view).detach();
                loss = loss + student * target;
            }
            let gradients = model.backward(loss, 1)?;
            seen.push(gradient(&gradients, model.module()));
            teacher = model.module().clone();
            model.step(0.25, &mut optimizer, gradients)?;
        }
        Ok(seen)
    });
    // The teacher's weight times 1 + 9 on rank 0 and 2 + 12 on rank 1: 12 times 1, 1 and -2.
    assert_eq!(seen, vec![[12.0, 12.0, -24.0].map(Some); 2]);
}

#[test]
fn a_loss_that_outlives_its_replica_still_has_a_backward_pass() {
    ranks(2, |communicator| {
        let model: PairOf = DdpConfig::new().init(Pair::new(2.0), communicator)?;
        let loss = (model.a.val() * model.b.val()).sum();
        let module = model.module().clone();
        drop(model);
        let gradients = GradientsParams::from_grads(loss.backward(), &module);
        assert_eq!(gradient(&gradients, &module.a), Some(2.0));
        Ok(())
    });
}

#[test]
fn a_module_that_was_taken_out_trains_on_alone() {
    let seen = ranks(2, |communicator| {
        let rank = communicator.rank() as f32;
        let mut model: PairOf = DdpConfig::new().init(Pair::new(2.0), communicator)?;
        let mut optimizer = SgdConfig::new().init();
        let gradients = model.backward(model.a.val().sum(), 1)?;
        model.step(1.0, &mut optimizer, gradients)?;
        let module = model.into_module();
        let loss = module.a.val().mul_scalar(rank).sum();
        let gradients = GradientsParams::from_grads(loss.backward(), &module);
        Ok(weight(&optimizer.step(1.0, module, gradients).a))
    });
    assert_eq!(seen, [1.0, 0.0]);
}

#[test]
fn a_loss_of_another_model_gives_no_gradient_and_no_error() {
    let seen = ranks(2, |communicator| {
        let mut model: PairOf = DdpConfig::new().init(Pair::new(2.0), communicator)?;
        let mut optimizer = SgdConfig::new().init();
        let other = one(1.0);
        let gradients = model.backward(other.val().sum(), 1)?;
        assert!(gradients.is_empty());
        assert_eq!(model.last_step().unused, ["a", "b"]);
        model.step(1.0, &mut optimizer, gradients)?;
        Ok([weight(&model.a), weight(&model.b)])
    });
    assert_eq!(seen, [[2.0; 2]; 2]);
}

#[test]
fn a_layer_frozen_on_one_rank_alone_does_not_let_the_replicas_part() {
    let seen = ranks(2, |communicator| {
        let rank = communicator.rank();
        let mut model: PairOf = caps(0, 0).init(Pair::new(8.0), communicator)?;
        let mut optimizer = SgdConfig::new().init();
        for _ in 0..2 {
            model.update(|module| Pair {
                a: module.a,
                b: module.b.set_require_grad(rank == 0),
            });
            let gradients = model.backward((model.a.val() + model.b.val()).sum(), 1)?;
            assert_eq!(gradient(&gradients, &model.b), Some(0.5));
            model.step(1.0, &mut optimizer, gradients)?;
        }
        Ok([weight(&model.a), weight(&model.b)])
    });
    assert_eq!(seen, [[6.0, 7.0]; 2]);
}

#[test]
fn a_clone_without_taps_may_train_on_another_thread_meanwhile() {
    ranks(2, |communicator| {
        let mut model: PairOf = caps(0, 0).init(Pair::new(1.0), communicator)?;
        let mut optimizer = SgdConfig::new().init();
        let mut clone = model.valid().materialize().train();
        std::thread::scope(|scope| {
            let other = scope.spawn(move || {
                let mut optimizer = SgdConfig::new().init();
                for _ in 0..100 {
                    let loss = (clone.a.val() + clone.b.val()).sum();
                    let gradients = GradientsParams::from_grads(loss.backward(), &clone);
                    assert_eq!(gradient(&gradients, &clone.a), Some(1.0));
                    clone = optimizer.step(1.0, clone, gradients);
                }
                weight(&clone.a)
            });
            for _ in 0..100 {
                let loss = (model.a.val() + model.b.val()).mul_scalar(2.0).sum();
                let gradients = model.backward(loss, 1)?;
                assert_eq!(gradient(&gradients, &model.a), Some(2.0));
                model.step(1.0, &mut optimizer, gradients)?;
            }
            assert_eq!(other.join().expect("no panic"), -99.0);
            assert_eq!(weight(&model.a), -199.0);
            Ok(())
        })
    });
}

#[test]
fn gradients_of_an_older_clone_are_not_taken_for_the_replicas() {
    let seen = ranks(2, |communicator| {
        let mut model: PairOf = DdpConfig::new().init(Pair::new(1.0), communicator)?;
        let mut optimizer = SgdConfig::new().init();
        let older = model.module().clone();
        let gradients = model.backward((model.a.val() + model.b.val()).sum(), 1)?;
        model.step(0.25, &mut optimizer, gradients)?;
        let gradients = model.backward((model.a.val() + older.b.val()).sum(), 1)?;
        Ok([&model.a, &model.b].map(|param| gradient(&gradients, param)))
    });
    assert_eq!(seen, [[Some(1.0), None]; 2]);
}
