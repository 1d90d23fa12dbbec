//! What a run writes down of itself: the trace, its drawing, and the records of its steps.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread;

use collectives::{CommunicatorConfig, launch};
use examples::{Error, News, Recording, Settings, Task, TrainReport, train};
use serde_json::Value;
use tracing::{info, info_span};

use crate::data::folder;

/// A span or mark of a trace, in nanoseconds.
#[derive(Debug)]
struct Traced {
    lane: String,
    name: String,
    start: u64,
    end: u64,
    args: Value,
}

impl Traced {
    fn number(&self, key: &str) -> u64 {
        self.args[key].as_u64().unwrap()
    }
}

/// The lanes of a trace in their order, and what lies on them in the order of its end.
fn read(path: &Path) -> (Vec<String>, Vec<Traced>) {
    let text = std::fs::read_to_string(path).unwrap();
    let events: Vec<Value> = serde_json::from_str(&text).unwrap();
    let of = |ph: &'static str| events.iter().filter(move |event| event["ph"] == ph);
    let metadata = |name: &'static str, key: &'static str| -> BTreeMap<u64, Value> {
        let found = of("M").filter(|event| event["name"] == name);
        found
            .map(|event| (event["tid"].as_u64().unwrap(), event["args"][key].clone()))
            .collect()
    };
    let names = metadata("thread_name", "name");
    let order = metadata("thread_sort_index", "sort_index");
    assert!(names.keys().eq(order.keys()));
    assert!(order.values().map(|index| index.as_u64()).is_sorted());
    let name = |event: &Value| names[&event["tid"].as_u64().unwrap()].as_str().unwrap();
    let nanoseconds = |time: &Value| (1e3 * time.as_f64().unwrap_or(0.0)).round() as u64;
    let traced = events
        .iter()
        .filter(|event| event["ph"] != "M")
        .map(|event| {
            assert_eq!(event["pid"], 1);
            let start = nanoseconds(&event["ts"]);
            Traced {
                lane: name(event).to_owned(),
                name: event["name"].as_str().unwrap().to_owned(),
                start,
                end: start + nanoseconds(&event["dur"]),
                args: event["args"].clone(),
            }
        })
        .collect();
    let lanes = names.values().map(|name| name.as_str().unwrap().to_owned());
    (lanes.collect(), traced)
}

fn settings(steps: usize, ranks: usize) -> Settings {
    let mut settings = Settings::compare();
    settings.train.steps = steps;
    settings.run.world_size = ranks;
    settings
}

fn traced(name: &str, mut settings: Settings) -> (TrainReport, PathBuf) {
    let path = folder(name).join("run.json");
    settings.log.trace = path.clone();
    (train(&Task::new(settings).unwrap(), |_| ()).unwrap(), path)
}

#[test]
fn every_rank_has_its_two_lanes_and_every_step_its_spans() {
    let (_, path) = traced("trace-lanes", settings(5, 3));
    let (lanes, traced) = read(&path);
    let expected = (0..3).flat_map(|rank| [format!("rank {rank}"), format!("rank {rank} comm")]);
    assert!(lanes.iter().cloned().eq(expected), "{lanes:?}");
    for rank in 0..3 {
        let lane = format!("rank {rank}");
        let of = |name: &str| -> Vec<&Traced> {
            let here = traced.iter().filter(|event| event.lane == lane);
            here.filter(|event| event.name == name).collect()
        };
        let steps = of("step");
        let numbers: Vec<u64> = steps.iter().map(|step| step.number("step")).collect();
        assert_eq!(numbers, [1, 2, 3, 4, 5]);
        for name in ["data", "forward"] {
            let parts = of(name);
            assert_eq!(parts.len(), 5, "{name}");
            for (part, step) in parts.iter().zip(&steps) {
                assert_eq!(part.number("rank"), rank);
                assert!(step.start <= part.start && part.end <= step.end, "{name}");
            }
        }
    }
}

#[test]
fn spans_of_a_lane_nest_or_are_apart() {
    let (_, path) = traced("trace-nest", settings(4, 2));
    let (lanes, traced) = read(&path);
    for lane in lanes {
        let mut spans: Vec<_> = traced.iter().filter(|event| event.lane == lane).collect();
        spans.sort_by_key(|span| (span.start, std::cmp::Reverse(span.end)));
        let mut around: Vec<&Traced> = Vec::new();
        for span in spans {
            around.retain(|outer| outer.end > span.start);
            for outer in &around {
                assert!(span.end <= outer.end, "{span:?} leaves {outer:?}");
            }
            around.push(span);
        }
    }
}

#[test]
fn all_lanes_have_one_clock_and_the_bytes_of_the_statistics() {
    let (report, path) = traced("trace-clock", settings(4, 3));
    let (_, traced) = read(&path);
    let mut calls: BTreeMap<u64, Vec<&Traced>> = BTreeMap::new();
    for event in traced.iter().filter(|event| event.name == "all_reduce") {
        calls.entry(event.number("call")).or_default().push(event);
    }
    // The last is that of the accuracy.
    let (tested, _) = calls.pop_last().unwrap();
    // Three buckets a step; no rank has its mean before all have begun.
    assert_eq!(calls.len(), 12);
    for (call, spans) in calls {
        assert_eq!(spans.len(), 3, "call {call}");
        let last_start = spans.iter().map(|span| span.start).max();
        let first_end = spans.iter().map(|span| span.end).min();
        assert!(last_start < first_end, "call {call}: {spans:?}");
        for span in spans {
            let ran = span.args["algorithm"].as_str().unwrap().to_owned();
            assert!(report.algorithms.contains(&ran), "{ran}");
        }
    }
    for rank in 0..3 {
        let calls = traced.iter().filter(|event| event.name == "all_reduce");
        let own =
            calls.filter(|event| event.number("rank") == rank && event.number("call") < tested);
        let bytes: u64 = own.map(|event| event.number("bytes")).sum();
        if rank == 0 {
            assert_eq!(bytes, report.moved.bytes_sent);
        }
        assert!(bytes > 0);
    }
}

#[test]
fn the_step_in_the_middle_is_drawn_with_a_row_for_every_lane() {
    let (_, path) = traced("trace-drawing", settings(5, 2));
    let drawing = std::fs::read_to_string(path.with_extension("svg")).unwrap();
    assert!(drawing.starts_with("<svg ") && drawing.ends_with("</svg>\n"));
    assert!(drawing.contains(">Step 3</text>"), "{drawing}");
    for (words, count) in [
        (">rank 0</text>", 1),
        (">rank 1</text>", 1),
        (">compute</text>", 2),
        (">comm</text>", 2),
        ("<title>data,", 2),
        ("<title>forward,", 2),
        // Three buckets on each of two ranks.
        ("<title>all_reduce,", 6),
    ] {
        assert_eq!(drawing.matches(words).count(), count, "{words}");
    }
    assert!(!drawing.contains("NaN") && !drawing.contains("inf"));
}

#[test]
fn fields_and_marks_and_inner_spans_are_recorded_from_every_thread() {
    let path = folder("trace-own").join("own.json");
    let recording = Recording::create(&path, 1, 2).unwrap();
    recording.record(|| {
        launch::spawn(2, &CommunicatorConfig::new(), |communicator| {
            let rank = communicator.rank();
            let backward =
                info_span!(target: "lockstep", "backward", rank, share = tracing::field::Empty);
            backward.in_scope(|| {
                info!(target: "lockstep", bucket = 1, "ready");
                info_span!(target: "elsewhere", "not ours").in_scope(|| ());
                info_span!(target: "lockstep", "wait", late = true, why = "a <reason>")
                    .in_scope(|| ());
            });
            backward.record("share", 0.5);
            backward.in_scope(|| ());
            Ok::<_, collectives::Error>(())
        })
        .unwrap();
        info_span!(target: "lockstep", "done").in_scope(|| ());
    });
    // Nobody listens any more.
    info_span!(target: "lockstep", "after").in_scope(|| ());
    recording.finish().unwrap();
    let (lanes, traced) = read(&path);
    assert_eq!(lanes[..2], ["rank 0", "rank 1"]);
    assert_eq!(lanes[2], thread::current().name().unwrap());
    let on = |lane: &str| -> Vec<(&str, Value)> {
        let here = traced.iter().filter(|event| event.lane == lane);
        here.map(|event| (event.name.as_str(), event.args.clone()))
            .collect()
    };
    for (lane, rank) in [("rank 0", 0), ("rank 1", 1)] {
        let expected = serde_json::json!([
            ["ready", { "bucket": 1 }],
            ["wait", { "late": true, "why": "a <reason>" }],
            ["backward", { "rank": rank }],
            ["backward", { "rank": rank, "share": 0.5 }],
        ]);
        assert_eq!(serde_json::to_value(on(lane)).unwrap(), expected);
    }
    assert_eq!(on(&lanes[2]), [("done", serde_json::json!({}))]);
    // No step, so nothing to draw.
    assert!(!path.with_extension("svg").exists());
}

#[test]
fn a_trace_is_json_also_after_an_error_and_after_a_panic() {
    let folder = folder("trace-broken");
    let mut broken = settings(5, 2);
    broken.log.trace = folder.join("error.json");
    broken.log.steps = folder.join("steps.jsonl");
    let error = train(&Task::new(broken).unwrap(), |news| {
        assert!(!matches!(news, News::Step { step: 2, .. }), "on purpose");
    });
    let error = error.unwrap_err();
    assert!(matches!(error, Error::Launch(_)), "{error}");
    let (lanes, _) = read(&folder.join("error.json"));
    let expected = ["rank 0", "rank 0 comm", "rank 1", "rank 1 comm"];
    assert_eq!(lanes, expected);
    assert!(!folder.join("error.svg").exists());

    let path = folder.join("panic.json");
    let outcome = std::panic::catch_unwind(|| {
        let recording = Recording::create(&path, 1, 1).unwrap();
        recording.record(|| {
            let _inside = info_span!(target: "lockstep", "forward").entered();
            panic!("a model");
        })
    });
    assert!(outcome.is_err());
    let (_, traced) = read(&path);
    assert_eq!(traced[0].name, "forward");
}

#[test]
fn the_log_has_a_whole_line_for_every_step_and_rank_with_equal_losses() {
    let path = folder("trace-log").join("steps.jsonl");
    let (steps, ranks) = (17, 3);
    let mut settings = settings(steps, ranks);
    settings.log.steps = path.clone();
    let last = train(&Task::new(settings).unwrap(), |_| ()).unwrap().step;
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.ends_with('\n'));
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), steps * ranks);
    let of = |rank: usize| lines.iter().filter(move |line| line["rank"] == rank);
    for rank in 0..ranks {
        let numbers = of(rank).map(|line| line["step"].as_u64().unwrap());
        assert!(numbers.eq(1..=steps as u64), "rank {rank}");
        for (line, other) in of(rank).zip(of(0)) {
            assert_eq!(line["loss"], other["loss"]);
            // 15 steps of 96 rows are all 1,440.
            assert_eq!(line["epoch"], 1 + (line["step"].as_u64().unwrap() - 1) / 15);
            assert_eq!((&line["samples"], &line["lr"]), (&96.into(), &0.1.into()));
            let time = |key: &str| line[key].as_u64().unwrap();
            assert!(time("backward_us") + time("exposed_us") <= time("step_us"));
            let hidden = line["hidden"].as_f64().unwrap();
            assert!((0.0..=1.0).contains(&hidden));
            let speed = line["samples_per_second"].as_f64().unwrap();
            // The time is cut to whole microseconds.
            let [most, least] = [0, 1].map(|more| 96e6 / (time("step_us") + more) as f64);
            assert!(least <= speed && speed <= most, "{line}");
            let buckets = line["buckets"].as_array().unwrap();
            assert_eq!(buckets.len(), 3);
            for bucket in buckets {
                let [ready, start, end] =
                    ["ready_us", "start_us", "end_us"].map(|key| bucket[key].as_u64().unwrap());
                assert!(ready <= start && start <= end, "{bucket}");
            }
        }
    }
    let end = of(0).next_back().unwrap();
    assert_eq!(end["loss"], last.loss);
    assert_eq!(end["buckets"][0]["bytes"], last.buckets[0].bytes);
}

#[test]
fn a_file_that_cannot_be_is_an_error_before_training_starts() {
    let nowhere = folder("trace-nowhere").join("no/such/run.json");
    let refused = |change: fn(&mut Settings, &Path)| {
        let mut settings = settings(3, 2);
        change(&mut settings, &nowhere);
        let task = Task::new(settings).unwrap();
        train(&task, |news: News| panic!("{news:?}")).unwrap_err()
    };
    for error in [
        refused(|settings, path| settings.log.trace = path.to_owned()),
        refused(|settings, path| settings.log.steps = path.to_owned()),
    ] {
        assert!(matches!(error, Error::Write { .. }));
        let text = error.to_string();
        assert!(
            text.contains("run.json: cannot be written: No such file"),
            "{text}"
        );
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error_after_training() {
    for change in [
        |settings: &mut Settings| settings.log.trace = "/dev/full".into(),
        |settings: &mut Settings| settings.log.steps = "/dev/full".into(),
    ] {
        let mut settings = settings(2, 2);
        change(&mut settings);
        let steps = std::sync::atomic::AtomicUsize::new(0);
        let error = train(&Task::new(settings).unwrap(), |news| {
            if let News::Step { step, .. } = news {
                steps.store(step, std::sync::atomic::Ordering::Relaxed);
            }
        })
        .unwrap_err();
        assert_eq!(steps.into_inner(), 2);
        let text = error.to_string();
        assert!(text.starts_with("/dev/full: cannot be written"), "{text}");
    }
}

#[test]
fn files_that_would_take_each_others_place_are_refused() {
    let refused = |trace: &str, steps: &str| {
        let mut settings = Settings::train();
        settings.log.trace = trace.into();
        settings.log.steps = steps.into();
        settings.check().map_err(|error| error.to_string())
    };
    assert_eq!(refused("", ""), Ok(()));
    assert_eq!(refused("a.json", "b.json"), Ok(()));
    let error = refused("a.svg", "").unwrap_err();
    assert_eq!(
        error,
        "log.trace = \"a.svg\": allowed is another extension: the drawing beside it takes svg"
    );
    for steps in ["a.json", "a.svg"] {
        let error = refused("a.json", steps).unwrap_err();
        assert!(
            error.contains("log.steps") && error.contains(steps),
            "{error}"
        );
    }
}
