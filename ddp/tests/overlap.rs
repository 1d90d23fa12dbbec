//! Buckets are reduced while the backward pass runs, and there are as many as the plan says.
//!
//! The proof does not depend on speed. Gates are operations in the model whose backward step
//! waits, with a deadline, until the buckets of the layers behind them have been reduced on all
//! ranks: they can only open if the reduction runs within the backward pass.
#![cfg_attr(
    feature = "ndarray",
    allow(deprecated, reason = "Burn 0.22 is the last with that backend")
)]
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::module::Module;
use burn::optim::SgdConfig;
use burn::tensor::{DType, Device, Tensor};
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use collectives::{Algorithm, Collective, CommunicatorConfig, launch};
use ddp::{DdpConfig, Error, Progress};

use crate::support::{Mlp, caps, config, device, from_vec, ranks};

/// Waits in the backward pass until every rank has reduced `buckets`.
#[derive(Clone, Debug)]
struct Gate {
    buckets: usize,
    progress: Arc<Vec<Progress>>,
    deadline: Duration,
    opened: Arc<AtomicUsize>,
    /// Whether a gate stayed shut; the others need not wait then.
    shut: Arc<AtomicBool>,
}

impl Gate {
    fn wait(&self) {
        let until = Instant::now() + self.deadline;
        let reduced = |progress: &Progress| progress.reduced() >= self.buckets;
        while !self.progress.iter().all(reduced) {
            if self.shut.load(Ordering::SeqCst) || Instant::now() > until {
                self.shut.store(true, Ordering::SeqCst);
                return;
            }
            thread::yield_now();
        }
        self.opened.fetch_add(1, Ordering::SeqCst);
    }

    fn put(self, tensor: Tensor<2>) -> Tensor<2> {
        Tensor::from_dispatch(<Dispatch as GateBackend>::gate(
            tensor.into_dispatch(),
            self,
        ))
    }
}

#[backend_extension(Flex, NdArray: cfg(feature = "ndarray"), Autodiff)]
trait GateBackend: Backend {
    fn gate(tensor: FloatTensor<Self>, gate: Gate) -> FloatTensor<Self>;
}

impl GateBackend for Flex {
    fn gate(tensor: FloatTensor<Self>, _: Gate) -> FloatTensor<Self> {
        tensor
    }
}

#[cfg(feature = "ndarray")]
impl GateBackend for burn::backend::NdArray {
    fn gate(tensor: FloatTensor<Self>, _: Gate) -> FloatTensor<Self> {
        tensor
    }
}

impl<B: Backend, C: CheckpointStrategy> GateBackend for Autodiff<B, C> {
    fn gate(tensor: FloatTensor<Self>, gate: Gate) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Wait;
        impl<B: Backend> Backward<B, 1> for Wait {
            type State = Gate;
            fn backward(self, ops: Ops<Gate, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
                ops.state.wait();
                let gradient = gradients.consume::<B>(&ops.node);
                let [parent] = ops.parents;
                gradients.register::<B>(parent.unwrap().id, gradient);
            }
        }
        let (primitive, node) = tensor.into_parts();
        match Backward::<B, 1>::prepare::<C>(Wait, [node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(operation) => operation.finish(gate, primitive),
            OpsKind::UnTracked(operation) => operation.finish(primitive),
        }
    }
}

const LAYERS: usize = 4;
const STEPS: usize = 3;

/// How many gates open on each rank if all do.
pub(crate) const GATES: usize = STEPS * (LAYERS - 1);

/// How many gates open on each rank, of [`GATES`], in a model on `device` with one bucket per
/// layer and a gate between every two layers.
pub(crate) fn gates_opened(
    world: usize,
    config: DdpConfig,
    deadline: Duration,
    device: &Device,
) -> Vec<usize> {
    let layer = 4 * (8 * 8 + 8);
    let caps = caps(layer, layer);
    let config = DdpConfig {
        overlap: config.overlap,
        rung_stride: config.rung_stride,
        ..caps
    };
    let everyone = Mutex::new(Vec::new());
    let meet = Barrier::new(world);
    ranks(world, |communicator| {
        let model = Mlp::new(&[8; LAYERS + 1], DType::F32).fork(device);
        let mut model = config.init(model, communicator)?;
        assert_eq!(model.plan().len(), LAYERS);
        everyone.lock().unwrap().push(model.progress());
        meet.wait();
        let progress = Arc::new(everyone.lock().unwrap().clone());
        let opened = Arc::new(AtomicUsize::new(0));
        let shut = Arc::new(AtomicBool::new(false));
        let mut optimizer = SgdConfig::new().init();
        for step in 0..STEPS {
            let mut value = from_vec(vec![0.5; 16], [2, 8], DType::F32).to_device(device);
            for (at, layer) in model.layers.iter().enumerate() {
                value = layer.forward(value);
                if at + 1 < LAYERS {
                    let (progress, opened, shut) = (progress.clone(), opened.clone(), shut.clone());
                    let buckets = step * LAYERS + (LAYERS - 1 - at);
                    value = Gate {
                        buckets,
                        progress,
                        deadline,
                        opened,
                        shut,
                    }
                    .put(value);
                }
            }
            let gradients = model.backward(value.mean(), 2)?;
            model.step(0.1, &mut optimizer, gradients).unwrap();
        }
        Ok(opened.load(Ordering::SeqCst))
    })
}

/// Long enough for a loaded machine; reached only when the overlap is gone.
pub(crate) const PATIENT: Duration = Duration::from_secs(20);

/// Long enough to be sure that nothing more would come.
const BRIEF: Duration = Duration::from_millis(50);

#[test]
fn every_bucket_but_the_last_is_reduced_on_all_ranks_while_backward_runs() {
    for world in [1, 2, 4] {
        assert_eq!(
            gates_opened(world, DdpConfig::new(), PATIENT, &device()),
            vec![GATES; world]
        );
    }
}

#[test]
fn without_rungs_no_bucket_is_reduced_while_backward_runs() {
    assert_eq!(
        gates_opened(2, DdpConfig::new().with_rung_stride(0), BRIEF, &device()),
        [0, 0]
    );
}

#[test]
fn without_overlap_no_bucket_is_reduced_while_backward_runs() {
    assert_eq!(
        gates_opened(2, DdpConfig::new().with_overlap(false), BRIEF, &device()),
        [0, 0]
    );
}

#[test]
fn each_bucket_is_one_all_reduce_of_the_planned_bytes() {
    let sizes = [10, 20, 30, 5];
    let (world, steps) = (3, 4);
    for (config, buckets) in [(caps(0, 0), 6), (caps(100, 2000), 4), (DdpConfig::new(), 1)] {
        let ring = CommunicatorConfig::new().with_algorithm(Algorithm::Ring);
        let sent = launch::spawn(world, &ring, |communicator| {
            let mut model = config.init(Mlp::new(&sizes, DType::F32), communicator)?;
            let row = |stats: collectives::Stats| stats.of(Collective::AllReduce);
            let before = row(model.stats()?);
            assert_eq!(before.calls, 0);
            let mut elements = 0;
            for _ in 0..steps {
                elements += model.plan().buckets().iter().sum::<usize>();
                model.backward(model.loss(&[1, 2]), 2)?;
                let record = model.last_step();
                assert_eq!(record.buckets.len(), buckets);
                assert_eq!(
                    record
                        .buckets
                        .iter()
                        .map(|bucket| bucket.slots)
                        .sum::<usize>(),
                    6
                );
            }
            let after = row(model.stats()?);
            assert_eq!(after.calls, (steps * buckets) as u64);
            assert_eq!(after.elements, elements as u64);
            assert_eq!(after.bytes_sent, after.predicted_sent);
            // 1005 gradients, 5 totals, 6 counts of use, 1 of what is no number.
            assert_eq!(elements, steps * (1005 + 5 + 6 + 1));
            Ok::<_, Error>(after.bytes_sent)
        })
        .unwrap();
        // A ring moves 2 (N - 1) times the buffer, over all ranks.
        assert_eq!(
            sent.iter().sum::<u64>(),
            (2 * (world - 1) * steps * 1017 * 4) as u64
        );
    }
}

#[test]
fn buckets_are_laid_out_anew_in_rank_0s_arrival_order_on_every_rank() {
    /// Runs its layers in another order than it lists them.
    #[derive(Module, Debug)]
    struct Crossed {
        mlp: Mlp,
    }
    let plans = ranks(3, |communicator| {
        let rank = communicator.rank();
        let crossed = Crossed {
            mlp: Mlp::new(&[4, 4, 4], DType::F32),
        };
        let mut model = caps(0, 0).init(crossed, communicator)?;
        let guessed = model.plan().clone();
        for _ in 0..2 {
            let input = from_vec(vec![1.0; 4], [1, 4], DType::F32);
            let [first, second] = if rank == 2 { [0, 1] } else { [1, 0] };
            let hidden = model.mlp.layers[first].forward(input);
            let loss = model.mlp.layers[second].forward(hidden).mean();
            model.backward(loss, 1)?;
        }
        Ok((guessed, model.plan().clone()))
    });
    let order = |plan: &ddp::BucketPlan| -> Vec<usize> {
        (0..plan.len())
            .map(|bucket| plan.slots_in(bucket)[0])
            .collect()
    };
    for (guessed, measured) in &plans {
        assert_eq!(order(guessed), [3, 2, 1, 0]);
        // Rank 0 used layer 1 first, so its gradients come last.
        let mut first_two = order(measured)[..2].to_vec();
        first_two.sort_unstable();
        assert_eq!(first_two, [0, 1]);
        assert_eq!(*measured, plans[0].1);
    }
}

#[test]
fn a_step_records_when_each_bucket_was_ready_started_and_done() {
    launch::spawn(2, &config(), |communicator| {
        let mut model = caps(0, 0).init(Mlp::new(&[8, 8, 8], DType::F32), communicator)?;
        for _ in 0..2 {
            model.backward(model.loss(&[0, 1]), 2)?;
            let step = model.last_step();
            for bucket in &step.buckets {
                assert!(bucket.ready <= bucket.start && bucket.start <= bucket.end);
                assert!(bucket.end <= step.backward + step.exposed);
            }
            let hidden = step.hidden();
            assert!((0.0..=1.0).contains(&hidden));
        }
        Ok::<_, Error>(())
    })
    .unwrap();
}
