//! Checkpoints of `zero`, read by others: Burn's own store, and Python.
//!
//! Python's standard library is enough, so only a machine without Python goes without: the test says
//! so then, and fails if LOCKSTEP_REQUIRE names `python`. LOCKSTEP_TORCH, or else LOCKSTEP_PYTHON, is
//! the path of another interpreter.
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::AdamConfig;
use burn::tensor::{Device, Tensor, TensorData};
use burn_store::{ModuleSnapshot, SafetensorsStore};
use collectives::{CommunicatorConfig, launch};
use examples::{Mlp, Precision};
use serde::Deserialize;
use zero::{Stage, ZeroConfig};

/// A model on its way, and the file that two ranks saved of it.
fn saved(name: &str, stage: Stage) -> (Mlp, PathBuf) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("checkpoints");
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join(format!("{name}-{}.safetensors", std::process::id()));
    let device = Device::flex().autodiff();
    let plain = model(1, &device);
    let mut ranks = launch::spawn(2, &CommunicatorConfig::new(), |communicator| {
        let optimizer = AdamConfig::new().init();
        let mut model = ZeroConfig::new(stage).init(plain.clone(), optimizer, communicator)?;
        for _ in 0..3 {
            let loss = model.forward(input(&device)).powi_scalar(2).mean();
            model.backward(loss, 2)?;
            model.step(0.1)?;
        }
        model.save(&path)?;
        model.into_module()
    })
    .unwrap();
    (ranks.swap_remove(0), path)
}

fn model(seed: u64, device: &Device) -> Mlp {
    Mlp::new(&[5, 4, 3], seed, Precision::F32, device)
}

fn input(device: &Device) -> Tensor<2> {
    let numbers: Vec<f32> = (0..10).map(|at| at as f32 / 4.0 - 1.0).collect();
    Tensor::from_data(TensorData::new(numbers, [2, 5]), device)
}

/// Every parameter under its path.
fn parameters(module: &Mlp) -> BTreeMap<String, TensorData> {
    struct Collect(Vec<String>, BTreeMap<String, TensorData>);
    impl ModuleVisitor for Collect {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.to_owned());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.1.insert(self.0.join("."), param.val().into_data());
        }
    }
    let mut collect = Collect(Vec::new(), BTreeMap::new());
    module.visit(&mut collect);
    collect.1
}

#[test]
fn burns_own_store_reads_the_model_from_the_file() {
    for stage in Stage::ALL {
        let (trained, path) = saved(&format!("store-{}", u8::from(stage)), stage);
        let device = Device::flex().autodiff();
        let mut other = model(2, &device);
        assert_ne!(parameters(&other), parameters(&trained));
        let store = SafetensorsStore::from_file(&path);
        let result = other.load_from(&mut store.with_key_remapping(r"^model\.", ""));
        let result = result.unwrap();
        assert!(
            result.missing.is_empty() && result.errors.is_empty(),
            "{result:?}"
        );
        assert_eq!(parameters(&other), parameters(&trained), "{stage:?}");
        let forward = |model: &Mlp| model.forward(input(&device)).into_data();
        assert_eq!(forward(&other), forward(&trained), "{stage:?}");
        fs::remove_file(path).unwrap();
    }
}

/// What the script prints: of a tensor its type, its shape and its numbers.
#[derive(Deserialize)]
struct Contents {
    tensors: BTreeMap<String, (String, Vec<usize>, Vec<f64>)>,
    numbers: BTreeMap<String, serde_json::Value>,
    package: bool,
}

#[test]
fn python_reads_every_number_of_the_file() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("checkpoints/read.py");
    let chosen = ["LOCKSTEP_TORCH", "LOCKSTEP_PYTHON"].map(env::var_os);
    let mut chosen = chosen.into_iter().flatten().filter(|path| !path.is_empty());
    let python = chosen.next().unwrap_or_else(|| "python3".into());
    for stage in Stage::ALL {
        let (trained, path) = saved(&format!("python-{}", u8::from(stage)), stage);
        let output = Command::new(&python).arg(&script).arg(&path).output();
        let output = match output {
            Ok(output) => output,
            Err(error) if error.kind() == io::ErrorKind::NotFound && python == "python3" => {
                let required = env::var("LOCKSTEP_REQUIRE").unwrap_or_default();
                let required = required.split(',').any(|name| name.trim() == "python");
                assert!(
                    !required,
                    "LOCKSTEP_REQUIRE names python, and there is no python3"
                );
                say("checkpoints: SKIPPED, read by Python: there is no python3");
                return;
            }
            Err(error) => panic!("{}: {error}", python.display()),
        };
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        let contents: Contents = serde_json::from_slice(&output.stdout).unwrap();
        let parameters = parameters(&trained);
        for (name, data) in &parameters {
            let (dtype, shape, numbers) = &contents.tensors[&format!("model.{name}")];
            // Python prints each f32 as the f64 that it is; serde_json reads that to within a bit.
            let numbers: Vec<f32> = numbers.iter().map(|&number| number as f32).collect();
            let due: Vec<f32> = data.iter().collect();
            assert_eq!(
                (dtype.as_str(), &shape[..]),
                ("F32", &data.shape()[..]),
                "{name}"
            );
            assert_eq!(numbers, due, "{name}");
            for moment in ["moment_1", "moment_2"] {
                let moment = format!("optimizer.{name}.momentum.{moment}");
                let (_, shape, numbers) = &contents.tensors[&moment];
                assert_eq!(shape[..], data.shape()[..], "{moment}");
                assert!(numbers.iter().any(|&number| number != 0.0), "{moment}");
            }
            let time = &contents.numbers[&format!("optimizer.{name}.momentum.time")];
            assert!(time.to_string().contains('3'), "{time}");
        }
        assert_eq!(contents.tensors.len(), 3 * parameters.len());
        if stage == Stage::Three {
            let by = if contents.package {
                "and by the package safetensors"
            } else {
                "alone"
            };
            say(&format!(
                "checkpoints: read by Python's standard library {by}"
            ));
        }
        fs::remove_file(path).unwrap();
    }
}

/// Past the harness, which shows what a test prints only if it fails.
fn say(line: &str) {
    drop(writeln!(io::stderr(), "\n{line}"));
}
