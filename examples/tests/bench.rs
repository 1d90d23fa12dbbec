//! The claims of `bench`, few and fast.
use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

use clap::Parser;
use collectives::{
    Algorithm, Collective, CommunicatorConfig, DType, ReduceOp,
    tuning::{self, Cost},
};
use examples::bench::{
    BenchCli, Bytes, Contender, Curve, Job, Measured, Next, Overtaking, Row, Times, run, sizes,
};

fn bench(words: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_bench");
    Command::new(program)
        .args(words)
        .output()
        .expect("the program runs")
}

fn code(words: &[&str]) -> Option<i32> {
    bench(words).status.code()
}

fn complaint(words: &[&str]) -> String {
    let output = bench(words);
    assert_eq!(output.status.code(), Some(2), "{words:?}");
    assert!(output.stdout.is_empty(), "{words:?}");
    String::from_utf8(output.stderr).expect("text")
}

/// A file of this test's own, where cargo lets tests write.
fn scratch(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

#[test]
fn every_collective_is_right_and_says_so_in_json() {
    let keys = "collective engine algorithm launcher ranks bytes count dtype redop time_us min_us \
                p99_us algbw busbw wrong bytes_sent bytes_formula of_limit";
    for verb in [
        "all_reduce",
        "reduce",
        "broadcast",
        "all_gather",
        "reduce_scatter",
        "gather",
        "scatter",
        "all_to_all",
        "sendrecv",
    ] {
        let output = bench(&[
            verb, "-b", "100", "-e", "100", "-n", "2", "-w", "0", "--ranks", "3", "-d", "all",
            "-J", "-",
        ]);
        assert_eq!(output.status.code(), Some(0), "{verb}");
        let lines = String::from_utf8(output.stdout).expect("text");
        assert!(!lines.is_empty(), "{verb}");
        for line in lines.lines() {
            let row: serde_json::Map<String, serde_json::Value> =
                serde_json::from_str(line).expect("an object");
            assert!(
                keys.split_whitespace().all(|key| row.contains_key(key)),
                "{line}"
            );
            assert_eq!(
                (&row["collective"], &row["wrong"]),
                (&verb.into(), &0.into())
            );
            assert_eq!(row["bytes_sent"], row["bytes_formula"]);
            assert!(row["of_limit"].is_null());
        }
    }
}

#[test]
fn what_ran_is_what_is_shown() {
    let words = "all_reduce -b 64 -e 64 -n 1 -w 0 --ranks 3 --algorithm ring --deterministic -J -";
    let output = bench(&words.split(' ').collect::<Vec<_>>());
    let line = String::from_utf8(output.stdout).expect("text");
    assert!(line.contains("\"algorithm\":\"direct+ring\""), "{line}");
}

#[test]
fn a_root_and_an_operation_are_obeyed() {
    for verb in ["reduce", "broadcast", "gather", "scatter"] {
        assert_eq!(
            code(&[
                verb, "-b", "96", "-e", "96", "-n", "1", "--ranks", "4", "-r", "2"
            ]),
            Some(0),
            "{verb}"
        );
    }
    assert_eq!(
        code(&[
            "all_reduce",
            "-b",
            "96",
            "-e",
            "96",
            "-n",
            "1",
            "--ranks",
            "2,5",
            "-o",
            "all",
            "-d",
            "all"
        ]),
        Some(0)
    );
}

#[test]
fn a_command_that_cannot_be_says_what_is_allowed() {
    for (words, allowed) in [
        ("all_reduce -d f31", "bf16"),
        ("all_reduce -o median", "product"),
        ("all_reduce -o mean -d i32", "no mean of i32"),
        ("all_reduce --algorithm star", "halving"),
        ("all_reduce --transport pigeon", "delayed:LATENCY_US:GBIT"),
        ("all_reduce -b 1X", "K, M or G"),
        ("all_reduce -b 4K -e 1K", "-b must not be above -e"),
        ("all_reduce --ranks 0", "1 to"),
        ("all_reduce --segment-kb 0", "1 to 1048576"),
        ("reduce --ranks 2,4 -r 2", "0 to 1 are allowed"),
        ("broadcast -o sum", "leave out -o"),
        ("gather --algorithm ring", "leave out --algorithm"),
        ("sendrecv --ranks 1", "at least 2 ranks"),
        ("crossover --collective gather", "reduce_scatter"),
        ("crossover -b 4K -e 1K", "-b must not be above -e"),
        ("crossover --out picture.svg", "not .svg"),
        ("simulate --beta 0", "above 0"),
        ("simulate --beta 1e-300", "above 0"),
        (
            "all_reduce --transport delayed:0:1e-300",
            "delayed:LATENCY_US:GBIT",
        ),
        ("step --layers 8", "two widths"),
        ("step --rows ddq", "ddp_no_overlap"),
        ("step --ranks 1", "2..=64"),
        ("step --rows zero_4", "zero_3"),
        ("step --optimizer sgd", "momentum, adam"),
        ("step --transport pigeon", "delayed:LATENCY_US:GBIT"),
        ("median", "all_reduce"),
    ] {
        let said = complaint(&words.split(' ').collect::<Vec<_>>());
        assert!(said.contains(allowed), "{words}: {said}");
    }
}

#[test]
fn a_step_is_measured_by_every_way_of_taking_it() {
    // Targets are missed by so small a model; only `--check` minds.
    let lines = step(
        "--layers 8,16,4 --batch 4 --rounds 2 --steps 1 --transport local,delayed:50:10",
        &[],
    );
    let rows = |transport: &str| -> Vec<&str> {
        let rows = lines.iter().filter(|line| line["kind"] == "row");
        rows.filter(|row| row["transport"] == transport)
            .filter_map(|row| row["contender"].as_str())
            .collect()
    };
    let outside = ["single_cores", "torch_ddp", "torch_zro", "torch_fsdp2"];
    let every = Contender::ALL.map(Contender::name);
    assert!(
        rows("local")
            .iter()
            .eq(every.iter().filter(|name| !outside.contains(name)))
    );
    assert!(
        rows("delayed:50:10")
            .iter()
            .all(|name| name.starts_with("ddp") || name.starts_with("zero"))
    );
    assert_eq!(rows("delayed:50:10").len(), 10);
    for row in lines.iter().filter(|line| line["kind"] == "row") {
        assert!(row["step_ms"].as_f64() > Some(0.0), "{row}");
        assert_eq!(row["blocks_ms"].as_array().map(Vec::len), Some(2), "{row}");
        assert_eq!(row["parameters"], 8 * 16 + 16 + 16 * 4 + 4);
        assert_eq!(row["optimizer"], "momentum");
        // One reduction for each of four parameters, or one for all.
        let buckets = match row["contender"].as_str() {
            Some("ddp_per_parameter") => 4.into(),
            Some(
                "ddp" | "ddp_inline" | "ddp_no_overlap" | "ddp_shard_a_rank" | "ddp_shards"
                | "zero_1" | "zero_2" | "zero_3",
            ) => 1.into(),
            _ => serde_json::Value::Null,
        };
        assert_eq!(row["buckets"], buckets, "{row}");
        let is_sharded = contender(row).starts_with("zero");
        assert_eq!(
            row["gathering_ms"].as_f64() > Some(0.0),
            is_sharded,
            "{row}"
        );
        assert_eq!(
            row["visible_ms"].is_f64(),
            !buckets.is_null() && !is_sharded
        );
        // Half of 212 parameters in f32, for each of two ranks, and what rides along.
        let unit = 212 / 2 * 4;
        let units = row["sent_bytes"].as_u64().map(|bytes| bytes / unit);
        match contender(row) {
            "ddp" | "zero_2" => assert_eq!(units, Some(2), "{row}"),
            "zero_3" => assert_eq!(units, Some(3), "{row}"),
            "plain" | "ddp_noop" => assert_eq!(units, None, "{row}"),
            _ => (),
        }
        // Parts of rank 0's steps, which are no longer than the slowest rank's.
        let parts = ["forward_ms", "backward_ms", "exposed_ms", "update_ms"];
        let parts: f64 = parts.iter().filter_map(|part| row[part].as_f64()).sum();
        let steps: Vec<f64> = serde_json::from_value(row["blocks_ms"].clone()).expect("numbers");
        let step = steps.iter().sum::<f64>() / steps.len() as f64;
        assert!(
            0.0 < parts && parts <= step * (1.0 + f64::EPSILON * 64.0),
            "{row}"
        );
    }
    let left_out = lines.iter().filter(|line| line["kind"] == "left_out");
    assert!(left_out.map(contender).eq(outside));
    let targets = || lines.iter().filter(|line| line["kind"] == "target");
    assert_eq!(targets().count(), 5);
    for target in targets() {
        let missing = outside.map(serde_json::Value::from);
        assert_eq!(
            target["met"].is_null(),
            missing.contains(&target["missing"]),
            "{target}"
        );
    }
}

/// What `bench step` says in JSON.
fn step(words: &str, more: &[&str]) -> Vec<serde_json::Value> {
    let words = words.split_whitespace().chain(more.iter().copied());
    let all: Vec<_> = ["step", "-J", "-"].into_iter().chain(words).collect();
    let output = bench(&all);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    let text = String::from_utf8(output.stdout).expect("text");
    let lines = text.lines().map(serde_json::from_str);
    lines.collect::<Result<_, _>>().expect("objects")
}

fn contender(line: &serde_json::Value) -> &str {
    line["contender"].as_str().expect("a name")
}

#[test]
fn every_row_says_by_which_optimizer_it_steps() {
    let lines = step(
        "--layers 8,16,4 --batch 4 --rounds 1 --steps 1 --transport local --optimizer adam",
        &[],
    );
    let rows = lines.iter().filter(|line| line["kind"] == "row");
    assert_eq!(rows.clone().count(), Contender::ALL.len() - 4);
    assert!(rows.clone().all(|row| row["optimizer"] == "adam"));
}

#[test]
fn the_stages_have_targets_where_the_update_is_long() {
    let targets = |layers: &str, optimizer: &str| -> Vec<(String, f64)> {
        // One row will do: what is not measured is told, too.
        let words = format!(
            "--layers {layers} --batch 1 --rounds 1 --steps 1 --transport local \
             --rows single_local --optimizer {optimizer}"
        );
        let lines = step(&words, &[]);
        let targets = lines.iter().filter(|line| line["kind"] == "target");
        let missing = |target: &serde_json::Value| {
            let missing = target["missing"].as_str().expect("a row").to_owned();
            (missing, target["bound"].as_f64().expect("a number"))
        };
        let stages = targets.map(missing);
        stages.filter(|(row, _)| row.starts_with("zero")).collect()
    };
    let stages = [("zero_1", 1.05), ("zero_2", 1.05), ("zero_3", 1.4)];
    let stages = stages.map(|(row, bound)| (row.to_owned(), bound));
    assert_eq!(targets("784,12700,10", "adam"), stages);
    assert_eq!(targets("784,12700,10", "momentum"), []);
    assert_eq!(targets("784,12500,10", "adam"), []);
}

#[test]
fn a_program_that_cannot_take_part_is_left_out_and_says_why() {
    let cannot = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cannot.sh");
    let lines = step(
        "--layers 8,4 --rounds 1 --steps 1 --transport local --rows ddp,torch_ddp,torch_fsdp2 \
         --torch",
        &[cannot],
    );
    let of = |kind| lines.iter().filter(move |line| line["kind"] == kind);
    assert!(of("row").map(contender).eq(["ddp"]));
    assert!(
        of("left_out")
            .map(contender)
            .eq(["torch_ddp", "torch_fsdp2"])
    );
    // With what it was asked for.
    let why = [
        "train momentum by ddp, being a test",
        "train momentum by fsdp2, being a test",
    ];
    assert!(
        of("left_out")
            .map(|line| line["why"].as_str().expect("text"))
            .eq(why)
    );
}

#[test]
fn torch_takes_steps_beside_ours() {
    let torch = std::env::var("LOCKSTEP_TORCH").unwrap_or_default();
    if torch.is_empty() {
        let required = std::env::var("LOCKSTEP_REQUIRE").unwrap_or_default();
        assert!(
            !required.split(',').any(|name| name == "torch"),
            "LOCKSTEP_REQUIRE names torch: set LOCKSTEP_TORCH to an interpreter that has it"
        );
        return eprintln!("SKIPPED: LOCKSTEP_TORCH names no Python with PyTorch");
    }
    let lines = step(
        "--layers 8,16,4 --batch 4 --rounds 1 --steps 1 --transport local --optimizer adam \
         --rows torch_ddp,torch_zro,torch_fsdp2 --torch",
        &[&torch],
    );
    let left_out: Vec<_> = lines
        .iter()
        .filter(|line| line["kind"] == "left_out")
        .collect();
    assert!(left_out.is_empty(), "{left_out:?}");
    let rows = lines.iter().filter(|line| line["kind"] == "row");
    assert!(
        rows.clone()
            .map(contender)
            .eq(["torch_ddp", "torch_zro", "torch_fsdp2"])
    );
    assert!(rows.clone().all(|row| row["step_ms"].as_f64() > Some(0.0)));
}

#[test]
fn a_program_that_does_not_answer_as_it_should_is_named() {
    for (program, said) in [
        ("/bin/echo", "where `ready momentum` was due"),
        ("/no/such", "/no/such"),
    ] {
        let output = bench(&[
            "step",
            "--layers",
            "8,4",
            "--rounds",
            "1",
            "--transport",
            "local",
            "--rows",
            "single_cores",
            "--two-cores",
            program,
        ]);
        assert_eq!(output.status.code(), Some(1), "{program}");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(error.contains(program) && error.contains(said), "{error}");
    }
}

#[test]
fn sizes_are_read_and_written() {
    for (text, bytes) in [
        ("8", 8),
        ("4K", 4096),
        ("1m", 1 << 20),
        ("2G", 2 << 30),
        ("0", 0),
    ] {
        assert_eq!(text.parse(), Ok(Bytes(bytes)));
    }
    for text in ["", "K", "-1", "1.5M", "1KK", "1B", "99999999999G"] {
        assert!(text.parse::<Bytes>().is_err(), "{text}");
    }
    assert_eq!(
        [512, 1024, 1536, 16 << 20].map(|bytes| Bytes(bytes).to_string()),
        ["512", "1K", "1536", "16M"]
    );
}

#[test]
fn a_sweep_ends_at_its_last_size() {
    let number = |number| std::num::NonZeroUsize::new(number).expect("above 0");
    let sweep = |first, last, next| {
        sizes(Bytes(first), Bytes(last), next)
            .map(|sizes| sizes.iter().map(|size| size.0).collect::<Vec<_>>())
    };
    assert_eq!(sweep(1, 9, Next::Factor(number(3))), Ok(vec![1, 3, 9]));
    assert_eq!(sweep(1, 8, Next::Step(number(4))), Ok(vec![1, 5]));
    assert_eq!(sweep(0, 8, Next::Step(number(8))), Ok(vec![0, 8]));
    assert_eq!(sweep(7, 7, Next::Factor(number(1))), Ok(vec![7]));
    assert!(
        sweep(0, 8, Next::Factor(number(2))).is_err()
            && sweep(1, 8, Next::Factor(number(1))).is_err()
    );
}

fn measured() -> Measured {
    Measured {
        route: Some(Algorithm::Ring.into()),
        times: Times::new(vec![10.0, 20.0, 30.0]),
        wrong: 0,
        sent: 1536,
        formula: 1536,
        unforeseen: 0,
    }
}

#[test]
fn a_row_counts_as_nccl_tests_do() {
    let job = Job::new(Collective::AllReduce, DType::F32, ReduceOp::Sum, 0, 2000, 4);
    let row = Row::new(&job, 4, &measured(), Some(5.0));
    assert_eq!(
        (row.count, row.time_us, row.min_us, row.p99_us),
        (500, 20.0, 10.0, 30.0)
    );
    assert_eq!((row.algbw, row.busbw), (0.1, 0.1 * 1.5));
    assert_eq!(row.of_limit, Some(0.5));
}

#[test]
fn a_wrong_element_or_byte_fails() {
    assert!(measured().holds());
    let wrong = Measured {
        wrong: 1,
        ..measured()
    };
    let unforeseen = Measured {
        unforeseen: 1,
        ..measured()
    };
    assert!(!wrong.holds() && !unforeseen.holds());
}

fn line(algorithm: Algorithm, alpha: f64, beta: f64) -> Curve {
    let sizes = (10..=24).map(|power| 1usize << power);
    Curve {
        collective: Collective::AllReduce,
        ranks: 4,
        algorithm,
        points: sizes
            .map(|bytes| (bytes, alpha + beta * bytes as f64 / 1024.0))
            .collect(),
    }
}

#[test]
fn a_curve_gives_its_cost_and_its_crossing() {
    let (tree, ring) = (
        line(Algorithm::Tree, 5.0, 0.5),
        line(Algorithm::Ring, 25.0, 0.25),
    );
    let (tree_cost, ring_cost) = (tree.cost(), ring.cost());
    for (cost, alpha, beta) in [(&tree_cost, 5.0, 0.5), (&ring_cost, 25.0, 0.25)] {
        assert!(
            (cost.alpha_us - alpha).abs() < 1e-6 && (cost.beta_us_per_kib - beta).abs() < 1e-9,
            "{cost:?}"
        );
    }
    // 80 KiB by the lines; between the sizes measured, where logarithms are taken, nearly.
    let fitted = tuning::crossover(&tree_cost, &ring_cost).expect("they cross");
    assert!(fitted.abs_diff(80 << 10) <= 1, "{fitted}");
    match ring.overtakes(&tree) {
        Overtaking::From(bytes) => assert!(bytes.abs_diff(80 << 10) < 4 << 10, "{bytes}"),
        other => panic!("{other:?}"),
    }
    let slow = line(Algorithm::Naive, 50.0, 1.0);
    assert_eq!(
        (ring.overtakes(&slow), slow.overtakes(&ring)),
        (Overtaking::Throughout, Overtaking::Never)
    );
}

#[test]
fn a_crossover_writes_settings_that_a_communicator_takes_and_a_picture() {
    let toml = scratch("tuning.toml");
    let path = toml.to_str().expect("text");
    let words = [
        "crossover",
        "--ranks",
        "2",
        "-e",
        "2K",
        "--rounds",
        "1",
        "-n",
        "1",
        "--out",
        path,
    ];
    let output = bench(&words);
    assert_eq!(output.status.code(), Some(0));
    let table = String::from_utf8(output.stdout).expect("text");
    let (_, seed) = table
        .split_once("ring or tree, 4 ranks")
        .expect("the seed's table");
    assert!(
        ["1K", "1M", "16M"].iter().all(|size| seed.contains(size)),
        "{table}"
    );
    let text = std::fs::read_to_string(&toml).expect("a file");
    let config: CommunicatorConfig = toml::from_str(&text).expect("settings");
    config.validate().expect("settings that can be");
    let known = |ranks: usize| move |cost: &&Cost| cost.ranks == ranks;
    for ranks in [2, 4] {
        assert_eq!(
            config.tuning.iter().filter(known(ranks)).count(),
            Algorithm::ALL.len()
        );
    }
    let picture = std::fs::read_to_string(toml.with_extension("svg")).expect("a file");
    assert!(
        picture.starts_with("<svg ") && picture.contains("halving") && !picture.contains("NaN")
    );
}

#[test]
fn the_recording_is_verified() {
    for words in [
        ["bench", "verify"].as_slice(),
        &["bench", "verify", "--deterministic"],
    ] {
        assert!(
            run(&BenchCli::parse_from(words)).expect("verified"),
            "{words:?}"
        );
    }
}

#[test]
fn more_calls_than_can_be_counted_are_refused() {
    let most = usize::MAX.to_string();
    for flag in ["-n", "-w"] {
        assert_eq!(
            code(&["all_reduce", "-b", "1K", "-e", "1K", flag, &most]),
            Some(2)
        );
    }
}

#[test]
#[cfg(target_os = "linux")]
fn lines_that_cannot_be_written_are_an_error() {
    let words = ["all_reduce", "-b", "1K", "-e", "1K", "-n", "1"];
    let output = bench(&[&words[..], &["-J", "/dev/full"]].concat());
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot write /dev/full"));
    let full = std::fs::File::options().write(true).open("/dev/full");
    let output = Command::new(env!("CARGO_BIN_EXE_bench"))
        .args(words)
        .stdout(full.expect("there is one"))
        .output()
        .expect("the program runs");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot write standard output"));
}
