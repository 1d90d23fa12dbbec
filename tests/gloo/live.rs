//! Against a PyTorch that runs now: LOCKSTEP_TORCH is the path of its interpreter,
//! which `torch_env.sh` makes. Without it these tests say that they are skipped, and
//! fail if LOCKSTEP_REQUIRE names `torch`.
use std::{
    collections::BTreeSet,
    env, fs,
    io::{self, Write},
    path::{Path, PathBuf},
    process::Command,
    time::{SystemTime, UNIX_EPOCH},
};

use examples::bench::reference::{Case, RECORDED, Recording, draft};
use safetensors::SafeTensors;

use super::{
    random::{self, LARGE, SMALL},
    tally,
};

#[test]
fn a_live_gloo_agrees_on_random_cases() {
    let Some(python) = interpreter("random cases") else {
        return;
    };
    let seed = seed();
    say(&format!(
        "gloo: random cases, LOCKSTEP_SEED={seed} repeats them"
    ));
    let (cases, out) = (scratch("random-cases"), scratch("random"));
    fs::write(&cases, draft(&random::cases(seed)).unwrap()).unwrap();
    let said = reference(&python, &[&out, &cases]);
    let recording = Recording::parse(&fs::read(&out).unwrap()).unwrap();
    let tally = tally(&recording.cases);
    let small: usize = tally.compared.values().sum();
    assert_eq!((small, tally.large), (SMALL, LARGE), "LOCKSTEP_SEED={seed}");
    say(&format!(
        "gloo: {said}; {small} and {LARGE} large ones compared"
    ));
    remove(&[&cases, &out]);
}

#[test]
fn a_live_gloo_gives_the_recorded_tensors() {
    let Some(python) = interpreter("the recording made anew") else {
        return;
    };
    let out = scratch("anew");
    let said = reference(&python, &[&out]);
    let bytes = fs::read(&out).unwrap();
    // What a refusal says may change with the version; what is refused may not.
    let plain = |bytes: &[u8]| -> Vec<Case> {
        let mut cases = Recording::parse(bytes).unwrap().cases;
        for gloo in cases.iter_mut().filter_map(|case| case.refused.as_mut()) {
            gloo.clear();
        }
        cases
    };
    let (kept, anew) = (plain(RECORDED), plain(&bytes));
    for (kept, anew) in kept.iter().zip(&anew) {
        assert!(kept == anew, "{}: another case, answer or hash", kept.name);
    }
    assert_eq!(kept.len(), anew.len());
    let (kept, anew) = [RECORDED, &bytes]
        .map(|bytes| SafeTensors::deserialize(bytes).unwrap())
        .into();
    let names = |tensors: &SafeTensors| -> BTreeSet<String> {
        tensors.names().into_iter().map(str::to_owned).collect()
    };
    assert_eq!(names(&kept), names(&anew), "other tensors");
    let differs = |name: &String| kept.tensor(name).unwrap() != anew.tensor(name).unwrap();
    let differing: Vec<_> = names(&kept).into_iter().filter(differs).collect();
    assert!(differing.is_empty(), "these differ: {differing:?}");
    say(&format!(
        "gloo: {said}; all {} tensors as recorded",
        kept.len()
    ));
    remove(&[&out]);
}

/// The interpreter, if there is to be one.
fn interpreter(what: &str) -> Option<PathBuf> {
    if let Some(path) = env::var_os("LOCKSTEP_TORCH").filter(|path| !path.is_empty()) {
        return Some(path.into());
    }
    let required = env::var("LOCKSTEP_REQUIRE").unwrap_or_default();
    assert!(
        required.split(',').all(|name| name.trim() != "torch"),
        "LOCKSTEP_REQUIRE names torch: set LOCKSTEP_TORCH to an interpreter that has it, \
         as tests/gloo/torch_env.sh prints it"
    );
    say(&format!(
        "gloo: SKIPPED, {what}: LOCKSTEP_TORCH names no Python with PyTorch \
         (tests/gloo/torch_env.sh makes one); compared with the recording only"
    ));
    None
}

/// Past the harness, which shows what a test prints only if it fails.
fn say(line: &str) {
    drop(writeln!(io::stderr(), "\n{line}"));
}

fn seed() -> u64 {
    match env::var("LOCKSTEP_SEED") {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("LOCKSTEP_SEED={text}: a whole number is needed")),
        Err(_) => SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |time| time.as_nanos() as u64),
    }
}

fn scratch(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gloo");
    fs::create_dir_all(&folder).unwrap();
    folder.join(format!("{name}-{}.safetensors", std::process::id()))
}

/// What a failed test leaves is there to be looked at.
fn remove(files: &[&PathBuf]) {
    files.iter().for_each(|file| fs::remove_file(file).unwrap());
}

/// Runs the script; gives its last line.
fn reference(python: &Path, files: &[&PathBuf]) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("gloo/reference.py");
    let output = Command::new(python)
        .arg(script)
        .args(files)
        .output()
        .unwrap_or_else(|error| panic!("LOCKSTEP_TORCH={}: {error}", python.display()));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    assert!(
        output.status.success(),
        "{}: {}",
        output.status,
        text(&output.stderr)
    );
    text(&output.stdout)
        .lines()
        .last()
        .unwrap_or_default()
        .to_owned()
}
