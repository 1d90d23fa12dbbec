//! Gathers go on while the loop does. By order and counters, never by time: a gate holds a gather back
//! until the ranks have come as far as they can without it, and one that stays shut is a failure.
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use burn::module::{Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear};
use burn::optim::{AdamConfig, SgdConfig};
use burn::tensor::{DType, Tensor, TensorData};
use collectives::transport::{Incoming, Local, Outgoing, Ticket, Transport, Trouble};
use collectives::{Board, Collective, Communicator, CommunicatorConfig, Place, launch};
use ddp::DdpConfig;
use zero::{Error, ShardedDataParallel, Stage, ZeroConfig};

use crate::parts::flex;
use crate::run::{agree, deterministic, seen};
use crate::support::{Mlp, caps, device, from_vec, values, vector, weights};

const WHOLE: [Stage; 2] = [Stage::One, Stage::Two];

/// Long enough for a loaded machine; reached only when nothing overlaps.
const PATIENT: Duration = Duration::from_secs(20);

/// Long enough to be sure that nothing more would come.
const BRIEF: Duration = Duration::from_millis(50);

/// Something that one thread waits for and another one brings about.
#[derive(Debug, Default)]
struct Gate {
    arrived: AtomicUsize,
    stayed_shut: AtomicBool,
}

impl Gate {
    fn arrive(&self) {
        self.arrived.fetch_add(1, Ordering::SeqCst);
    }

    fn is_open(&self, arrivals: usize) -> bool {
        self.arrived.load(Ordering::SeqCst) >= arrivals
    }

    /// Waits for so many arrivals. Whoever waited in vain goes on, for the test to end.
    fn wait(&self, arrivals: usize, patience: Duration) {
        let until = Instant::now() + patience;
        while !self.is_open(arrivals) {
            if self.stayed_shut.load(Ordering::SeqCst) || Instant::now() > until {
                self.stayed_shut.store(true, Ordering::SeqCst);
                return;
            }
            thread::yield_now();
        }
    }

    fn opened(&self) -> bool {
        !self.stayed_shut.load(Ordering::SeqCst)
    }
}

/// Whether rank 0's first step comes to its end before rank 1 begins its own.
fn ends_before_the_other_begins(stage: Stage, config: DdpConfig, patience: Duration) -> bool {
    let gate = Gate::default();
    launch::spawn(2, &deterministic(), |communicator| {
        let rank = communicator.rank();
        let config = ZeroConfig::new(stage).with_ddp(config);
        let model = Mlp::new(&[4, 8, 2], DType::F32);
        let mut model = config.init(model, AdamConfig::new().init(), communicator)?;
        model.backward(model.loss(&[0, 1]), 2)?;
        if rank == 1 {
            gate.wait(1, patience);
        }
        model.step(0.1)?;
        gate.arrive();
        // And what was under way arrives.
        model.backward(model.loss(&[0, 1]), 2)?;
        Ok::<_, Error>(())
    })
    .unwrap();
    gate.opened()
}

#[test]
fn a_step_ends_before_its_gathers_do() {
    for stage in WHOLE {
        let config = caps(0, 0);
        assert!(ends_before_the_other_begins(stage, config, PATIENT));
        let config = config.with_overlap(false);
        assert!(!ends_before_the_other_begins(stage, config, BRIEF));
    }
}

/// Holds back gathers of `len` elements until both ranks have arrived, once `armed`.
struct Held {
    inner: Local,
    len: usize,
    armed: Arc<AtomicBool>,
    gate: Arc<Gate>,
}

impl Transport for Held {
    fn place(&self) -> Place {
        self.inner.place()
    }

    fn board(&self) -> &Arc<Board> {
        self.inner.board()
    }

    fn exchange(
        &mut self,
        ticket: &Ticket,
        send: Option<Outgoing<'_>>,
        recv: Option<Incoming<'_>>,
    ) -> Result<(), Trouble> {
        let call = ticket.fingerprint.call;
        let meant = call.collective == Collective::AllGather && call.len == self.len;
        if meant && self.armed.load(Ordering::SeqCst) {
            self.gate.wait(2, PATIENT);
        }
        self.inner.exchange(ticket, send, recv)
    }

    fn split(&mut self, id: u64, members: &[usize]) -> Result<Box<dyn Transport>, Trouble> {
        self.inner.split(id, members)
    }

    fn close(&mut self) {
        self.inner.close();
    }
}

/// Its running state is sent with every step.
#[derive(Module, Debug)]
struct Normed {
    mlp: Mlp,
    norm: BatchNorm,
}

impl Normed {
    fn new() -> Self {
        Self {
            mlp: Mlp::new(&[8, 6, 5, 4], DType::F32),
            norm: BatchNormConfig::new(6).init(&device()),
        }
    }

    fn first(&self) -> Tensor<2> {
        let input = from_vec((0..24).map(f64::from).collect(), [3, 8], DType::F32);
        let hidden = self.norm.forward(self.mlp.layers[0].forward(input));
        self.mlp.layers[1].forward(hidden)
    }

    fn last(&self, hidden: Tensor<2>) -> Tensor<1> {
        let output = self.mlp.layers[2].forward(hidden);
        (output.clone() * output).mean()
    }
}

/// Two steps on two ranks and what came of them; `between` is called in the forward pass after the
/// first, when all but the last layer has been used.
fn two_steps(
    stage: Stage,
    config: DdpConfig,
    communicator: Communicator,
    armed: &AtomicBool,
    between: impl Fn(),
) -> zero::Result<Vec<TensorData>> {
    let config = ZeroConfig::new(stage).with_ddp(config);
    let mut model = config.init(Normed::new(), AdamConfig::new().init(), communicator)?;
    model.backward(model.last(model.first()), 3)?;
    armed.store(true, Ordering::SeqCst);
    model.step(0.1)?;
    let hidden = model.first();
    between();
    model.backward(model.last(hidden), 3)?;
    model.step(0.1)?;
    Ok(weights(&model.into_module()?))
}

#[test]
fn layers_are_used_while_the_last_ones_parameters_are_on_their_way() {
    for stage in WHOLE {
        let gate = Arc::new(Gate::default());
        // The last layer's weight has 20 elements, no other bucket has.
        let ends = thread::scope(|scope| {
            let rank = |inner| {
                let armed = Arc::new(AtomicBool::new(false));
                let (gate, here) = (gate.clone(), armed.clone());
                let held = Held {
                    inner,
                    len: 20,
                    armed,
                    gate: gate.clone(),
                };
                move || {
                    let communicator = Communicator::new(held, &deterministic())?;
                    let between = || {
                        assert!(!gate.is_open(2));
                        gate.arrive();
                    };
                    two_steps(stage, caps(0, 0), communicator, &here, between)
                }
            };
            let ranks: Vec<_> = Local::mesh(2)
                .into_iter()
                .map(|inner| scope.spawn(rank(inner)))
                .collect();
            let end = |rank: thread::ScopedJoinHandle<'_, zero::Result<_>>| rank.join().unwrap();
            ranks.into_iter().map(end).collect::<Vec<_>>()
        });
        assert!(gate.opened(), "{stage:?}: the gate stayed shut");
        // To the bit what comes of it when every step waits.
        let waiting = agree(2, |communicator| {
            let config = caps(0, 0).with_overlap(false);
            two_steps(stage, config, communicator, &AtomicBool::new(false), || ())
        });
        for end in ends {
            assert_eq!(end.unwrap(), waiting, "{stage:?}");
        }
    }
}

/// A model after a step whose gathers are under way.
fn stepped(stage: Stage, communicator: Communicator) -> zero::Result<ShardedDataParallel<Mlp>> {
    let config = ZeroConfig::new(stage).with_ddp(caps(0, 0));
    let model = Mlp::new(&[4, 8, 2], DType::F32);
    let mut model = config.init(model, SgdConfig::new().init(), communicator)?;
    model.backward(model.loss(&[0, 1]), 2)?;
    model.step(0.1)?;
    Ok(model)
}

#[test]
fn whoever_reads_a_parameter_waits_for_it() {
    for stage in WHOLE {
        // By the parameter itself, by a forward pass, without autodiff, from a clone, as a record, and
        // as the plain module: every time it is the first to look.
        type Look = fn(ShardedDataParallel<Mlp>) -> zero::Result<Vec<TensorData>>;
        let looks: [Look; 6] = [
            |model| Ok(weights(model.module())),
            |model| Ok(seen(model.module())),
            |model| Ok(weights(&model.module().valid())),
            |model| {
                let clone = model.module().clone();
                model.into_module()?;
                Ok(weights(&clone))
            },
            |model| {
                let record = model.module().clone().into_record();
                Ok(weights(
                    &Mlp::new(&[4, 8, 2], DType::F32).load_record(record),
                ))
            },
            |model| Ok(weights(&model.into_module()?)),
        ];
        let ends = looks.map(|look| agree(2, |communicator| look(stepped(stage, communicator)?)));
        for end in &ends {
            assert_eq!(end, &ends[0], "{stage:?}");
        }
        assert_ne!(ends[0], weights(&Mlp::new(&[4, 8, 2], DType::F32)));
        agree(2, |communicator| {
            let mut model = stepped(stage, communicator)?;
            model.check_replicas()?;
            let report = stepped_report(&model)?;
            assert_eq!(report, 4 * 58);
            Ok(())
        });
    }
}

fn stepped_report(model: &ShardedDataParallel<Mlp>) -> zero::Result<usize> {
    Ok(model.memory_report()?.measured.parameters)
}

/// What rank 0 makes of its model when rank 1 has gone without its step.
fn left_alone<R: Send>(
    stage: Stage,
    then: impl Fn(ShardedDataParallel<Mlp>) -> R + Sync,
) -> Option<R> {
    let ended = Gate::default();
    let mut results = launch::spawn(2, &CommunicatorConfig::new(), |communicator| {
        let rank = communicator.rank();
        let config = ZeroConfig::new(stage).with_ddp(caps(0, 0));
        let model = Mlp::new(&[4, 8, 2], DType::F32);
        let mut model = config.init(model, SgdConfig::new().init(), communicator)?;
        model.backward(model.loss(&[0, 1]), 2)?;
        if rank == 1 {
            ended.wait(1, PATIENT);
            return Ok(None);
        }
        // Nothing has failed yet.
        model.step(0.1)?;
        ended.arrive();
        Ok::<_, Error>(Some(then(model)))
    })
    .unwrap();
    assert!(ended.opened());
    results.swap_remove(0)
}

#[test]
fn a_gather_that_fails_after_its_step_is_told_by_every_later_call() {
    for stage in WHOLE {
        let error = left_alone(stage, |mut model| {
            // A forward pass cannot say so, and comes to its end.
            let loss = model.loss(&[0, 1]);
            let error = model.backward(loss, 2).unwrap_err();
            assert_eq!(model.step(0.1), Err(error.clone()));
            assert_eq!(model.check_replicas(), Err(error.clone()));
            assert_eq!(model.save("never written"), Err(error.clone()));
            assert_eq!(model.stats().unwrap_err(), error);
            assert_eq!(model.into_module().err(), Some(error.clone()));
            error
        });
        let error = error.unwrap();
        assert_eq!(error.ranks(), [1], "{error}");
        assert!(error.to_string().contains("all_gather"), "{error}");
    }
}

#[test]
fn a_module_whose_parameters_did_not_arrive_is_not_given_away() {
    for stage in WHOLE {
        let error = left_alone(stage, |model| model.into_module().unwrap_err());
        assert_eq!(error.unwrap().ranks(), [1], "{stage:?}");
        let error = left_alone(stage, |mut model| {
            drop(seen(model.module()));
            model.update(|module| module).unwrap_err()
        });
        assert_eq!(error.unwrap().ranks(), [1], "{stage:?}");
    }
}

#[test]
fn what_a_parameter_does_when_it_is_saved_it_still_does_after_a_step() {
    for stage in WHOLE {
        let saved = agree(2, |communicator| {
            let weight = Param::from_tensor(vector(&[1.0, 2.0, 3.0]));
            let weight = weight.save_mapper(|tensor| tensor * 10.0);
            let config = ZeroConfig::new(stage);
            let mut model = config.init(weight, SgdConfig::new().init(), communicator)?;
            for _ in 0..2 {
                model.backward(model.module().val().sum(), 1)?;
                model.step(0.5)?;
            }
            let saved = model.module().transform_for_save();
            Ok(values(saved.val()))
        });
        assert_eq!(saved, [0.0, 10.0, 20.0]);
    }
}

#[test]
fn micro_batches_after_a_step_have_the_gradients_of_what_arrived() {
    for stage in WHOLE {
        let ends = [true, false].map(|overlap| {
            agree(2, |communicator| {
                let config = ZeroConfig::new(stage).with_ddp(caps(0, 0).with_overlap(overlap));
                let model = Mlp::new(&[4, 8, 2], DType::F32);
                let mut model = config.init(model, SgdConfig::new().init(), communicator)?;
                for _ in 0..3 {
                    model.accumulate([[0, 1], [2, 3]], |model, rows| (model.loss(&rows), 2))?;
                    assert_eq!(model.last_step().unused, [""; 0]);
                    model.step(0.1)?;
                }
                Ok(weights(&model.into_module()?))
            })
        });
        assert_eq!(ends[0], ends[1]);
    }
}

#[test]
fn a_layer_that_only_a_later_micro_batch_uses_is_reduced_while_its_backward_pass_runs() {
    for stage in WHOLE {
        agree(2, |communicator| {
            let config = ZeroConfig::new(stage).with_ddp(caps(0, 0));
            let model = Mlp::new(&[4; 3], DType::F32);
            let mut model = config.init(model, SgdConfig::new().init(), communicator)?;
            model.backward(model.loss(&[0, 1]), 2)?;
            model.step(0.1)?;
            let input = || from_vec(vec![0.5; 8], [2, 4], DType::F32);
            model.accumulate([false, true], |model, both| {
                let hidden = model.layers[0].forward(input());
                let output = match both {
                    false => hidden,
                    true => model.layers[1].forward(hidden),
                };
                (output.mean(), 2)
            })?;
            let step = model.last_step();
            assert_eq!(step.buckets.len(), 4);
            let in_time = |bucket: &ddp::BucketRecord| bucket.ready <= step.backward;
            assert!(step.buckets.iter().all(in_time), "{step:?}");
            Ok(())
        });
    }
}

#[test]
fn buckets_come_into_the_memory_of_those_of_the_step_before() {
    for stage in WHOLE {
        agree(2, |communicator| {
            let mut model = stepped(stage, communicator)?;
            let memory = |model: &ShardedDataParallel<Mlp>| {
                let weight = flex(model.layers[0].weight.base().inner());
                weight.as_slice::<f32>().unwrap().as_ptr()
            };
            let first = memory(&model);
            model.backward(model.loss(&[0, 1]), 2)?;
            model.step(0.1)?;
            assert_eq!(memory(&model), first, "{stage:?}");
            Ok(())
        });
    }
}

const LAYERS: usize = 4;

/// Bytes of a layer, which is a bucket.
const LAYER: usize = 4 * (8 * 8 + 8);

fn gathers(model: &ShardedDataParallel<Mlp>) -> zero::Result<u64> {
    Ok(model.stats()?.of(Collective::AllGather).calls)
}

/// At stage 3, the gathers begun when each layer has been used, of a second pass; those of its backward
/// pass; and the most bytes of buckets at a time.
fn begun(overlap: bool) -> (Vec<u64>, u64, usize) {
    let counts = Mutex::new(Vec::new());
    let (backward, most) = agree(2, |communicator| {
        let rank = communicator.rank();
        let config = caps(LAYER, LAYER).with_overlap(overlap);
        let config = ZeroConfig::new(Stage::Three).with_ddp(config);
        let model = Mlp::new(&[8; LAYERS + 1], DType::F32);
        let mut model = config.init(model, SgdConfig::new().init(), communicator)?;
        assert_eq!(model.plan().len(), LAYERS);
        let mut backward = 0;
        for step in 0..3 {
            let before = gathers(&model)?;
            let mut value = from_vec(vec![0.5; 16], [2, 8], DType::F32);
            for layer in &model.layers {
                value = layer.forward(value);
                let begun = gathers(&model)? - before;
                if step == 1 && rank == 0 {
                    counts.lock().unwrap().push(begun);
                }
            }
            let before = gathers(&model)?;
            model.backward(value.mean(), 2)?;
            backward = gathers(&model)? - before;
            model.step(0.1)?;
        }
        assert_eq!(model.memory_report()?.gathered, model.most_gathered());
        Ok((backward, model.most_gathered()))
    });
    (counts.into_inner().unwrap(), backward, most)
}

#[test]
fn at_stage_3_one_bucket_comes_while_another_is_used_and_none_comes_in_vain() {
    let (forward, backward, most) = begun(true);
    assert_eq!(forward, [2, 3, 4, 4]);
    // The first layer's bucket is not needed, and whether parts are numbers is one more.
    assert_eq!(backward, LAYERS as u64 - 1 + 1);
    assert_eq!(most, 2 * LAYER);
    let (forward, backward, most) = begun(false);
    assert_eq!(forward, [1, 2, 3, 4]);
    assert_eq!(backward, LAYERS as u64 - 1 + 1);
    assert_eq!(most, LAYER);
}

#[test]
fn at_stage_3_passes_that_go_another_way_have_their_own_values() {
    /// Two ways through layers of one size, whose buckets are of one length.
    fn loss(layers: &[Linear], way: &[usize]) -> Tensor<1> {
        let mut value = from_vec(vec![0.5, -0.25, 1.0, 0.75], [1, 4], DType::F32);
        for &layer in way {
            value = layers[layer].forward(value);
        }
        (value.clone() * value).mean()
    }
    let ways: [&[usize]; 8] = [
        &[0, 1, 2, 3],
        &[0, 1, 2, 3],
        &[0, 2, 3],
        &[3, 1, 0],
        &[1, 1, 2, 0, 1],
        &[1, 1, 2, 0, 1],
        &[2],
        &[0, 1, 2, 3],
    ];
    let run = |stage, overlap| {
        agree(2, |communicator| {
            let config = caps(0, 0).with_overlap(overlap);
            let config = ZeroConfig::new(stage).with_ddp(config);
            let model = Mlp::new(&[4; 5], DType::F32);
            let mut model = config.init(model, AdamConfig::new().init(), communicator)?;
            let mut losses = Vec::new();
            for way in ways {
                // Validation between the steps, half of it by another way.
                for way in [&[0, 1, 2, 3][..], &[0, 3], way] {
                    losses.push(loss(&model.module().valid().layers, way).into_data());
                }
                losses.push(loss(&model.layers, way).into_data());
                model.backward(loss(&model.layers, way), 1)?;
                model.step(0.01)?;
            }
            Ok((losses, weights(&model.into_module()?)))
        })
    };
    let whole = run(Stage::Two, false);
    for overlap in [true, false] {
        assert_eq!(run(Stage::Three, overlap), whole);
    }
}

#[test]
fn ranks_whose_gathers_would_be_in_another_order_learn_of_it_at_the_start() {
    let errors = |stage, other: DdpConfig| {
        let made = launch::spawn(2, &CommunicatorConfig::new(), |communicator| {
            let config = [DdpConfig::new(), other][communicator.rank()];
            let config = ZeroConfig::new(stage).with_ddp(config);
            let model = Mlp::new(&[4, 8, 2], DType::F32);
            let optimizer = SgdConfig::new().init();
            Ok::<_, Error>(config.init(model, optimizer, communicator).err())
        });
        made.unwrap()
    };
    let waiting = DdpConfig::new().with_overlap(false);
    for other in [waiting, DdpConfig::new().with_comm_thread(false)] {
        for error in errors(Stage::Three, other) {
            let error = error.unwrap();
            assert_eq!(error.ranks(), [1]);
            assert!(
                error.to_string().contains("overlap, comm_thread"),
                "{error}"
            );
        }
        // Elsewhere that is a rank's own affair.
        assert_eq!(errors(Stage::Two, other), [None, None]);
    }
}
