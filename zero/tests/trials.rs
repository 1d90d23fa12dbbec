//! Faults of other systems, tried here; docs/trials.md has where they were reported.
use std::time::Duration;
use std::{env, fs};

use burn::module::{Module, Param, ParamGroup};
use burn::optim::{AdamConfig, AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Tensor};
use burn_pack::Reader;
use collectives::transport::{Faults, Faulty, Local};
use collectives::{Communicator, CommunicatorConfig, launch};
use ddp::{DdpConfig, DistributedSampler};
use safetensors::SafeTensors;
use zero::{Error, Result, ShardedDataParallel, Stage, ZeroConfig};

use crate::checkpoint::Place;
use crate::run::{agree, deterministic};
use crate::support::{Mlp, alone, caps, from_vec, noise, values, vector, weights};

/// Parameters of the lengths that the test says.
#[derive(Module, Debug)]
struct Several {
    parts: Vec<Param<Tensor<1>>>,
}

impl Several {
    fn new(lens: &[usize]) -> Self {
        let param = |(salt, &len): (usize, &usize)| {
            let numbers = (0..len).map(|at| noise(salt, at)).collect();
            Param::from_tensor(from_vec(numbers, [len], DType::F32))
        };
        Self {
            parts: lens.iter().enumerate().map(param).collect(),
        }
    }

    /// Another gradient at every step and place.
    fn loss(&self, step: usize) -> Tensor<1> {
        let terms = self.parts.iter().enumerate().map(|(salt, part)| {
            let len = part.dims()[0];
            let slopes = (0..len).map(|at| noise(50 * salt + step, at)).collect();
            let value = part.val();
            let slopes = from_vec(slopes, [len], DType::F32);
            (value.clone() * value.clone() + value * slopes).sum()
        });
        terms.reduce(|left, right| left + right).unwrap()
    }
}

fn adamw() -> ModuleOptimizer {
    AdamWConfig::new().with_weight_decay(0.1).init()
}

/// BR-06: five steps of AdamW are those of a plain loop, and all ranks come along, whatever they own.
fn less_to_share_than_ranks(lens: &[usize], worlds: &[usize], optimizer: fn() -> ModuleOptimizer) {
    let (mut plain, mut own) = (Several::new(lens), optimizer());
    for step in 0..5 {
        let gradients = GradientsParams::from_grads(plain.loss(step).backward(), &plain);
        plain = own.step(0.1, plain, gradients);
    }
    for stage in Stage::ALL {
        for &world in worlds {
            for config in [caps(0, 0), caps(1 << 20, 1 << 20)] {
                // The same on as many ranks as a power of two: sums and means are exact.
                let (end, _) = agree(world, |communicator| {
                    let zero = ZeroConfig::new(stage).with_ddp(config);
                    let mut model = zero.init(Several::new(lens), optimizer(), communicator)?;
                    for step in 0..5 {
                        model.backward(model.loss(step), 1)?;
                        model.step(0.1)?;
                    }
                    // State is of this rank's pieces alone, none if it owns nothing.
                    let record = model.optimizer().into_bytes().unwrap();
                    let record = Reader::from_bytes(record).unwrap();
                    for (name, &number) in record.scalars() {
                        if name.ends_with("time") {
                            assert_eq!(usize::try_from(number).unwrap(), 5, "{name}");
                        }
                    }
                    let calls = model.stats()?.total().calls;
                    Ok((weights(&model.into_module()?), calls))
                });
                assert_eq!(end, weights(&plain), "{lens:?}, {stage:?}, {world} ranks");
            }
        }
    }
}

#[test]
fn a_parameter_with_fewer_elements_than_ranks_trains_as_in_one_process() {
    less_to_share_than_ranks(&[3], &[1, 2, 4, 8], adamw);
    less_to_share_than_ranks(&[1], &[1, 2, 4, 8], adamw);
}

#[test]
fn a_parameter_without_an_element_in_the_middle_or_at_the_end_trains_as_in_one_process() {
    less_to_share_than_ranks(&[8, 0, 24], &[2, 4], adamw);
    less_to_share_than_ranks(&[8, 24, 0], &[2, 4], adamw);
    less_to_share_than_ranks(&[0], &[2], adamw);
}

#[test]
fn a_group_with_less_to_share_than_ranks_trains_as_in_one_process() {
    less_to_share_than_ranks(&[40, 1, 24], &[2, 4], || {
        let tiny = ParamGroup::from_path("parts.1");
        let other = AdamConfig::new().with_beta_1(0.5).build();
        adamw().with_group(tiny, other, None)
    });
}

fn model(communicator: Communicator) -> Result<ShardedDataParallel<Mlp>> {
    let zero = ZeroConfig::new(Stage::Two).with_ddp(caps(20, 60));
    let model = Mlp::new(&[4, 5, 3], DType::F32);
    zero.init(model, AdamConfig::new().init(), communicator)
}

fn step(model: &mut ShardedDataParallel<Mlp>) -> Result<()> {
    model.backward(model.loss(&[0, 1]), 2)?;
    model.step(0.1)
}

/// BR-18 (a).
#[test]
fn fifty_checkpoints_over_one_another_are_all_good_and_leave_nothing_beside() {
    let folder = Place::new("fifty");
    fs::create_dir(&folder.0).unwrap();
    let path = folder.0.join("last.safetensors");
    agree(8, |communicator| {
        let mut model = model(communicator)?;
        for _ in 0..50 {
            step(&mut model)?;
            model.save(&path)?;
            let bytes = fs::read(&path).unwrap();
            let file = SafeTensors::deserialize(&bytes).unwrap();
            assert_eq!(file.len(), 3 * 4);
            // Nobody writes the next one while another rank still looks.
            model.weighted_mean([([0.0], 1)])?;
        }
        Ok(())
    });
    let names: Vec<_> = fs::read_dir(&folder.0)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names, ["last.safetensors"]);
    fs::remove_dir_all(&folder.0).unwrap();
}

/// BR-18 (b): nobody waits, and the others are named.
#[test]
fn a_rank_that_saves_alone_is_told_who_did_not_come() {
    let place = Place::new("alone");
    // The others have left, or are in another call.
    for train in [false, true] {
        let errors = launch::spawn(3, &deterministic(), |communicator| {
            let mut model = model(communicator)?;
            step(&mut model)?;
            match (model.place().rank, train) {
                (0, _) => Ok::<_, Error>(model.save(&place.0).err()),
                (_, false) => Ok(None),
                (_, true) => Ok(step(&mut model).err()),
            }
        })
        .unwrap();
        let ranks = errors[0].as_ref().unwrap().ranks();
        assert!(ranks.iter().any(|&rank| rank > 0), "{errors:?}");
        if train {
            assert!(errors.iter().all(Option::is_some), "{errors:?}");
        }
        assert!(!place.0.exists());
    }
}

/// BR-18 (d).
#[test]
fn ranks_with_unlike_paths_are_refused_alike() {
    let (here, there) = (Place::new("here"), Place::new("there"));
    agree(3, |communicator| {
        let mut model = model(communicator)?;
        step(&mut model)?;
        model.save(&here.0)?;
        model.save(&there.0)?;
        let own = if model.place().rank == 2 {
            &there
        } else {
            &here
        };
        let before = fs::read(&here.0).unwrap();
        let names = |error: Error| {
            assert_eq!(error.ranks(), [2], "{error}");
            let said = error.to_string();
            assert!(said.contains("here") && said.contains("there"), "{said}");
        };
        names(model.save(&own.0).unwrap_err());
        names(model.load(&own.0).unwrap_err());
        assert_eq!(fs::read(&here.0).unwrap(), before);
        // Neither was final.
        step(&mut model)
    });
}

/// What a save that breaks off leaves: cut after each number of messages.
#[test]
fn a_save_that_breaks_off_leaves_the_checkpoint_before_it() {
    let place = Place::new("broken-off");
    let folder = place.0.clone();
    fs::create_dir(&folder).unwrap();
    let path = folder.join("kept.safetensors");
    let settings = CommunicatorConfig::new().with_timeout(Duration::from_secs(10));
    let (mut broken, mut after) = (0, 0);
    loop {
        let begun = std::sync::atomic::AtomicBool::new(false);
        let outcomes: Vec<Result<()>> = std::thread::scope(|scope| {
            let links: Vec<_> = Local::mesh(2).into_iter().enumerate().collect();
            let ranks = links.into_iter().map(|(rank, link)| {
                let (path, settings, begun) = (&path, &settings, &begun);
                let cut = if rank == 1 { 1.0 } else { 0.0 };
                let faults = Faults {
                    cut,
                    after,
                    ..Faults::none(1)
                };
                scope.spawn(move || {
                    let link = Faulty::new(link, faults);
                    let mut model = model(Communicator::new(link, settings)?)?;
                    step(&mut model)?;
                    if rank == 0 {
                        fs::write(path, "the one before").unwrap();
                        begun.store(true, std::sync::atomic::Ordering::Relaxed);
                    }
                    model.save(path)
                })
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let begun = begun.into_inner();
        if begun && outcomes[0].is_err() {
            broken += 1;
            let entries = fs::read_dir(&folder).unwrap().count();
            assert_eq!(entries, 1, "cut after {after} messages");
            let kept = fs::read(&path).unwrap();
            let whole = SafeTensors::deserialize(&kept).is_ok_and(|file| {
                file.iter()
                    .any(|(_, tensor)| tensor.data().iter().any(|&byte| byte != 0))
                    && file.len() == 12
            });
            // In the last message the ranks agree that it has been written.
            assert!(
                kept == b"the one before" || whole,
                "cut after {after} messages"
            );
        }
        after += 1;
        if outcomes.iter().all(Result::is_ok) {
            break;
        }
        assert!(after < 1000);
    }
    assert!(broken > 10, "{broken} of {after} cuts struck a save");
    fs::remove_dir_all(&folder).unwrap();
}

/// BR-19: two weights, one on each rank, ten gradients of 1; then one of `last`, after a restart.
#[test]
fn after_a_restart_adam_knows_its_step_and_its_moments_on_every_rank() {
    let place = Place::new("moments");
    let optimizer = || AdamConfig::new().with_epsilon(1e-8).init();
    let weight = |start| Param::from_tensor(vector(&[start; 2]));
    let mut plain = (weight(0.0), optimizer());
    let mut plain_step = |slope: f32| {
        let leaves = (plain.0.val().sum() * slope).backward();
        let gradients = GradientsParams::from_grads(leaves, &plain.0);
        plain.0 = plain.1.step(0.1, plain.0.clone(), gradients);
        values(plain.0.val())
    };
    for _ in 0..10 {
        plain_step(1.0);
    }
    agree(2, |communicator| {
        let zero = ZeroConfig::new(Stage::Two);
        let mut model = zero.init(weight(0.0), optimizer(), communicator)?;
        for _ in 0..10 {
            model.backward(model.module().val().sum(), 1)?;
            model.step(0.1)?;
        }
        model.save(&place.0)
    });
    let resumed = |stage, slope: f32| {
        agree(2, |communicator| {
            let mut model = ZeroConfig::new(stage).init(weight(7.0), optimizer(), communicator)?;
            model.load(&place.0)?;
            model.backward(model.module().val().sum() * slope, 1)?;
            model.step(0.1)?;
            Ok(values(model.into_module()?.val()))
        })
    };
    // As reported; without the step it is -1.207, without all -0.900.
    let due = plain_step(-1.0);
    assert_eq!(format!("{:.3}", due[0]), "-1.071");
    for stage in Stage::ALL {
        assert_eq!(resumed(stage, -1.0), due, "{stage:?}");
        for value in resumed(stage, 1.0) {
            assert_eq!(format!("{value:.3}"), "-1.100", "{stage:?}");
        }
    }
}

#[test]
fn a_state_that_burn_cannot_restore_is_refused_and_nothing_is_lost() {
    let place = Place::new("double");
    agree(2, |communicator| {
        let weight = from_vec::<1>(vec![0.3, 0.4], [2], DType::F64);
        let (weight, optimizer) = (Param::from_tensor(weight), AdamConfig::new().init());
        let mut model = ZeroConfig::new(Stage::Two).init(weight, optimizer, communicator)?;
        for _ in 0..2 {
            model.backward(model.module().val().sum(), 1)?;
            model.step(0.1)?;
        }
        model.save(&place.0)?;
        let error = model.load(&place.0).unwrap_err().to_string();
        assert!(
            error.contains("F64") && error.contains("moment_"),
            "{error}"
        );
        model.backward(model.module().val().sum(), 1)?;
        model.step(0.1)
    });
}

/// A number from a file of Linux; where there is none, the tests have nothing to hold on to.
fn resident() -> Option<usize> {
    let pages = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: usize = pages.split(' ').nth(1)?.parse().ok()?;
    Some(pages * 4096)
}

fn threads() -> Option<usize> {
    Some(fs::read_dir("/proc/self/task").ok()?.count())
}

/// BR-20 (d).
#[test]
fn memory_is_flat_from_step_to_step_at_every_stage() {
    alone(
        "trials::memory_is_flat_from_step_to_step_at_every_stage",
        || {
            let steps = match env::var_os("LOCKSTEP_SOAK") {
                Some(_) => 2000,
                None => 200,
            };
            for stage in Stage::ALL {
                let grown = launch::spawn(2, &deterministic(), |communicator| {
                    // 104 KB of gradients in 5 buckets: one kept per step would show as 10 MB.
                    let model = Mlp::new(&[64, 128, 128, 10], DType::F32);
                    let zero = ZeroConfig::new(stage).with_ddp(caps(1 << 10, 32 << 10));
                    let mut model = zero.init(model, AdamConfig::new().init(), communicator)?;
                    let mut sampler =
                        DistributedSampler::new(64, 8, model.place())?.with_shuffle(1);
                    let mut batches = std::iter::repeat_with(|| sampler.epoch()).flatten();
                    let mut start = None;
                    for step in 0..steps {
                        if step == steps / 2 {
                            start = resident();
                        }
                        let batch = batches.next().expect("epochs without end");
                        model.backward(model.loss(&batch.rows), batch.samples)?;
                        model.step(1e-3)?;
                    }
                    let grown = |(start, end): (usize, usize)| end.saturating_sub(start);
                    Ok::<_, Error>(start.zip(resident()).map(grown))
                })
                .unwrap();
                match grown[0] {
                    Some(grown) => assert!(grown < 5 << 20, "{stage:?}: {grown} bytes"),
                    None => println!("skipped: no /proc/self/statm to read memory from"),
                }
            }
        },
    );
}

/// BR-20 (c): at stage 3 the module holds the vault, which holds the stream.
#[test]
fn sharded_models_made_and_dropped_leave_no_thread_behind() {
    alone(
        "trials::sharded_models_made_and_dropped_leave_no_thread_behind",
        || {
            let Some(before) = threads() else {
                println!("skipped: no /proc/self/task to count threads in");
                return;
            };
            for stage in Stage::ALL {
                for _ in 0..20 {
                    agree(3, |communicator| {
                        let zero = ZeroConfig::new(stage).with_ddp(DdpConfig::new());
                        let model = Mlp::new(&[4, 5, 3], DType::F32);
                        let mut model = zero.init(model, AdamConfig::new().init(), communicator)?;
                        step(&mut model)
                    });
                }
                // One of a rank would be twenty by now; what has ended may still be about to go.
                let after = threads().unwrap_or_default();
                assert!(after < before + 20, "{stage:?}: {after} threads");
            }
        },
    );
}
