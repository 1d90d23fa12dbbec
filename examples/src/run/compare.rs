//! `mlp compare`, printed.

use std::io::Write;
use std::path::Path;

use collectives::Place;
use ddp::{DdpConfig, Shards};

use super::{counted, percent, say, widths};
use crate::compare::tolerance;
use crate::{
    Columns, CompareFlags, Curve, Error, Log, Mode, ModeReport, Precision, Settings, Task, Traffic,
    Verdict, compare, curves_csv, curves_svg, grouped, print, timeline, train,
};

const COLUMNS: Columns<10> = Columns::new([
    ("mode", 11),
    ("ranks", 5),
    ("final loss", 10),
    ("max |Δ loss|", 12),
    ("bits equal", 10),
    ("buckets", 7),
    ("bytes sent/rank", 15),
    ("by formula", 12),
    ("hidden", 6),
    ("ran, verdict", 12),
]);

/// Compares and prints; the outcome is whether every verdict passed.
///
/// # Errors
/// [`Error`], before or while a mode runs.
pub fn run_compare(flags: &CompareFlags) -> Result<bool, Error> {
    let settings = flags.settings()?;
    let modes = Mode::read(&settings.compare.modes)?;
    if flags.print_config() {
        say(print(&settings).trim_end());
        return Ok(true);
    }
    let task = Task::new(settings)?;
    let out = task.settings().compare.out.as_path();
    make(out)?;
    let json = flags.json();
    if !json {
        introduce(&task, flags);
    }
    let reports = compare(&task, &modes, flags.fault(), |report| {
        match json {
            true => say(serde_json::to_string(report).expect("a report serialises")),
            false => say(line(report)),
        }
        for failure in &report.failures {
            drop(writeln!(std::io::stderr(), "{}: {failure}", report.mode));
        }
    })?;
    let [csv, svg] = write_curves(out, &reports)?;
    let passed = reports.iter().all(|report| report.verdict == Verdict::Pass);
    if !json {
        if modes.iter().any(|mode| mode.stage().is_some()) {
            share(&task, &reports);
        }
        conclude(&reports, passed);
        say(format_args!("curves: {csv}\n        {svg}"));
        if passed && !task.settings().compare.exact && reports.iter().any(hides_little) {
            show_overlap(task.settings())?;
        }
    }
    Ok(passed)
}

/// Whether so little of a mode's communication was hidden that it takes a word why.
fn hides_little(report: &ModeReport) -> bool {
    report.hidden.is_some_and(|share| share < 0.25)
}

/// Trains a model that is large enough to see how its buckets overlap the backward pass.
fn show_overlap(settings: &Settings) -> Result<(), Error> {
    let mut larger = settings.clone();
    if let [features, .., classes] = settings.model.layers[..] {
        larger.model.layers = vec![features, 1024, 1024, 1024, classes];
    }
    // More ranks than cores would wait for a core rather than for each other.
    larger.run.world_size = settings.run.world_size.min(2);
    larger.train.steps = 8;
    larger.ddp = DdpConfig::new().with_bucket_cap_mb(4.5);
    larger.log = Log::default();
    let task = Task::new(larger)?;
    let report = train(&task, |_| ())?;
    say(format_args!(
        "\nThe backward pass of so small a model is over before much can hide in it. Step {} of \
         {}\n({} parameters) on {}, {} of communication hidden:\n{}",
        task.steps(),
        widths(&task.settings().model.layers),
        grouped(task.parameters() as u64),
        counted(task.settings().run.world_size, "rank"),
        percent(report.step.hidden()),
        timeline(&report.step),
    ));
    say("· filling  ░ waiting its turn  █ all-reduce");
    Ok(())
}

/// What is compared, in a few lines, then the headings.
fn introduce(task: &Task, flags: &CompareFlags) {
    let settings = task.settings();
    say(format_args!(
        "{}, {} rows; model {} ({} parameters, {}); {} at {}; {} steps of {} rows",
        task.data().name,
        grouped(task.data().train.len() as u64),
        widths(&settings.model.layers),
        grouped(task.parameters() as u64),
        settings.model.dtype,
        settings.optim.kind,
        settings.optim.lr,
        task.steps(),
        settings.train.global_batch_size,
    ));
    let sizes: Vec<String> = settings
        .world_sizes()
        .iter()
        .map(usize::to_string)
        .collect();
    let sizes = sizes.join(", ");
    match settings.compare.exact {
        true => say(format_args!(
            "same start, same global batches in {} micro-shards; every loss and every weight must be \
             == those of single,\nwhich sums its shards one by one; {sizes} ranks are threads",
            settings.ddp.micro_shards,
        )),
        false => say(format_args!(
            "same start, same global batches; tolerance {:.0e} a step; {sizes} ranks are threads",
            tolerance(task),
        )),
    }
    announce_blocks(settings);
    let left_out = settings.modes_left_out(&Settings::compare().compare.modes);
    if !left_out.is_empty() {
        let left_out = left_out.join(", ");
        say(format_args!(
            "left out, since these settings cannot have it: {left_out}"
        ));
    }
    let defaults = ddp::DdpConfig::default();
    say(format_args!(
        "buckets: the first up to {} MB, the others up to {} MB (usually {} and {})",
        settings.ddp.first_bucket_mb,
        settings.ddp.bucket_cap_mb,
        defaults.first_bucket_mb,
        defaults.bucket_cap_mb
    ));
    if let Some(fault) = flags.fault() {
        say(format_args!("injected fault: {fault:?}"));
    }
    say(format_args!("\n{}", COLUMNS.heading()));
}

/// Says for which world sizes micro-shards do not close, and what that costs.
fn announce_blocks(settings: &Settings) {
    if settings.ddp.micro_shards == 0 {
        return;
    }
    for world in settings.world_sizes() {
        let place = Place { rank: 0, world };
        let Ok(shards) = Shards::new(settings.ddp.micro_shards, place) else {
            continue;
        };
        if shards.is_closed() {
            continue;
        }
        let list = |of: &dyn Fn(usize) -> usize| {
            let counts: Vec<String> = (0..world).map(|rank| of(rank).to_string()).collect();
            counts.join(", ")
        };
        say(format_args!(
            "{world} ranks hold {} shards, which are no nodes of the tree: they exchange {} blocks a \
             bucket instead of one sum each",
            list(&|rank| shards.of(rank).len()),
            list(&|rank| shards.vectors_of(rank)),
        ));
    }
}

fn line(report: &ModeReport) -> String {
    let verdict = match report.verdict {
        Verdict::Pass => "pass",
        Verdict::Fail => "FAIL",
    };
    let none = || "-".to_owned();
    let of_ranks = |value: u64| match report.buckets {
        0 => none(),
        _ => grouped(value),
    };
    COLUMNS.line([
        report.mode.clone(),
        report.world_size.to_string(),
        format!("{:.6}", report.final_loss),
        format!("{:.2e}", report.max_abs_diff),
        match report.bits_equal_ranks {
            true => "yes".to_owned(),
            false => "NO".to_owned(),
        },
        of_ranks(report.buckets as u64),
        of_ranks(report.bytes_per_rank),
        of_ranks(report.bytes_formula),
        report.hidden.map_or_else(none, percent),
        format!(
            "{}, {}{verdict}",
            report.algorithm.as_deref().unwrap_or("-"),
            if report.exact { "==, " } else { "" }
        ),
    ])
}

const SHARES: Columns<11> = Columns::new([
    ("mode", 11),
    ("ranks", 5),
    ("all_reduce", 10),
    ("reduce_scatter", 14),
    ("all_gather", 10),
    ("all_to_all", 10),
    ("units", 5),
    ("by formula", 10),
    ("held/rank", 9),
    ("by formula", 10),
    ("peak at most", 12),
]);

/// What the ranks of each mode moved and held.
fn share(task: &Task, reports: &[ModeReport]) {
    let size = match task.settings().model.dtype {
        Precision::F32 => 4,
        Precision::F64 => 8,
    };
    say(format_args!(
        "\nSent in a step, in units of (N-1)/N of the model's {} bytes, mean of the ranks; and bytes of \
         parameters,\ngradients and optimizer's state between backward pass and step, of the rank that \
         holds most:\n\n{}",
        grouped((task.parameters() * size) as u64),
        SHARES.heading()
    ));
    for report in reports.iter().filter(|report| !report.traffic.is_empty()) {
        say(share_line(report));
    }
}

fn share_line(report: &ModeReport) -> String {
    let alone = report.world_size == 1;
    let units = |units: f64| match alone {
        true => "-".to_owned(),
        false => format!("{units:.2}"),
    };
    let of = |name: &str| {
        let mut found = report.traffic.iter();
        let found = found.find(|traffic| traffic.collective == name);
        units(found.map_or(0.0, |traffic| traffic.units))
    };
    let sum: f64 = report.traffic.iter().map(|traffic| traffic.units).sum();
    let all = |of: fn(&Traffic) -> u64| report.traffic.iter().map(of).sum::<u64>() as f64;
    let counted = all(|traffic| traffic.bytes);
    let formula = match counted > 0.0 {
        true => sum * all(|traffic| traffic.bytes_formula) / counted,
        false => 0.0,
    };
    let bytes = |bytes: usize| match bytes {
        0 => "-".to_owned(),
        _ => grouped(bytes as u64),
    };
    SHARES.line([
        report.mode.clone(),
        report.world_size.to_string(),
        of("all_reduce"),
        of("reduce_scatter"),
        of("all_gather"),
        of("all_to_all"),
        units(sum),
        units(formula),
        bytes(report.held_bytes),
        bytes(report.held_formula),
        bytes(report.peak_formula),
    ])
}

fn conclude(reports: &[ModeReport], passed: bool) {
    if let Some(report) = reports.iter().find(|report| report.buckets > 0) {
        say(format_args!(
            "\nEach step reduced {}.",
            counted(report.buckets, "bucket")
        ));
    }
    if let Some(report) = reports.iter().max_by_key(|report| report.partial_bytes)
        && report.partial_bytes > 0
    {
        say(format_args!(
            "Beside its buckets a rank held up to {} bytes of partial sums, at world size {}.",
            grouped(report.partial_bytes as u64),
            report.world_size,
        ));
    }
    say(match passed {
        true if reports.iter().any(|report| report.exact) => {
            "All modes agree, in every bit of every loss and every weight."
        }
        true => "All modes agree.",
        false => "Not all modes agree; the reasons are on standard error.",
    });
}

/// Writes the loss of every mode as CSV and as a drawing; returns where.
fn write_curves(folder: &Path, reports: &[ModeReport]) -> Result<[String; 2], Error> {
    let curves: Vec<Curve> = reports
        .iter()
        .map(|report| Curve {
            name: match (reports.iter())
                .filter(|other| other.mode == report.mode)
                .count()
            {
                1 => report.mode.clone(),
                _ => format!("{} N={}", report.mode, report.world_size),
            },
            values: report.losses.clone(),
        })
        .collect();
    let drawing = curves_svg("Loss of each step", "step", "loss", &merged(&curves));
    Ok([
        write(folder, "compare.csv", &curves_csv(&curves))?,
        write(folder, "compare.svg", &drawing)?,
    ])
}

/// One curve for those that are the same in every bit, which would hide each other.
fn merged(curves: &[Curve]) -> Vec<Curve> {
    let same = |left: &Curve, right: &Curve| {
        left.values.len() == right.values.len()
            && left
                .values
                .iter()
                .zip(&right.values)
                .all(|(left, right)| left.to_bits() == right.to_bits())
    };
    let mut merged: Vec<(Curve, usize)> = Vec::new();
    for curve in curves {
        match merged.iter_mut().find(|(first, _)| same(first, curve)) {
            Some((_, count)) => *count += 1,
            None => merged.push((curve.clone(), 1)),
        }
    }
    let named = |(curve, count): (Curve, usize)| match count {
        1 => curve,
        _ => Curve {
            name: format!("{} and {} more, ==", curve.name, count - 1),
            ..curve
        },
    };
    merged.into_iter().map(named).collect()
}

/// Makes the folder, before the work rather than after it.
fn make(folder: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(folder).map_err(|error| Error::write(folder, &error))
}

fn write(folder: &Path, name: &str, text: &str) -> Result<String, Error> {
    let path = folder.join(name);
    std::fs::write(&path, text).map_err(|error| Error::write(&path, &error))?;
    Ok(path.display().to_string())
}
