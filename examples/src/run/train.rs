//! `mlp train`, printed.

use indicatif::{ProgressBar, ProgressStyle};
use zero::{Memory, Stage};

use super::{counted, percent, say, widths};
use crate::trace::drawing_path;
use crate::{
    Columns, Epoch, Error, News, OptimizerKind, Task, TrainFlags, TrainReport, grouped, print,
    timeline, train,
};

const COLUMNS: Columns<7> = Columns::new([
    ("epoch", 5),
    ("steps", 6),
    ("loss", 8),
    ("test accuracy", 13),
    ("samples/s", 10),
    ("hidden", 6),
    ("exposed/step", 12),
]);

/// Trains and prints; the outcome is whether all ranks ended with the same
/// bits, and with a loss that is a number.
///
/// # Errors
/// [`Error`], before or while training runs.
pub fn run_train(flags: &TrainFlags) -> Result<bool, Error> {
    let settings = flags.settings()?;
    if flags.print_config() {
        say(print(&settings).trim_end());
        return Ok(true);
    }
    let task = Task::new(settings)?;
    introduce(&task);
    // Draws to standard error, and nothing at all if that is no terminal.
    let bar = ProgressBar::new(task.steps() as u64);
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} steps, {msg} ({eta} left)");
    bar.set_style(style.expect("the template is well formed"));
    let report = train(&task, |news| match news {
        News::Step { step, loss } => {
            bar.set_position(step as u64);
            bar.set_message(format!("loss {loss:.4}"));
        }
        News::Epoch(epoch) => bar.suspend(|| say(line(&epoch))),
    });
    bar.finish_and_clear();
    let report = report?;
    let steps = report.last.steps as u64;
    let buckets: Vec<String> = report
        .buckets
        .iter()
        .map(|&len| grouped(len as u64))
        .collect();
    let stage = task.settings().zero.stage;
    let reduced = match stage > Some(Stage::One) {
        true => "reduce-scatter",
        false => "all-reduce",
    };
    say(format_args!(
        "\n{} a step by {}, of {} elements; rank 0 sent {} bytes a step",
        counted(buckets.len(), reduced),
        report.algorithms.join("+"),
        buckets.join(" + "),
        grouped(report.moved.bytes_sent / steps),
    ));
    if let Some(stage) = stage {
        say_shards(stage, &report, steps);
    }
    say(format_args!(
        "the last one on rank 0:\n{}\n",
        timeline(&report.step)
    ));
    say(match report.bits_equal_ranks {
        true => "All ranks ended with the same weights, bit for bit.",
        false => "RANKS ENDED WITH DIFFERENT WEIGHTS.",
    });
    if report.skipped > 0 {
        let ranks: Vec<String> = report.non_finite.iter().map(usize::to_string).collect();
        say(format_args!(
            "All ranks left out {}, since gradients were no numbers{}.",
            counted(report.skipped, "step"),
            match ranks.is_empty() {
                true => " once they were summed".to_owned(),
                false => format!(" on rank {}", ranks.join(", ")),
            },
        ));
    }
    let log = &task.settings().log;
    if !log.trace.as_os_str().is_empty() {
        let drawing = drawing_path(&log.trace);
        say(format_args!(
            "trace: {}\n       {}",
            log.trace.display(),
            drawing.display()
        ));
    }
    if !log.steps.as_os_str().is_empty() {
        say(format_args!("steps: {}", log.steps.display()));
    }
    let finite = report.last.loss.is_finite();
    if !finite {
        say("THE LOSS IS NO NUMBER ANY MORE; a smaller --lr may help.");
    }
    Ok(report.bits_equal_ranks && finite)
}

/// What a stage moves and holds.
fn say_shards(stage: Stage, report: &TrainReport, steps: u64) {
    let sent = report.sent.iter();
    let sent: Vec<String> = sent
        .map(|(kind, bytes)| format!("{kind} {}", grouped(bytes / steps)))
        .collect();
    if !sent.is_empty() {
        say(format_args!("of these {}", sent.join(", ")));
    }
    let total = |memory: &Memory| grouped(memory.total() as u64);
    let Memory {
        parameters,
        gradients,
        state,
    } = report.held;
    say(format_args!(
        "stage {}: a rank held up to {} bytes, {} of parameters, {} of gradients, {} of the optimizer's \
         state; by formula {}",
        u8::from(stage),
        total(&report.held),
        grouped(parameters as u64),
        grouped(gradients as u64),
        grouped(state as u64),
        total(&report.held_formula),
    ));
}

fn introduce(task: &Task) {
    let settings = task.settings();
    let optim = &settings.optim;
    let note = match optim.kind {
        OptimizerKind::Sgd => "",
        OptimizerKind::Momentum => " (dampening 0 as in PyTorch; Burn has 0.1)",
        OptimizerKind::Adam | OptimizerKind::AdamW => {
            " (epsilon 1e-8 as in PyTorch; Burn has 1e-5)"
        }
    };
    say(format_args!(
        "{}, {} rows to train on, {} to test; model {} ({} parameters, {})",
        task.data().name,
        grouped(task.data().train.len() as u64),
        grouped(task.data().test.len() as u64),
        widths(&settings.model.layers),
        grouped(task.parameters() as u64),
        settings.model.dtype,
    ));
    say(format_args!(
        "{} at {}{note}; {} steps of {} rows over {} ranks{}; overlap {}",
        optim.kind,
        optim.lr,
        task.steps(),
        settings.train.global_batch_size,
        settings.run.world_size,
        match settings.zero.stage {
            None => String::new(),
            Some(stage) => format!(", sharded by stage {}", u8::from(stage)),
        },
        match settings.ddp.overlap {
            true => "on",
            false => "off",
        },
    ));
    say(format_args!("\n{}", COLUMNS.heading()));
}

fn line(epoch: &Epoch) -> String {
    COLUMNS.line([
        epoch.epoch.to_string(),
        epoch.steps.to_string(),
        format!("{:.4}", epoch.loss),
        format!("{:.3}", epoch.accuracy),
        format!("{:.0}", epoch.samples_per_second),
        percent(epoch.hidden),
        format!("{:.2} ms", 1e3 * epoch.exposed.as_secs_f64()),
    ])
}
