//! `mlp memory`, printed.

use super::{say, widths};
use crate::memory::constants;
use crate::report::{Bar, memory_svg};
use crate::{
    Columns, CountAllocations, Error, MemoryFlags, Settings, WorldMemory, grouped, memory, print,
};

const COLUMNS: Columns<11> = Columns::new([
    ("stage", 5),
    ("ranks", 5),
    ("parameters", 10),
    ("gradients", 9),
    ("state", 8),
    ("held", 8),
    ("counted", 15),
    ("buckets", 7),
    ("gathered", 8),
    ("peak", 8),
    ("counted", 15),
]);

/// Predicts, counts, prints and draws; the outcome is whether all is as predicted.
///
/// # Errors
/// [`Error`], before or while it runs.
pub fn run_memory(flags: &MemoryFlags, count: CountAllocations) -> Result<bool, Error> {
    let settings = flags.settings()?;
    if flags.print_config() {
        say(print(&settings).trim_end());
        return Ok(true);
    }
    introduce(&settings);
    let mut worlds = Vec::new();
    memory(&settings, count, |world| {
        say(line(&world));
        worlds.push(world);
    })?;
    let mut passed = true;
    say("");
    for world in &worlds {
        for rank in &world.ranks {
            for (what, predicted, counted) in rank.wrong(world.ranks.len()) {
                passed = false;
                say(format_args!(
                    "STAGE {}, RANK {} OF {}: {what} is {} bytes, and {} were predicted.",
                    stage(world),
                    rank.report.rank,
                    world.ranks.len(),
                    grouped(counted as u64),
                    grouped(predicted as u64),
                ));
            }
        }
    }
    if passed {
        let largest = settings.memory.world_sizes.iter().max();
        let constants = constants(largest.copied().unwrap_or(1)) >> 10;
        say(match settings.memory.measure {
            true => format!(
                "All is as predicted, within 1 % and constants of up to {constants} KiB a rank; no peak is above its prediction."
            ),
            false => "What lies there is as predicted; nothing was counted.".to_owned(),
        });
    }
    let svg = &settings.memory.svg;
    if !svg.as_os_str().is_empty() {
        let title = format!(
            "bytes of a rank, {}, {}",
            widths(&settings.model.layers),
            settings.optim.kind
        );
        let bars: Vec<Bar> = worlds.iter().map(bar).collect();
        std::fs::write(svg, memory_svg(&title, &bars))
            .map_err(|error| Error::write(svg, &error))?;
        say(format_args!("drawing: {}", svg.display()));
    }
    Ok(passed)
}

fn introduce(settings: &Settings) {
    let layers = &settings.model.layers;
    let parameters: usize = layers.windows(2).map(|pair| (pair[0] + 1) * pair[1]).sum();
    say(format_args!(
        "model {} ({} parameters, {}), {}; stage 0 is ddp",
        widths(layers),
        grouped(parameters as u64),
        settings.model.dtype,
        settings.optim.kind,
    ));
    say(
        "MB of the rank that holds most; counted: that of most, and the mean over ranks; without \
         activations\n",
    );
    say(COLUMNS.heading());
}

fn stage(world: &WorldMemory) -> u8 {
    world.stage.map_or(0, u8::from)
}

fn mb(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn line(world: &WorldMemory) -> String {
    let ranks = &world.ranks;
    let most = |of: &dyn Fn(&crate::RankMemory) -> usize| {
        let largest = ranks.iter().map(of).max();
        format!("{:.2}", mb(largest.unwrap_or_default()))
    };
    let counted = |of: &dyn Fn(&crate::CountedMemory) -> usize| {
        let all: Option<Vec<usize>> = ranks
            .iter()
            .map(|rank| rank.counted.as_ref().map(of))
            .collect();
        all.map_or_else(
            || "-".to_owned(),
            |all| {
                let mean = all.iter().sum::<usize>() / all.len().max(1);
                let largest = all.into_iter().max().unwrap_or_default();
                format!("{:.2} ({:.2})", mb(largest), mb(mean))
            },
        )
    };
    COLUMNS.line([
        stage(world).to_string(),
        ranks.len().to_string(),
        most(&|rank| rank.report.predicted.parameters),
        most(&|rank| rank.report.predicted.gradients),
        most(&|rank| rank.report.predicted.state),
        most(&|rank| rank.report.predicted.total()),
        counted(&|counted| counted.held),
        most(&|rank| rank.report.buckets),
        most(&|rank| rank.report.gathered),
        most(&|rank| rank.report.peak.most()),
        counted(&|counted| counted.peak.most()),
    ])
}

fn bar(world: &WorldMemory) -> Bar {
    let most = world
        .ranks
        .iter()
        .max_by_key(|rank| rank.report.peak.most());
    let mut bar = Bar {
        group: match world.stage {
            None => "ddp".to_owned(),
            Some(stage) => format!("stage {}", u8::from(stage)),
        },
        name: world.ranks.len().to_string(),
        held: [0.0; 3],
        peak: 0.0,
        counted: None,
    };
    if let Some(rank) = most {
        let held = rank.report.predicted;
        bar.held = [held.parameters, held.gradients, held.state].map(mb);
        bar.peak = mb(rank.report.peak.most());
        let counted = rank.counted;
        bar.counted = counted.map(|counted| [counted.held, counted.peak.most()].map(mb));
    }
    bar
}
