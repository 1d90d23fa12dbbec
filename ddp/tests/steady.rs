//! What training takes it gives back, and takes no more than it must (trials BR-20, BR-23, BR-24).
use std::sync::Barrier;
use std::{env, fs};

use burn::module::{Module, Param};
use burn::optim::{AdamConfig, SgdConfig};
use burn::tensor::{DType, Tensor};
use collectives::Collective;
use ddp::{DdpConfig, DistributedSampler};

use crate::support::{Mlp, alone, caps, from_vec, ranks, values};

/// A number from a file of Linux; where there is none, the test has nothing to hold on to.
fn resident() -> Option<usize> {
    let pages = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: usize = pages.split(' ').nth(1)?.parse().ok()?;
    Some(pages * 4096)
}

fn threads() -> Option<usize> {
    Some(fs::read_dir("/proc/self/task").ok()?.count())
}

#[test]
fn memory_is_flat_from_step_to_step() {
    alone("steady::memory_is_flat_from_step_to_step", || {
        let steps = if env::var_os("LOCKSTEP_SOAK").is_some() {
            2000
        } else {
            400
        };
        let grown = ranks(2, |communicator| {
            // 104 KB of gradients in 5 buckets: one kept per step would show as 20 MB.
            let model = Mlp::new(&[64, 128, 128, 10], DType::F32);
            let mut model = caps(1 << 10, 32 << 10).init(model, communicator)?;
            let mut optimizer = AdamConfig::new().init();
            let mut sampler = DistributedSampler::new(64, 16, model.place())?.with_shuffle(1);
            let mut start = None;
            let mut batches = std::iter::repeat_with(|| sampler.epoch()).flatten();
            for step in 0..steps {
                if step == steps / 2 {
                    start = resident();
                }
                let batch = batches.next().expect("epochs without end");
                let gradients = model.backward(model.loss(&batch.rows), batch.samples)?;
                model.step(1e-3, &mut optimizer, gradients)?;
            }
            Ok(start
                .zip(resident())
                .map(|(start, end)| end.saturating_sub(start)))
        });
        match grown[0] {
            Some(grown) => assert!(grown < 5 << 20, "{grown} bytes in {} steps", steps / 2),
            None => println!("skipped: no /proc/self/statm to read memory from"),
        }
    });
}

#[test]
fn a_rank_is_two_threads_its_own_and_its_streams() {
    alone(
        "steady::a_rank_is_two_threads_its_own_and_its_streams",
        || {
            let Some(before) = threads() else {
                println!("skipped: no /proc/self/task to count threads in");
                return;
            };
            for world in [1, 2, 4, 8] {
                let meet = Barrier::new(world);
                let counted = ranks(world, |communicator| {
                    let model = Mlp::new(&[32, 256, 256, 10], DType::F32);
                    let mut model = caps(1 << 10, 32 << 10).init(model, communicator)?;
                    let rows: Vec<usize> = (0..64).collect();
                    let mut most = 0;
                    for _ in 0..3 {
                        model.backward(model.loss(&rows), rows.len())?;
                        meet.wait();
                        // Matrices are large enough for Burn to have started threads by now.
                        most = most.max(threads().unwrap_or_default());
                        meet.wait();
                    }
                    Ok(most)
                });
                // Rank 0 may run on the thread that spawned the others.
                let most = counted.into_iter().max().unwrap_or_default();
                assert!(most <= before + 2 * world, "{world} ranks: {most} threads");
            }
        },
    );
}

/// 1,000 parameters of 16 elements.
#[derive(Module, Debug)]
struct Many {
    small: Vec<Param<Tensor<1>>>,
}

impl Many {
    fn new(dtype: impl Fn(usize) -> DType) -> Self {
        let param = |at| {
            let dtype = dtype(at);
            Param::from_tensor(from_vec(vec![1.0; 16], [16], dtype))
        };
        Self {
            small: (0..1000).map(param).collect(),
        }
    }

    fn loss(&self, factor: f32) -> Tensor<1> {
        let sums = self
            .small
            .iter()
            .map(|param| param.val().sum().cast(DType::F32));
        Tensor::cat(sums.collect(), 0).sum().mul_scalar(factor)
    }
}

#[test]
fn a_thousand_small_parameters_are_one_all_reduce_a_step() {
    ranks(4, |communicator| {
        let factor = communicator.rank() as f32;
        let mut model = DdpConfig::new().init(Many::new(|_| DType::F32), communicator)?;
        let mut optimizer = SgdConfig::new().init();
        for step in 1..=3 {
            // The first step also agrees on the order, by other calls.
            let gradients = model.backward(model.loss(factor), 1)?;
            let row = model.stats()?.of(Collective::AllReduce);
            assert_eq!(row.calls, step);
            assert_eq!(row.elements, step * (16_000 + 5 + 1000 + 1));
            for param in &model.small {
                let gradient = gradients.get::<1>(param.id).expect("every one was used");
                assert_eq!(values(gradient), [1.5; 16]);
            }
            model.step(0.5, &mut optimizer, gradients)?;
        }
        Ok(())
    });
}
