//! What a training loop needs besides: accumulation, clipping, steps left out, buffers, checks.
use burn::module::{Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear};
use burn::optim::{AdamConfig, SgdConfig};
use burn::tensor::{DType, Tensor};
use collectives::{CommunicatorConfig, launch};
use ddp::{DdpConfig, Error, Result};

use crate::support::{Job, Mlp, Run, caps, device, distance, ranks, values, vector, weights};

type Weight = Param<Tensor<1>>;

fn weight(values: &[f32]) -> Weight {
    Param::from_tensor(vector(values))
}

/// A loss whose gradient is `gradient`.
fn slope(weight: &Weight, gradient: &[f32]) -> Tensor<1> {
    (weight.val() * vector(gradient)).sum()
}

#[test]
fn micro_batches_are_one_reduction_and_a_mean_over_all_samples() {
    let means = ranks(2, |communicator| {
        let rank = communicator.rank();
        let mut weight = caps(0, 0).init(weight(&[0.0]), communicator)?;
        // Per-sample sums: rank 0 has 2 x 1 + 3 x 10, rank 1 has 1 x 4; 36 over 6 samples.
        let parts: &[(f32, usize)] = [&[(1.0, 2), (10.0, 3)][..], &[(4.0, 1)]][rank];
        let before = weight.stats()?.total().calls;
        let mean = weight.accumulate(parts, |weight, &(gradient, samples)| {
            (slope(weight, &[gradient]), samples)
        })?;
        let record = weight.last_step();
        assert_eq!((record.samples, record.micro_batches), (6, parts.len()));
        // One all-reduce, and the first step's broadcast of the order.
        assert_eq!(weight.stats()?.total().calls - before, 2);
        Ok(values(mean.get::<1>(weight.id).unwrap()))
    });
    assert_eq!(means, [[6.0], [6.0]]);
}

#[test]
fn a_rank_without_micro_batches_takes_part() {
    let means = ranks(3, |communicator| {
        let rank = communicator.rank();
        let mut weight = DdpConfig::new().init(weight(&[0.0]), communicator)?;
        let mut means = Vec::new();
        for _ in 0..3 {
            let mean = weight.accumulate(0..rank, |weight, _| (slope(weight, &[3.0]), 1))?;
            means.extend(values(mean.get::<1>(weight.id).unwrap()));
        }
        Ok(means)
    });
    assert_eq!(means, [[3.0; 3]; 3]);
}

#[test]
fn a_parameter_that_one_micro_batch_uses_counts_and_others_leave_it() {
    let means = ranks(2, |communicator| {
        let rank = communicator.rank();
        let pair = vec![weight(&[0.0]), weight(&[0.0]), weight(&[0.0])];
        let mut pair = DdpConfig::new().init(pair, communicator)?;
        let mean = pair.accumulate(0..3, |pair, micro| {
            let loss = slope(&pair[0], &[1.0]);
            let second = rank == 1 && micro == 1;
            (
                if second {
                    loss + slope(&pair[1], &[6.0])
                } else {
                    loss
                },
                1,
            )
        })?;
        assert_eq!(pair.last_step().unused, ["2"]);
        let of = |at: usize| mean.get::<1>(pair[at].id).map(values);
        Ok([of(0), of(1), of(2)])
    });
    let expected = [Some(vec![1.0]), Some(vec![1.0]), None];
    assert_eq!(means, [expected.clone(), expected]);
}

/// The job's steps, each batch of a rank in `pieces` micro-batches.
fn accumulated(job: &Job<'_>, world: usize, pieces: usize) -> Vec<Run> {
    ranks(world, |communicator| {
        let mut optimizer = (job.optimizer)();
        let mut model = caps(100, 300).init(job.model(), communicator)?;
        let mut losses = Vec::new();
        for batch in job.batches(model.place()) {
            let gradients = model.accumulate(batch.micro_batches(pieces), |model, piece| {
                (model.loss(&piece.rows), piece.samples)
            })?;
            losses.push(model.last_step().loss);
            model.step(job.learning_rate, &mut optimizer, gradients)?;
        }
        Ok(Run {
            losses,
            weights: weights(&model.into_module()),
        })
    })
}

#[test]
fn accumulation_trains_like_one_batch() {
    let job = Job {
        sizes: &[6, 16, 8, 3],
        dtype: DType::F64,
        rows: 22,
        global_batch: 8,
        epochs: 2,
        learning_rate: 0.02,
        optimizer: || SgdConfig::new().init(),
    };
    let single = job.single();
    for (world, pieces) in [(1, 3), (2, 2), (3, 3), (4, 7)] {
        let runs = accumulated(&job, world, pieces);
        assert!(runs.iter().all(|run| *run == runs[0]));
        // As in `equivalence`: terms below 8, at most 15 roundings a step, 6 steps that double
        // what came before; micro-batches round each piece's weighting once more.
        let bound = 0.02 * 16.0 * 8.0 * f64::EPSILON / 2.0 * 64.0;
        let far = distance(&runs[0].weights, &single.weights);
        assert!(far <= bound, "{world} ranks, {pieces} pieces: {far:e}");
    }
}

#[test]
fn the_norm_is_that_of_the_mean_over_all_parameters() {
    for world in 1..=4 {
        for sizes in [caps(0, 0), caps(1 << 20, 1 << 20)] {
            let outcomes = ranks(world, |communicator| {
                let pair = vec![weight(&[0.0, 0.0]), weight(&[0.0])];
                let config = sizes.with_max_grad_norm(6.5);
                let mut pair = config.init(pair, communicator)?;
                // Means (3, 4) and 12: norm 13.
                let loss = slope(&pair[0], &[3.0, 4.0]) + slope(&pair[1], &[12.0]);
                let mean = pair.backward(loss, 2)?;
                let of = |at: usize| values(mean.get::<1>(pair[at].id).unwrap());
                Ok((pair.last_step().grad_norm, of(0), of(1)))
            });
            // PyTorch's factor: 6.5 / (13 + 1e-6), in f32 where the gradients are.
            let factor = (6.5 / (13.0 + 1e-6)) as f32;
            let clipped = (
                Some(13.0),
                vec![3.0 * factor, 4.0 * factor],
                vec![12.0 * factor],
            );
            assert!(
                outcomes.iter().all(|outcome| *outcome == clipped),
                "{outcomes:?}"
            );
        }
    }
}

#[test]
fn a_norm_below_the_limit_changes_nothing() {
    let outcomes = ranks(2, |communicator| {
        let config = DdpConfig::new().with_max_grad_norm(5.5);
        let mut weight = config.init(weight(&[0.0, 0.0]), communicator)?;
        let mean = weight.backward(slope(&weight, &[3.0, 4.0]), 1)?;
        let mean = values(mean.get::<1>(weight.id).unwrap());
        Ok((weight.last_step().grad_norm, mean))
    });
    assert_eq!(
        outcomes,
        [(Some(5.0), vec![3.0, 4.0]), (Some(5.0), vec![3.0, 4.0])]
    );
}

#[test]
fn all_ranks_leave_out_the_step_that_is_no_number_and_name_the_rank() {
    for bad in [f32::NAN, f32::INFINITY] {
        let ends = ranks(3, |communicator| {
            let rank = communicator.rank();
            let mut optimizer = AdamConfig::new().init();
            let mut weight = DdpConfig::new().init(weight(&[1.0, 1.0]), communicator)?;
            let mut skipped = Vec::new();
            for step in 0..4 {
                let gradient = if (step, rank) == (1, 2) { bad } else { 1.0 };
                let mean = weight.backward(slope(&weight, &[gradient, 1.0]), 1)?;
                let record = weight.last_step();
                skipped.push((record.skipped, record.non_finite.clone()));
                weight.step(0.1, &mut optimizer, mean)?;
            }
            let (fine, named) = ((false, vec![]), (true, vec![2]));
            assert_eq!(skipped, [fine.clone(), named, fine.clone(), fine]);
            Ok(values(weight.val()))
        });
        // As if the step had not been: three steps of Adam on a gradient of 1.
        let plain = {
            let (mut optimizer, mut weight) = (AdamConfig::new().init(), weight(&[1.0, 1.0]));
            for _ in 0..3 {
                let gradients = slope(&weight, &[1.0, 1.0]).backward();
                let gradients = burn::optim::GradientsParams::from_grads(gradients, &weight);
                weight = optimizer.step(0.1, weight, gradients);
            }
            values(weight.val())
        };
        assert_eq!(ends, [plain.clone(), plain.clone(), plain]);
    }
}

#[test]
fn a_sum_that_overflows_is_left_out_and_blames_nobody() {
    let records = ranks(2, |communicator| {
        let mut weight = DdpConfig::new().init(weight(&[0.0]), communicator)?;
        let mean = weight.backward(slope(&weight, &[2e38]), 1)?;
        assert!(mean.is_empty());
        let record = weight.last_step();
        Ok((record.skipped, record.non_finite.clone()))
    });
    assert_eq!(records, [(true, vec![]), (true, vec![])]);
}

#[test]
fn a_huge_gradient_whose_sum_is_a_number_is_no_reason_to_leave_a_step_out() {
    let means = ranks(2, |communicator| {
        let gradient = [1e38, 1.0][communicator.rank()];
        let mut weight = DdpConfig::new().init(weight(&[0.0]), communicator)?;
        let mean = weight.backward(slope(&weight, &[gradient]), 1)?;
        let record = weight.last_step();
        assert_eq!((record.skipped, &record.non_finite[..]), (false, &[][..]));
        Ok(values(mean.get::<1>(weight.id).unwrap()))
    });
    assert_eq!(means, [[5e37]; 2]);
}

#[test]
fn numbers_are_taken_as_they_are_if_asked_for() {
    let means = ranks(2, |communicator| {
        let gradient = [f32::INFINITY, 1.0][communicator.rank()];
        let config = DdpConfig::new().with_skip_non_finite(false);
        let mut weight = config.init(weight(&[0.0]), communicator)?;
        let mean = weight.backward(slope(&weight, &[gradient]), 1)?;
        assert_eq!(weight.last_step().non_finite, [0]);
        assert!(!weight.last_step().skipped);
        Ok(values(mean.get::<1>(weight.id).unwrap()))
    });
    assert_eq!(means, [[f32::INFINITY]; 2]);
}

#[test]
fn a_norm_is_left_alone_where_it_is_no_number() {
    let means = ranks(1, |communicator| {
        let config = DdpConfig::new().with_skip_non_finite(false);
        let mut weight = config
            .with_max_grad_norm(1.0)
            .init(weight(&[0.0, 0.0]), communicator)?;
        let mean = weight.backward(slope(&weight, &[f32::INFINITY, 2.0]), 1)?;
        Ok(values(mean.get::<1>(weight.id).unwrap()))
    });
    assert_eq!(means, [[f32::INFINITY, 2.0]]);
}

#[derive(Module, Debug)]
struct Normed {
    norm: BatchNorm,
    linear: Linear,
}

impl Normed {
    fn new() -> Self {
        Self {
            norm: BatchNormConfig::new(2).init(&device()),
            linear: Mlp::new(&[2, 1], DType::F32).layers.remove(0),
        }
    }

    fn loss(&self, rows: &[f32]) -> Tensor<1> {
        let input = vector(rows).reshape([rows.len() / 2, 2]);
        self.linear.forward(self.norm.forward(input)).mean()
    }

    fn running(&self) -> (Vec<f32>, Vec<f32>) {
        let (mean, var) = (&self.norm.running_mean, &self.norm.running_var);
        (values(mean.value_sync()), values(var.value_sync()))
    }
}

/// The running state of each rank after three steps on rows of its own.
fn running_states(config: DdpConfig) -> Vec<(Vec<f32>, Vec<f32>)> {
    ranks(2, |communicator| {
        let rank = communicator.rank() as f32;
        let mut optimizer = SgdConfig::new().init();
        let mut model = config.init(Normed::new(), communicator)?;
        for step in 0..3 {
            let loss = model.loss(&[rank, 1.0, 2.0 + rank, 5.0 * (rank + 1.0) + step as f32]);
            let gradients = model.backward(loss, 2)?;
            model.step(0.1, &mut optimizer, gradients)?;
        }
        Ok(model.running())
    })
}

#[test]
fn running_state_is_rank_0s_after_every_step_or_each_ranks_own() {
    let own = running_states(DdpConfig::new().with_broadcast_buffers(false));
    assert_ne!(own[0], own[1]);
    let sent = running_states(DdpConfig::new());
    assert_eq!(sent[0], sent[1]);
    // Rank 0's own rows, as if it were alone: it never took anything in.
    assert_eq!(sent[0], own[0]);
}

#[test]
fn buffers_are_sent_by_hand_too() {
    let states = ranks(2, |communicator| {
        let rank = communicator.rank() as f32;
        let config = DdpConfig::new().with_broadcast_buffers(false);
        let mut model = config.init(Normed::new(), communicator)?;
        model.backward(model.loss(&[rank, 1.0, 3.0, 4.0]), 2)?;
        model.sync_buffers()?;
        // What came is what the next forward pass starts from.
        let first = model.running();
        model.backward(model.loss(&[0.0, 1.0, 3.0, 4.0]), 2)?;
        Ok((first, model.running()))
    });
    assert_eq!(states[0], states[1]);
    assert_ne!(states[0].0, states[0].1);
}

#[test]
fn replicas_that_part_are_found_and_the_parameter_and_the_rank_named() {
    let errors = launch::spawn(
        3,
        &CommunicatorConfig::new(),
        |communicator| -> Result<Error> {
            let rank = communicator.rank();
            let mut optimizer = SgdConfig::new().init();
            let config = DdpConfig::new().with_check_replicas_every(2);
            let model = Mlp::new(&[2, 2, 2], DType::F32);
            let mut model = config.init(model, communicator)?;
            for step in 1.. {
                let gradients = model.backward(model.loss(&[0]), 1)?;
                if (rank, step) == (1, 2) {
                    model.update(|mut model: Mlp| {
                        let bias = model.layers[1].bias.take().unwrap();
                        model.layers[1].bias =
                            Some(bias.map(|bias| {
                                Tensor::from_inner(bias.inner() + 1e-3).require_grad()
                            }));
                        model
                    });
                }
                if let Err(error) = model.step(0.1, &mut optimizer, gradients) {
                    return Ok(error);
                }
                assert!(step < 5, "nobody noticed");
            }
            unreachable!()
        },
    );
    let differ = Error::ReplicasDiffer {
        step: 2,
        ranks: vec![1],
        parameter: "layers.1.bias".into(),
        of: 1,
    };
    assert_eq!(errors.unwrap(), [differ.clone(), differ.clone(), differ]);
}

#[test]
fn equal_replicas_pass_the_check() {
    ranks(3, |communicator| {
        let mut model = DdpConfig::new()
            .with_check_replicas_every(1)
            .init(Normed::new(), communicator)?;
        let mut optimizer = SgdConfig::new().init();
        for _ in 0..3 {
            let rank = model.place().rank as f32;
            let gradients = model.backward(model.loss(&[rank, 1.0, 2.0, 4.0]), 2)?;
            model.step(0.1, &mut optimizer, gradients)?;
        }
        model.check_replicas()
    });
}

#[test]
fn a_mean_weighs_every_rank_by_its_samples() {
    let means = ranks(3, |communicator| {
        let rank = communicator.rank();
        let mut weight = DdpConfig::new().init(weight(&[0.0]), communicator)?;
        // 1 of 1, 2 x (0 of 2), and nothing: NaN of no samples must not count.
        let parts = [
            vec![([1.0, 6.0], 1)],
            vec![([0.0, 3.0], 2); 2],
            vec![([f64::NAN; 2], 0)],
        ];
        weight.weighted_mean(parts[rank].clone())
    });
    assert_eq!(means, [[0.2, 3.6]; 3]);
}

#[test]
fn a_mean_of_nothing_is_an_error_on_every_rank() {
    let errors = launch::spawn(
        2,
        &CommunicatorConfig::new(),
        |communicator| -> Result<Error> {
            let mut weight = DdpConfig::new().init(weight(&[0.0]), communicator)?;
            Ok(weight.weighted_mean::<1>([]).unwrap_err())
        },
    );
    assert_eq!(errors.unwrap(), [Error::NoSamples, Error::NoSamples]);
}

#[test]
fn a_loss_that_panics_tells_the_others() {
    let errors = launch::spawn(
        2,
        &CommunicatorConfig::new(),
        |communicator| -> Result<Error> {
            let rank = communicator.rank();
            let mut weight = DdpConfig::new().init(weight(&[0.0]), communicator)?;
            let pass = |weight: &Weight, micro| {
                assert!((rank, micro) != (1, 1), "on purpose");
                (slope(weight, &[1.0]), 1)
            };
            Ok(weight.accumulate(0..2, pass).unwrap_err())
        },
    );
    let text = errors.unwrap_err().to_string();
    assert!(
        text.contains("rank 1") && text.contains("on purpose"),
        "{text}"
    );
}
