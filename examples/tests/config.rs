//! Settings: what lies over what, and what is refused in which words.

use std::path::PathBuf;

use collectives::{Algorithm, Choice};
use examples::{ConfigError, Flag, KMeansSettings, Preset, Settings, Task, print, resolve};

use zero::Stage;

use crate::data::folder;

fn written(name: &str, text: &str) -> PathBuf {
    let path = folder(&format!("config-{name}")).join("mlp.toml");
    std::fs::write(&path, text).unwrap();
    path
}

fn refused(name: &str, text: &str) -> String {
    let path = written(name, text);
    let error = resolve(&Settings::compare(), Some(&path), &[]).unwrap_err();
    let text = error.to_string();
    let file = path.display().to_string();
    assert!(text.starts_with(&file), "{text}");
    text.replace(&file, "mlp.toml")
}

#[test]
fn flags_lie_over_the_file_and_the_file_over_defaults() {
    let text = "[optim]\nlr = 0.5\n[run]\nworld_size = 2\n[collectives]\nalgorithm = \"tree\"\n";
    let path = written("layers", text);
    let flag = Flag {
        name: "--world-size",
        key: "run.world_size",
        value: 3.into(),
    };
    let settings = resolve(&Settings::compare(), Some(&path), &[flag]).unwrap();
    assert_eq!(settings.optim.lr, 0.5);
    assert_eq!(settings.run.world_size, 3);
    assert_eq!(
        settings.collectives.algorithm,
        Choice::Fixed(Algorithm::Tree)
    );
    assert_eq!(settings.train, Settings::compare().train);
}

#[test]
fn printed_settings_read_back_to_the_same() {
    for (name, settings) in [
        ("compare", Settings::compare()),
        ("train", Settings::train()),
    ] {
        let path = written(&format!("print-{name}"), &print(&settings));
        // Over other defaults, so that every key has to be in the file.
        let other = match name {
            "train" => Settings::compare(),
            _ => Settings::train(),
        };
        assert_eq!(resolve(&other, Some(&path), &[]).unwrap(), settings);
    }
    let settings = KMeansSettings::default();
    let path = written("print-kmeans", &print(&settings));
    assert_eq!(resolve(&settings, Some(&path), &[]).unwrap(), settings);
}

#[test]
fn rules_by_size_are_a_setting_like_any_other() {
    let text = "[collectives]\nall_reduce = [{ up_to_kb = 48, algorithm = \"tree\" }, { algorithm = \"ring\" }]\n";
    let path = written("rules", text);
    let settings = resolve(&Settings::train(), Some(&path), &[]).unwrap();
    assert!(
        matches!(settings.collectives.all_reduce, Some(Choice::Sized(rules)) if rules.len() == 2)
    );
}

#[test]
fn a_stage_is_a_number_of_which_0_is_ddp() {
    for (text, stage) in [
        ("[zero]\nstage = 0\n", None),
        ("[zero]\nstage = 1\n", Some(Stage::One)),
        ("[zero]\nstage = 3\n", Some(Stage::Three)),
    ] {
        let path = written("stage", text);
        let settings = resolve(&Settings::train(), Some(&path), &[]).unwrap();
        assert_eq!(settings.zero.stage, stage);
        assert!(print(&settings).contains(text), "{}", print(&settings));
    }
    for wrong in ["4", "-1", "2.5", "\"two\""] {
        let error = refused("stage", &format!("[zero]\nstage = {wrong}\n"));
        assert!(
            error.starts_with(&format!("mlp.toml: zero.stage = {wrong}: ")),
            "{error}"
        );
    }
    let error = refused("stage-4", "[zero]\nstage = 4\n");
    assert!(error.ends_with("allowed is 0 (ddp), 1, 2 or 3"), "{error}");
    let error = refused("stages", "[zero]\nstages = 1\n");
    assert!(
        error.ends_with("the nearest known key is \"zero.stage\""),
        "{error}"
    );
}

#[test]
fn an_unknown_key_is_told_with_the_nearest() {
    let nearest = |name, text, key: &str, expected: &str| {
        assert_eq!(
            refused(name, text),
            format!("mlp.toml: unknown key \"{key}\"; the nearest known key is \"{expected}\"")
        );
    };
    nearest(
        "typo",
        "[ddp]\nbuckt_cap_mb = 1\n",
        "ddp.buckt_cap_mb",
        "ddp.bucket_cap_mb",
    );
    nearest("section", "[optimizer]\nlr = 1\n", "optimizer", "optim");
    nearest("misplaced", "lr = 1\n", "lr", "optim.lr");
    nearest("log", "[log]\ntracee = \"a\"\n", "log.tracee", "log.trace");
    // Options that are not set are known all the same.
    nearest(
        "option",
        "[collectives]\nall_reduc = 1\n",
        "collectives.all_reduc",
        "collectives.all_reduce",
    );
}

#[test]
fn a_value_of_the_wrong_type_is_told_with_its_key() {
    let text = refused("type", "[run]\nseed = 7\nworld_size = \"four\"\n");
    assert!(
        text.contains("run.world_size = \"four\": invalid type"),
        "{text}"
    );
    let text = refused("negative", "[run]\nworld_size = -1\n");
    assert!(text.contains("run.world_size = -1"), "{text}");
    let text = refused("kind", "[optim]\nkind = \"sdg\"\n");
    assert!(
        text.contains("expected one of `sgd`, `momentum`, `adam`, `adamw`"),
        "{text}"
    );
    let text = refused("algorithm", "[collectives]\nalgorithm = \"star\"\n");
    assert!(
        text.contains("collectives.algorithm = \"star\"") && text.contains("ring"),
        "{text}"
    );
    // Options too, which null would leave unset.
    for (key, text) in [
        ("optim.lr", "[optim]\nlr = nan\n"),
        (
            "collectives.all_reduce",
            "[collectives]\nall_reduce = nan\n",
        ),
    ] {
        let text = refused("nan", text);
        assert!(text.contains(&format!("{key} = \"NaN\"")), "{text}");
    }
    let path = written("nan-k", "[run]\nk = nan\n");
    let error = resolve(&KMeansSettings::default(), Some(&path), &[]).unwrap_err();
    assert!(error.to_string().contains("run.k = \"NaN\""), "{error}");
    let text = refused("time", "[optim]\nlr = 1979-05-27\n");
    assert!(text.contains("optim.lr = \"1979-05-27\""), "{text}");
    let text = refused("table", "ddp = 3\n");
    assert!(text.contains("ddp = 3"), "{text}");
    let text = refused("syntax", "[run\n");
    assert!(
        text.contains("not TOML") && text.contains("line 1"),
        "{text}"
    );
    let error = resolve(&Settings::train(), Some("no-such.toml".as_ref()), &[]).unwrap_err();
    assert!(matches!(error, ConfigError::Read { .. }));
}

#[test]
fn senseless_values_are_told_with_what_is_allowed() {
    let refused = |change: fn(&mut Settings), key: &str, allowed: &str| {
        let mut settings = Settings::train();
        change(&mut settings);
        let text = settings.check().unwrap_err().to_string();
        assert!(text.starts_with(key) && text.contains(allowed), "{text}");
    };
    refused(|s| s.run.world_size = 0, "run.world_size = 0", "1 to 256");
    refused(|s| s.model.layers = vec![64], "model.layers", "two or more");
    refused(
        |s| s.train.global_batch_size = 0,
        "train.global_batch_size = 0",
        "1 or more",
    );
    refused(
        |s| s.train.epochs = 0,
        "train.epochs = 0",
        "unless train.steps is set",
    );
    refused(|s| s.optim.lr = 0.0, "optim.lr = 0", "above 0");
    refused(
        |s| s.optim.momentum = f64::NAN,
        "optim.momentum = NaN",
        "0 or above",
    );
    refused(
        |s| s.ddp.bucket_cap_mb = -1.0,
        "ddp.bucket_cap_mb = -1",
        "0 or above",
    );
    refused(
        |s| s.ddp.rung_stride = usize::MAX,
        "ddp.rung_stride",
        "0 to 65536",
    );
    // What is printed can be read again.
    refused(
        |s| s.train.steps = usize::MAX,
        "train.steps",
        "TOML's largest integer",
    );
    let mut kmeans = KMeansSettings::default();
    kmeans.run.max_iter = usize::MAX;
    assert!(kmeans.check().is_err());
    refused(
        |s| s.collectives.timeout_s = 0.0,
        "collectives.timeout_s = 0",
        "above 0",
    );
}

#[test]
fn the_wide_preset_has_31_million_parameters_and_default_buckets() {
    let settings = Settings::compare().with_preset(Preset::Wide);
    assert_eq!(settings.ddp, ddp::DdpConfig::default());
    assert_eq!(Task::new(settings).unwrap().parameters(), 31_002_634);
}
