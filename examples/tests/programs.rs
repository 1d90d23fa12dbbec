//! The binaries themselves: what they print where, and their exit codes.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::data::folder;

fn mlp(folder: &Path, arguments: &str) -> Output {
    run(env!("CARGO_BIN_EXE_mlp"), folder, arguments)
}

fn kmeans(folder: &Path, arguments: &str) -> Output {
    run(env!("CARGO_BIN_EXE_kmeans"), folder, arguments)
}

fn run(program: &str, folder: &Path, arguments: &str) -> Output {
    Command::new(program)
        .args(arguments.split_whitespace())
        .current_dir(folder)
        .output()
        .unwrap()
}

fn out(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn err(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn compare_prints_one_json_object_a_mode_and_writes_the_curves() {
    let folder = folder("programs-compare");
    let output = mlp(
        &folder,
        "compare --steps 5 --modes single,ddp:tree --json --out curves",
    );
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    let text = out(&output);
    let reports: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(reports.len(), 2);
    assert_eq!(reports[1]["mode"], "ddp:tree");
    assert_eq!(reports[1]["losses"].as_array().unwrap().len(), 5);
    let csv = std::fs::read_to_string(folder.join("curves/compare.csv")).unwrap();
    assert_eq!(csv.lines().next(), Some("step,single,ddp:tree"));
    assert!(folder.join("curves/compare.svg").is_file());
}

#[test]
fn compare_says_how_many_buckets_and_where_the_curves_lie() {
    let folder = folder("programs-text");
    let output = mlp(&folder, "compare --steps 3");
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    let text = out(&output);
    assert!(text.contains("Each step reduced 3 buckets"), "{text}");
    assert!(text.contains("target/lockstep/compare.svg"), "{text}");
    assert!(
        text.contains("reduce_scatter") && text.contains("held/rank"),
        "{text}"
    );
    for mode in [
        "single", "ddp:ring", "ddp:tree", "zero:1", "zero:2", "zero:3",
    ] {
        assert!(text.lines().any(|line| line.starts_with(mode)), "{text}");
    }
}

#[test]
fn a_failed_verdict_is_exit_code_1() {
    let folder = folder("programs-fault");
    let output = mlp(
        &folder,
        "compare --steps 4 --modes ddp:ring --inject full-batch --json",
    );
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        serde_json::from_str::<Value>(&out(&output)).unwrap()["verdict"],
        "fail"
    );
    assert!(err(&output).contains("384 rows"), "{}", err(&output));
    assert!(!out(&mlp(&folder, "compare --help")).contains("inject"));
}

#[test]
fn a_loss_that_is_no_number_is_a_failure_of_both_commands() {
    let folder = folder("programs-nan");
    for command in ["train --epochs 1 --lr 1e30", "compare --steps 3 --lr 1e30"] {
        let output = mlp(&folder, command);
        assert_eq!(output.status.code(), Some(1), "{command}: {}", out(&output));
        assert!(!err(&output).contains("panicked"), "{}", err(&output));
    }
}

#[test]
fn wrong_flags_and_settings_are_exit_code_2_and_no_panic() {
    let folder = folder("programs-wrong");
    std::fs::write(folder.join("wrong.toml"), "[train]\nstep = 3\n").unwrap();
    for (arguments, words) in [
        (
            "compare --world-size 0",
            "run.world_size = 0: allowed is 1 to 256",
        ),
        ("compare --world-size four", "four"),
        ("compare --world-size -1", "-1"),
        ("compare --modes ddp:star", "allowed are single, ddp:"),
        ("compare --modes zero:4", "zero:1, zero:2, zero:3"),
        ("compare --modes zero:2:star", "as in zero:2:tree"),
        (
            "compare --modes zero:2 --comm-hook bf16",
            "ddp.comm_hook = bf16",
        ),
        (
            "compare --modes zero:3 --micro-shards 8 --world-size 3",
            "ddp.micro_shards = 8: allowed is a multiple of 3",
        ),
        (
            "train --zero-stage 4",
            "--zero-stage: zero.stage = 4: allowed is 0 (ddp), 1, 2 or 3",
        ),
        (
            "train --zero-stage -1",
            "zero.stage = -1: allowed is 0 (ddp), 1, 2 or 3",
        ),
        (
            "train --zero-stage 2 --comm-hook fp16",
            "ddp.comm_hook = fp16",
        ),
        (
            "train --zero-stage 3 --check-replicas-every 2",
            "ddp.check_replicas_every = 2: allowed is 0 at stage 3",
        ),
        (
            "train --zero-stage 3 --micro-shards 8 --world-size 3",
            "ddp.micro_shards = 8: allowed is a multiple of 3",
        ),
        ("compare --global-batch 0", "train.global_batch_size = 0"),
        (
            "compare --inject plain-mean --world-size 1",
            "run.world_size = 1",
        ),
        (
            "compare --config wrong.toml",
            "wrong.toml: unknown key \"train.step\"; the nearest known key is \"train.steps\"",
        ),
        ("compare --config none.toml", "none.toml: cannot be read"),
        ("compare --dtype f16", "f16"),
        ("train --optimizer sdg", "--optimizer: optim.kind = \"sdg\""),
        ("train --lr nan", "optim.lr"),
        ("train --lr -1", "-1"),
        ("train --layers 64,x,10", "x"),
        ("train --layers 64,128,12", "10 last"),
        ("train --data nowhere", "train-images-idx3-ubyte"),
        ("train --algorithm star", "star"),
        ("train --overlap maybe", "maybe"),
        ("train --bucket-cap-mb inf", "ddp.bucket_cap_mb"),
        ("train --timeout 0", "collectives.timeout_s"),
        (
            "train --layers 64,1000000000000,10",
            "up to 1000000000 parameters",
        ),
        ("train --steps 0 --epochs 0", "train.epochs = 0"),
        (
            "compare --inject plain-mean --world-size 4 --global-batch 4",
            "train.global_batch_size = 4: allowed is 5 or more",
        ),
    ] {
        let output = mlp(&folder, arguments);
        assert_eq!(
            output.status.code(),
            Some(2),
            "{arguments}: {}",
            err(&output)
        );
        assert!(
            err(&output).contains(words),
            "{arguments}: {}",
            err(&output)
        );
        assert!(
            !err(&output).contains("panicked"),
            "{arguments}: {}",
            err(&output)
        );
    }
}

#[test]
fn train_reports_loss_accuracy_speed_and_overlap_and_draws_no_bar_into_a_pipe() {
    let folder = folder("programs-train");
    let output = mlp(
        &folder,
        "train --epochs 2 --world-size 2 --optimizer adam --lr 0.01",
    );
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    assert_eq!(err(&output), "");
    let text = out(&output);
    assert!(
        text.contains("test accuracy") && text.contains("samples/s"),
        "{text}"
    );
    assert!(text.contains("epsilon 1e-8 as in PyTorch"), "{text}");
    let last = text.lines().find(|line| line.starts_with("2 ")).unwrap();
    let accuracy: f64 = last.split_whitespace().nth(3).unwrap().parse().unwrap();
    assert!(accuracy > 0.8, "{text}");
    assert!(text.contains("bit for bit"), "{text}");
}

#[test]
fn train_says_the_stage_what_it_held_and_what_it_sent() {
    let folder = folder("programs-stage");
    for stage in 0..=3 {
        let arguments = format!("train --steps 4 --world-size 2 --zero-stage {stage}");
        let output = mlp(&folder, &arguments);
        assert_eq!(output.status.code(), Some(0), "{}", err(&output));
        let text = out(&output);
        let says = |words: &str| text.contains(words);
        assert_eq!(
            says(&format!("stage {stage}: a rank held up to")),
            stage > 0,
            "{text}"
        );
        assert_eq!(
            says(&format!("sharded by stage {stage}")),
            stage > 0,
            "{text}"
        );
        assert_eq!(says("reduce-scatter a step by"), stage > 1, "{text}");
        assert_eq!(says("reduce_scatter 19,"), stage > 1, "{text}");
    }
}

#[test]
fn compare_leaves_out_of_the_usual_modes_what_other_settings_refuse() {
    let folder = folder("programs-fit");
    for (arguments, modes) in [
        (
            "--comm-hook bf16 --tolerance 1",
            "single,ddp:ring,ddp:tree,zero:1",
        ),
        (
            "--check-replicas-every 2",
            "single,ddp:ring,ddp:tree,zero:1,zero:2",
        ),
        (
            "--micro-shards 8 --world-size 3",
            "single,ddp:ring,ddp:tree,zero:1,zero:2",
        ),
    ] {
        let output = mlp(&folder, &format!("compare --steps 3 --json {arguments}"));
        assert_eq!(output.status.code(), Some(0), "{}", err(&output));
        let mode = |line: &str| {
            let report: Value = serde_json::from_str(line).unwrap();
            report["mode"].as_str().unwrap().to_owned()
        };
        let text = out(&output);
        let ran: Vec<String> = text.lines().map(mode).collect();
        assert_eq!(ran.join(","), modes);
    }
}

#[test]
fn train_says_where_trace_and_records_lie() {
    let folder = folder("programs-trace");
    let output = mlp(
        &folder,
        "train --steps 3 --world-size 2 --trace run.json --log steps.jsonl",
    );
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    let text = out(&output);
    for file in ["run.json", "run.svg", "steps.jsonl"] {
        assert!(text.contains(file), "{text}");
        assert!(folder.join(file).is_file(), "{file}");
    }
    let output = mlp(&folder, "train --trace nowhere/run.json");
    assert_eq!(output.status.code(), Some(1));
    let expected = "error: nowhere/run.json: cannot be written: No such file or directory";
    assert!(err(&output).starts_with(expected), "{}", err(&output));
}

#[test]
fn printed_settings_have_the_flags_in_them_and_are_a_config_file() {
    let folder = folder("programs-print");
    let output = mlp(
        &folder,
        "train --preset wide --lr 0.25 --algorithm tree --trace a.json --log b.jsonl --print-config",
    );
    let text = out(&output);
    assert!(
        text.contains("lr = 0.25") && text.contains("algorithm = \"tree\""),
        "{text}"
    );
    assert!(text.contains("2048"), "{text}");
    assert!(
        text.contains("[log]\ntrace = \"a.json\"\nsteps = \"b.jsonl\"\n"),
        "{text}"
    );
    assert!(!folder.join("a.json").exists());
    std::fs::write(folder.join("printed.toml"), &text).unwrap();
    let again = mlp(&folder, "train --config printed.toml --print-config");
    assert_eq!(out(&again), text);
}

#[test]
fn kmeans_ends_with_an_object_of_the_result() {
    let folder = folder("programs-kmeans");
    for world in [1, 3] {
        let output = kmeans(
            &folder,
            &format!("fit --world-size {world} --json --algorithm ring"),
        );
        assert_eq!(output.status.code(), Some(0), "{}", err(&output));
        let text = out(&output);
        let result: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        assert_eq!(result["iterations"], 9);
        assert_eq!(result["counts"], serde_json::json!([39, 50, 61]));
        assert_eq!(result["inertia"].as_array().unwrap().len(), 9);
        assert_eq!(result["centroids"].as_array().unwrap().len(), 3);
        assert_eq!(result["bits_equal_ranks"], true);
    }
    let text = out(&kmeans(&folder, "fit"));
    assert!(text.contains("404.3 183.1 329.3 117.2 61"), "{text}");
    assert!(text.contains("9 all-reduces of 15 f64"), "{text}");
}

#[test]
fn kmeans_refuses_what_cannot_be_with_exit_code_2() {
    let folder = folder("programs-kmeans-wrong");
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
    write("ten.csv", "0\n1\n2\n3\n4\n5\n6\n7\n8\n9\n");
    write("two.csv", "0\n9\n");
    write("wide.csv", "0,0\n9,9\n");
    write("nan.csv", "0\n1\n10\n11\nNaN\n");
    write("ragged.csv", "0,1\n1\n");
    write("empty.csv", "");
    for (arguments, words) in [
        ("fit --k 0", "run.k = 0"),
        ("fit --k 4", "the start has 3 rows, expected k = 4"),
        ("fit --data ten.csv", "--init FILE.csv"),
        (
            "fit --data ten.csv --k 11",
            "k = 11 clusters of n = 10 rows",
        ),
        (
            "fit --data two.csv --init ten.csv",
            "k = 10 clusters of n = 2 rows",
        ),
        (
            "fit --data ten.csv --init wide.csv",
            "the start has 2 columns, expected 1",
        ),
        (
            "fit --data nan.csv --init two.csv",
            "nan.csv: row 4 (line 5)",
        ),
        (
            "fit --data ragged.csv --init wide.csv",
            "row 1 (line 2) has 1 columns, expected 2",
        ),
        ("fit --data empty.csv --init two.csv", "empty.csv: no rows"),
        (
            "fit --data none.csv --init two.csv",
            "none.csv: cannot be read",
        ),
        ("fit --max-iter 0", "run.max_iter = 0"),
        ("fit --epsilon -1", "-1"),
        ("fit --algorithm star", "star"),
        ("fit --world-size 0", "run.world_size = 0"),
    ] {
        let output = kmeans(&folder, arguments);
        assert_eq!(
            output.status.code(),
            Some(2),
            "{arguments}: {}",
            err(&output)
        );
        assert!(
            err(&output).contains(words),
            "{arguments}: {}",
            err(&output)
        );
        assert_eq!(out(&output), "", "{arguments}");
    }
    let output = kmeans(
        &folder,
        "fit --data ten.csv --init two.csv --world-size 8 --json",
    );
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_behind_standard_output_is_exit_code_1() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full");
    let output = Command::new(env!("CARGO_BIN_EXE_kmeans"))
        .args(["fit", "--json"])
        .stdout(full.unwrap())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(err(&output).contains("standard output: cannot be written"));
}

#[test]
fn memory_is_as_predicted_and_drawn() {
    let folder = folder("programs-memory");
    let output = mlp(
        &folder,
        "memory --layers 256,256,256,10 --world-size 1,3 --svg memory.svg",
    );
    let text = out(&output);
    assert_eq!(output.status.code(), Some(0), "{text}{}", err(&output));
    // ddp and three stages, for two world sizes each.
    let rows: Vec<Vec<&str>> = text
        .lines()
        .map(|line| line.split_whitespace().collect())
        .filter(|row: &Vec<&str>| row.first().is_some_and(|stage| stage.parse::<u8>().is_ok()))
        .collect();
    let begin = |row: &Vec<&str>| [row[0], row[1]].map(str::to_owned);
    let expected = ["0", "1", "2", "3"].map(|stage| ["1", "3"].map(|world| [stage, world]));
    let expected = expected
        .concat()
        .into_iter()
        .map(|row| row.map(str::to_owned));
    assert!(rows.iter().map(begin).eq(expected), "{text}");
    assert!(text.contains("All is as predicted"), "{text}");
    let drawing = std::fs::read_to_string(folder.join("memory.svg")).unwrap();
    assert!(drawing.contains("stage 3") && drawing.ends_with("</svg>\n"));
}

#[test]
fn memory_refuses_what_it_has_no_formula_for() {
    let folder = folder("programs-memory-refused");
    for (flags, named) in [
        ("memory --optimizer sgd", "optim.kind"),
        ("memory --world-size 0", "memory.world_sizes"),
    ] {
        let output = mlp(&folder, flags);
        assert_eq!(output.status.code(), Some(2), "{flags}");
        let said = err(&output);
        let flag = flags.split_whitespace().nth(1).unwrap();
        assert!(said.contains(named) || said.contains(flag), "{said}");
    }
}
