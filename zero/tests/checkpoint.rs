//! A checkpoint holds everything, and fits every world size and stage.
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::optim::{AdamConfig, LionConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::DType;
use collectives::Communicator;
use ddp::DdpConfig;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use zero::{Error, Result, ShardedDataParallel, Stage, ZeroConfig};

use crate::run::{agree, seen};
use crate::support::{Mlp, caps, device, from_vec, noise, values};

/// A file for one test, gone with the guard.
pub(crate) struct Place(pub(crate) PathBuf);

impl Place {
    pub(crate) fn new(name: &str) -> Self {
        let name = format!("lockstep-{}-{name}.safetensors", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        drop(fs::remove_file(&self.0));
    }
}

fn init(stage: Stage, communicator: Communicator) -> Result<ShardedDataParallel<Mlp>> {
    let mut plain = Mlp::new(&[6, 16, 3], DType::F32);
    // The second bias is not trained.
    let bias = plain.layers[1].bias.take();
    plain.layers[1].bias = bias.map(|bias| bias.set_require_grad(false));
    let config = ZeroConfig::new(stage).with_ddp(caps(100, 300));
    config.init(plain, AdamConfig::new().init(), communicator)
}

fn train(model: &mut ShardedDataParallel<Mlp>, steps: std::ops::Range<usize>) -> Result<()> {
    for step in steps {
        // The same rows on every rank, and sums of equal numbers in any order.
        model.backward(model.loss(&[step, step + 1]), 2)?;
        model.step(0.05)?;
    }
    Ok(())
}

/// Every tensor of a file, with its shape and bytes, and every number.
type Contents = (
    BTreeMap<String, (Vec<usize>, Vec<u8>)>,
    BTreeMap<String, String>,
);

fn contents(place: &Place) -> Contents {
    let bytes = fs::read(&place.0).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let numbers = metadata.metadata().clone().unwrap().into_iter().collect();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let whole = |(name, tensor): (&str, TensorView<'_>)| {
        let (shape, data) = (tensor.shape().to_vec(), tensor.data().to_vec());
        (name.to_owned(), (shape, data))
    };
    (file.iter().map(whole).collect(), numbers)
}

#[test]
fn what_is_saved_at_one_world_size_and_stage_is_loaded_at_any_other_to_the_bit() {
    let first = Place::new("first");
    let values = agree(4, |communicator| {
        let mut model = init(Stage::Three, communicator)?;
        train(&mut model, 0..3)?;
        model.save(&first.0)?;
        Ok(seen(model.module()))
    });
    let saved = contents(&first);
    for stage in Stage::ALL {
        for world in [1, 2, 3, 5] {
            let again = Place::new("again");
            let loaded = agree(world, |communicator| {
                let mut model = init(stage, communicator)?;
                train(&mut model, 0..1)?;
                model.load(&first.0)?;
                model.save(&again.0)?;
                Ok(seen(model.module()))
            });
            assert_eq!(loaded, values, "{stage:?}, {world}");
            // Parameters, both moments of each, and the steps of Adam.
            assert!(contents(&again) == saved, "{stage:?}, {world}");
        }
    }
}

#[test]
fn training_goes_on_as_if_it_had_not_stopped() {
    for stage in Stage::ALL {
        let place = Place::new(&format!("on-{}", u8::from(stage)));
        let straight = agree(3, |communicator| {
            let mut model = init(stage, communicator)?;
            train(&mut model, 0..3)?;
            model.save(&place.0)?;
            train(&mut model, 3..6)?;
            Ok(seen(model.module()))
        });
        let resumed = agree(3, |communicator| {
            let mut model = init(stage, communicator)?;
            model.load(&place.0)?;
            train(&mut model, 3..6)?;
            Ok(seen(model.module()))
        });
        assert_eq!(resumed, straight, "{stage:?}");
    }
}

#[test]
fn the_file_has_every_tensor_whole_under_its_path() {
    let place = Place::new("names");
    agree(2, |communicator| {
        let mut model = init(Stage::Two, communicator)?;
        train(&mut model, 0..2)?;
        model.save(&place.0)
    });
    let bytes = fs::read(&place.0).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(
        file.tensor("model.layers.0.weight").unwrap().shape(),
        [6, 16]
    );
    assert_eq!(file.tensor("model.layers.1.bias").unwrap().shape(), [3]);
    let moment = "optimizer.layers.0.weight.momentum.moment_2";
    assert_eq!(file.tensor(moment).unwrap().shape(), [6, 16]);
    // Four parameters, and two moments of the three that are trained.
    assert_eq!(file.len(), 4 + 2 * 3);
    let numbers = metadata.metadata().clone().unwrap();
    let time = &numbers["optimizer.layers.0.weight.momentum.time"];
    assert!(time.contains('2'), "{time}");
}

#[test]
fn a_file_that_does_not_fit_is_refused_on_every_rank_and_nothing_is_lost() {
    let place = Place::new("other");
    agree(2, |communicator| {
        let other = Mlp::new(&[6, 15, 3], DType::F32);
        let optimizer = AdamConfig::new().init();
        let mut other = ZeroConfig::new(Stage::One).init(other, optimizer, communicator)?;
        other.save(&place.0)
    });
    agree(2, |communicator| {
        let mut model = init(Stage::Two, communicator)?;
        let before = seen(model.module());
        let error = model.load(&place.0).unwrap_err();
        let said = error.to_string();
        assert!(
            said.contains("layers.0.weight") && said.contains("[6, 15]"),
            "{said}"
        );
        let missing = model.load("/nowhere/at all").unwrap_err();
        assert!(matches!(missing, Error::Checkpoint { .. }), "{missing}");
        if model.place().rank == 0 {
            let bytes = fs::read(&place.0).unwrap();
            fs::write(&place.0, &bytes[..bytes.len() - 1]).unwrap();
        }
        model.weighted_mean([([0.0], 1)])?;
        let cut_off = model.load(&place.0).unwrap_err();
        assert!(cut_off.to_string().contains("cut off"), "{cut_off}");
        assert!(matches!(
            model.save("/nowhere/at all"),
            Err(Error::Checkpoint { .. })
        ));
        assert_eq!(seen(model.module()), before);
        train(&mut model, 0..1)
    });
}

#[test]
fn state_of_another_optimizer_is_refused_and_names_what_that_one_kept() {
    let place = Place::new("lion");
    let init = |optimizer: ModuleOptimizer, communicator| {
        let model = Mlp::new(&[6, 16, 3], DType::F32);
        ZeroConfig::new(Stage::Two).init(model, optimizer, communicator)
    };
    agree(2, |communicator| {
        let mut model = init(LionConfig::new().init(), communicator)?;
        train(&mut model, 0..1)?;
        model.save(&place.0)
    });
    agree(2, |communicator| {
        let mut model = init(AdamConfig::new().init(), communicator)?;
        let error = model.load(&place.0).unwrap_err().to_string();
        for part in ["another optimizer", "layers.0.", "momentum.moment_2"] {
            assert!(error.contains(part), "{part} in {error}");
        }
        train(&mut model, 0..1)
    });
}

/// Puts `new`, as long as `old`, over the first `old` after `name` in the file.
fn spoil(place: &Place, name: &str, old: &str, new: &str) {
    let find = |bytes: &[u8], text: &str| {
        let mut windows = bytes.windows(text.len());
        windows
            .position(|window| window == text.as_bytes())
            .unwrap()
    };
    let mut bytes = fs::read(&place.0).unwrap();
    let start = find(&bytes, name);
    let at = start + find(&bytes[start..], old);
    bytes[at..at + old.len()].copy_from_slice(new.as_bytes());
    fs::write(&place.0, bytes).unwrap();
}

#[test]
fn state_of_another_shape_or_type_is_refused_before_anything_changes() {
    let moment = "layers.0.weight.momentum.moment_2";
    let (time, rank) = ("layers.0.weight.momentum.time", "layers.0.weight.__rank");
    let spoilt = [
        (moment, "[6,16]", "[16,6]", "[6, 16]"),
        (moment, "\"F32\"", "\"I32\"", "I32"),
        // Half of the file has no tensor then.
        (moment, "\"F32\"", "\"F16\"", "cut off"),
        (time, ":2}", ":x}", "time"),
        (rank, ":2}", ":7}", "__rank"),
    ];
    for (at, (name, old, new, said)) in spoilt.into_iter().enumerate() {
        let place = Place::new(&format!("spoilt-{at}"));
        agree(2, |communicator| {
            let mut model = init(Stage::Two, communicator)?;
            train(&mut model, 0..2)?;
            model.save(&place.0)
        });
        spoil(&place, name, old, new);
        agree(2, |communicator| {
            let mut model = init(Stage::Two, communicator)?;
            let before = seen(model.module());
            let error = model.load(&place.0).unwrap_err().to_string();
            assert!(error.contains(said), "{said} in {error}");
            assert_eq!(seen(model.module()), before);
            train(&mut model, 0..1)
        });
    }
}

#[test]
fn a_file_of_a_longer_model_is_refused() {
    let place = Place::new("longer");
    let wrap = |sizes: &[usize], communicator| {
        let optimizer = AdamConfig::new().init();
        ZeroConfig::new(Stage::Two).init(Mlp::new(sizes, DType::F32), optimizer, communicator)
    };
    agree(2, |communicator| {
        let mut model = wrap(&[6, 16, 3, 3], communicator)?;
        train(&mut model, 0..1)?;
        model.save(&place.0)
    });
    agree(2, |communicator| {
        let mut model = wrap(&[6, 16, 3], communicator)?;
        let error = model.load(&place.0).unwrap_err().to_string();
        assert!(
            error.contains("no place") && error.contains("layers.2."),
            "{error}"
        );
        train(&mut model, 0..1)
    });
}

#[cfg(unix)]
#[test]
fn others_may_do_with_a_checkpoint_what_they_may_do_with_any_new_file() {
    use std::os::unix::fs::PermissionsExt;
    let (place, plain) = (Place::new("rights"), Place::new("plain"));
    fs::write(&plain.0, "").unwrap();
    agree(2, |communicator| {
        init(Stage::One, communicator)?.save(&place.0)
    });
    let mode = |place: &Place| fs::metadata(&place.0).unwrap().permissions().mode();
    assert_eq!(mode(&place), mode(&plain));
}

/// One step of a layer that keeps running state; with a NaN on rank 0 it is left out.
fn norm_step(model: &mut ShardedDataParallel<BatchNorm>, salt: usize, bad: bool) -> Result<()> {
    let mut rows: Vec<f64> = (0..12).map(|at| noise(salt, at)).collect();
    if bad && model.place().rank == 0 {
        rows[0] = f64::NAN;
    }
    let output = model.forward(from_vec::<2>(rows, [4, 3], DType::F32));
    model.backward((output.clone() * output).mean(), 4)?;
    assert_eq!(model.last_step().skipped, bad);
    model.step(0.1)
}

#[test]
fn running_state_that_is_loaded_stays_whatever_came_before_and_is_left_out_after() {
    let mean = |model: &ShardedDataParallel<BatchNorm>| values(model.running_mean.value());
    for stage in Stage::ALL {
        // Without the broadcast a forward pass leaves its own in the layer until the next.
        for broadcast in [true, false] {
            let place = Place::new(&format!("norm-{}-{broadcast}", u8::from(stage)));
            agree(2, |communicator| {
                let config = DdpConfig::new().with_broadcast_buffers(broadcast);
                let config = ZeroConfig::new(stage).with_ddp(config);
                let norm = BatchNormConfig::new(3).init(&device());
                let mut model = config.init(norm, SgdConfig::new().init(), communicator)?;
                norm_step(&mut model, 1, false)?;
                model.save(&place.0)?;
                let saved = {
                    let bytes = fs::read(&place.0).unwrap();
                    let file = SafeTensors::deserialize(&bytes).unwrap();
                    let tensor = file.tensor("model.running_mean").unwrap();
                    let numbers = tensor.data().chunks_exact(4);
                    numbers
                        .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
                        .collect::<Vec<_>>()
                };
                for bad in [false, true] {
                    norm_step(&mut model, 2, false)?;
                    norm_step(&mut model, 3, bad)?;
                    model.load(&place.0)?;
                    drop(model.valid());
                    assert_eq!(mean(&model), saved, "{stage:?}, {broadcast}");
                }
                if broadcast {
                    norm_step(&mut model, 4, true)?;
                    assert_eq!(mean(&model), saved, "{stage:?}");
                }
                Ok(())
            });
        }
    }
}

#[test]
fn a_number_that_no_optimizer_keeps_is_told_to_every_rank_and_nothing_is_lost() {
    let place = Place::new("spoilt");
    agree(3, |communicator| {
        let mut model = init(Stage::Two, communicator)?;
        train(&mut model, 0..1)?;
        model.save(&place.0)
    });
    // A number of the last parameter's state, of which not every rank has a piece.
    let bytes = fs::read(&place.0).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let mut numbers = metadata.metadata().clone().unwrap();
    let time = numbers.get_mut("optimizer.layers.1.weight.momentum.time");
    *time.unwrap() = "spoilt".to_owned();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let spoilt = safetensors::serialize(file.iter(), Some(numbers)).unwrap();
    fs::write(&place.0, spoilt).unwrap();
    for stage in Stage::ALL {
        agree(3, |communicator| {
            let mut model = init(stage, communicator)?;
            let error = model.load(&place.0).unwrap_err();
            assert!(matches!(error, Error::Checkpoint { .. }), "{error}");
            train(&mut model, 0..1)
        });
    }
}
