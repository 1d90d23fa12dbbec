//! One step of a recording as a drawing: a row for each rank's own thread and one for its
//! communication, over one axis of milliseconds.

use std::time::Duration;

use super::svg::{escaped, label, line, styled, text, ticks};
use crate::trace::{Lane, TraceEvent};

const WIDTH: f64 = 1000.0;
/// Room beside the bars for what stands there.
const LEFT: f64 = 134.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 84.0;
const BOTTOM: f64 = 54.0;
const ROW: f64 = 26.0;
/// Between a rank's rows, and between ranks.
const GAP: f64 = 4.0;
const RANK_GAP: f64 = 16.0;
/// A deeper bar is this much lower on both sides.
const INSET: f64 = 4.0;
/// The others are left out.
const MOST_RANKS: u64 = 8;
const LETTER: f64 = 6.4;
const AXIS: &str = "#333333";
const FAINT: &str = "#6b6b6b";

/// How an operation is drawn.
#[derive(Clone, Copy, PartialEq)]
struct Style {
    fill: &'static str,
    ink: &'static str,
    legend: &'static str,
}

impl Style {
    const ALL: [Self; 8] = [
        Self::new("#d9d9d9", "#333333", "data"),
        Self::new("#56b4e9", "#12303f", "forward"),
        Self::new("#0072b2", "#ffffff", "backward"),
        Self::new("#f0c24b", "#3d2f00", "wait"),
        Self::new("#cc79a7", "#3d1228", "optimizer"),
        Self::new("#cfeee3", "#0b4f3c", "bucket"),
        Self::new("#009e73", "#ffffff", "all_reduce"),
        Self::OTHER,
    ];
    const OTHER: Self = Self::new("#d55e00", "#ffffff", "other");

    /// Okabe and Ito's colours, which the colour-blind can tell apart, two of them lighter.
    const fn new(fill: &'static str, ink: &'static str, legend: &'static str) -> Self {
        Self { fill, ink, legend }
    }

    fn of(name: &str) -> Self {
        let known = Self::ALL.into_iter().find(|style| style.legend == name);
        known.unwrap_or(Self::OTHER)
    }
}

/// Draws what each lane did in a step. The step itself, as a span of its own, is the width.
///
/// A bar that lies inside another is drawn on it, a little lower; a mark without a duration as
/// a triangle. Where the rank's backward pass ends a dashed line goes through its
/// communication. Pointing at a bar tells its time and its fields.
pub(crate) fn step_svg(title: &str, lanes: &[(Lane, Vec<TraceEvent>)]) -> String {
    let ranks = lanes.iter().filter_map(|(lane, _)| lane.rank).max();
    let ranks = ranks.map_or(0, |last| last + 1);
    let shown: Vec<_> = lanes
        .iter()
        .filter(|(lane, _)| lane.rank.is_some_and(|rank| rank < MOST_RANKS))
        .collect();
    let events = || shown.iter().flat_map(|(_, events)| events);
    let first = events().map(|event| event.start).min().unwrap_or_default();
    let last = events().filter_map(|event| event.end).max();
    let scale = Scale {
        first,
        span: last.unwrap_or_default().saturating_sub(first),
    };
    let height = rows_end(shown.len(), ranks.min(MOST_RANKS)) + BOTTOM;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" rx=\"8\" fill=\"white\"/>\n"
    );
    heading(&mut svg, title, &shown, ranks);
    legend(&mut svg, events());
    axis(&mut svg, &scale, height - BOTTOM);
    let mut y = TOP;
    let mut above = None;
    for (lane, events) in &shown {
        y += match above {
            Some(rank) if rank == lane.rank => ROW + GAP,
            Some(_) => ROW + RANK_GAP,
            None => 0.0,
        };
        if above != Some(lane.rank) {
            styled(
                &mut svg,
                (16.0, y + 17.0),
                "font-weight=\"bold\"",
                &lane.name,
            );
        }
        above = Some(lane.rank);
        let kind = if lane.is_comm() { "comm" } else { "compute" };
        let place = (LEFT - 10.0, y + 17.0);
        let attributes = format!("text-anchor=\"end\" fill=\"{FAINT}\"");
        styled(&mut svg, place, &attributes, kind);
        row(&mut svg, &scale, y, events);
        let backward = shown
            .iter()
            .find(|(other, _)| other.rank == lane.rank && lane.is_comm() && !other.is_comm());
        if let Some(end) = backward.and_then(|(_, events)| backward_end(events)) {
            let x = scale.x(end);
            svg.push_str(&format!(
                "<line x1=\"{x:.2}\" y1=\"{:.2}\" x2=\"{x:.2}\" y2=\"{:.2}\" stroke=\"#0072b2\" \
                 stroke-width=\"1.5\" stroke-dasharray=\"3 2\"/>\n",
                y - GAP,
                y + ROW,
            ));
        }
    }
    svg.push_str("</svg>\n");
    svg
}

/// From times to the paper.
struct Scale {
    first: Duration,
    span: Duration,
}

impl Scale {
    fn x(&self, time: Duration) -> f64 {
        self.at(1e3 * time.saturating_sub(self.first).as_secs_f64())
    }

    /// Where a number of milliseconds after the beginning lies.
    fn at(&self, milliseconds: f64) -> f64 {
        LEFT + milliseconds / self.milliseconds() * (WIDTH - LEFT - RIGHT)
    }

    fn milliseconds(&self) -> f64 {
        (1e3 * self.span.as_secs_f64()).max(1e-3)
    }
}

/// Where the rows end, given how many there are and of how many ranks.
fn rows_end(rows: usize, ranks: u64) -> f64 {
    let (rows, ranks) = (rows as f64, ranks as f64);
    let gaps = (rows - ranks).max(0.0) * GAP + (ranks - 1.0).max(0.0) * RANK_GAP;
    TOP + rows * ROW + gaps
}

fn heading(svg: &mut String, title: &str, lanes: &[&(Lane, Vec<TraceEvent>)], ranks: u64) {
    let title_style = "font-weight=\"bold\" font-size=\"15\"";
    styled(svg, (16.0, 28.0), title_style, title);
    let mut parts = vec![match ranks {
        1 => "1 rank".to_owned(),
        0..=MOST_RANKS => format!("{ranks} ranks"),
        _ => format!("the first {MOST_RANKS} of {ranks} ranks"),
    }];
    if let Some(hidden) = hidden(lanes) {
        parts.push(format!(
            "{:.0} % of their communication inside the backward pass",
            100.0 * hidden
        ));
    }
    let x = 16.0 + 8.6 * title.chars().count() as f64 + 14.0;
    styled(
        svg,
        (x, 28.0),
        &format!("fill=\"{FAINT}\""),
        &parts.join(", "),
    );
}

/// Share of the time in calls on the communication threads that lies inside the backward pass of
/// the same rank, if there is any.
fn hidden(lanes: &[&(Lane, Vec<TraceEvent>)]) -> Option<f64> {
    let (mut inside, mut all) = (Duration::ZERO, Duration::ZERO);
    for (lane, calls) in lanes.iter().filter(|(lane, _)| lane.is_comm()) {
        let (_, events) = lanes
            .iter()
            .find(|(other, _)| other.rank == lane.rank && !other.is_comm())?;
        let backward = events.iter().find(|event| event.name() == "backward")?;
        for call in calls.iter().filter(|call| call.name() != "bucket") {
            let end = call.end?;
            all += end - call.start;
            let (from, to) = (call.start.max(backward.start), end.min(backward.end?));
            inside += to.saturating_sub(from);
        }
    }
    (!all.is_zero()).then(|| inside.as_secs_f64() / all.as_secs_f64())
}

fn backward_end(events: &[TraceEvent]) -> Option<Duration> {
    events
        .iter()
        .find(|event| event.name() == "backward")
        .and_then(|event| event.end)
}

/// What occurs, in the order of a step.
fn legend<'a>(svg: &mut String, events: impl Iterator<Item = &'a TraceEvent>) {
    let (mut bars, mut marks) = (Vec::new(), false);
    for event in events.filter(|event| event.name() != STEP) {
        match event.end {
            Some(_) => bars.push(Style::of(event.name())),
            None => marks = true,
        }
    }
    let mut x = 16.0;
    for style in Style::ALL {
        if !bars.contains(&style) {
            continue;
        }
        svg.push_str(&format!(
            "<rect x=\"{x:.2}\" y=\"46\" width=\"16\" height=\"12\" rx=\"3\" fill=\"{}\"/>\n",
            style.fill
        ));
        text(svg, x + 22.0, 56.0, "start", style.legend);
        x += 22.0 + LETTER * style.legend.len() as f64 + 20.0;
    }
    if marks {
        triangle(svg, x + 6.0, 57.0);
        text(svg, x + 18.0, 56.0, "start", "bucket ready");
    }
}

fn axis(svg: &mut String, scale: &Scale, bottom: f64) {
    for tick in ticks(0.0, scale.milliseconds()) {
        let x = scale.at(tick);
        line(svg, (x, TOP - 8.0), (x, bottom + 8.0), "#e4e4e4");
        line(svg, (x, bottom + 8.0), (x, bottom + 13.0), AXIS);
        text(svg, x, bottom + 28.0, "middle", &label(tick));
    }
    line(
        svg,
        (LEFT, bottom + 8.0),
        (WIDTH - RIGHT, bottom + 8.0),
        AXIS,
    );
    let attributes = format!("text-anchor=\"middle\" fill=\"{FAINT}\"");
    let centre = (LEFT + WIDTH - RIGHT) / 2.0;
    styled(svg, (centre, bottom + 46.0), &attributes, "ms");
}

/// The bars and marks of one lane, those that hold others first.
fn row(svg: &mut String, scale: &Scale, y: f64, events: &[TraceEvent]) {
    let mut bars: Vec<(&TraceEvent, Duration)> = events
        .iter()
        .filter(|event| event.name() != STEP)
        .filter_map(|event| Some((event, event.end?)))
        .collect();
    bars.sort_by_key(|(event, end)| (event.start, std::cmp::Reverse(*end)));
    let mut around: Vec<Duration> = Vec::new();
    for (event, end) in bars {
        around.retain(|&outer| outer >= end);
        bar(svg, scale, y, around.len(), event, end);
        around.push(end);
    }
    for mark in events.iter().filter(|event| event.end.is_none()) {
        let x = scale.x(mark.start);
        svg.push_str(&format!("<g><title>{}</title>\n", told(mark)));
        triangle(svg, x, y + ROW + 1.0);
        svg.push_str("</g>\n");
    }
}

fn bar(svg: &mut String, scale: &Scale, y: f64, depth: usize, event: &TraceEvent, end: Duration) {
    let style = Style::of(event.name());
    let (x, until) = (scale.x(event.start), scale.x(end));
    // However short, it is to be seen.
    let width = (until - x).max(1.0);
    let inset = INSET * depth.min(2) as f64;
    let radius = 3f64.min(width / 2.0);
    svg.push_str(&format!(
        "<g><title>{}</title>\n<rect x=\"{x:.2}\" y=\"{:.2}\" width=\"{width:.2}\" \
         height=\"{:.2}\" rx=\"{radius:.2}\" fill=\"{}\" stroke=\"white\" stroke-width=\"0.8\"/>\n",
        told(event),
        y + inset,
        ROW - 2.0 * inset,
        style.fill,
    ));
    let bytes = event.arguments.number("bytes").map(size);
    let bytes = bytes.map(|bytes| format!("{} {bytes}", event.name()));
    let fits = |words: &String| LETTER * words.chars().count() as f64 + 8.0 <= width;
    let written = bytes
        .into_iter()
        .chain([event.name().to_owned()])
        .find(fits);
    // What lies on a bucket would hide its name.
    if let Some(written) = written.filter(|_| event.name() != "bucket") {
        let attributes = format!(
            "text-anchor=\"middle\" font-size=\"11\" fill=\"{}\"",
            style.ink
        );
        let middle = (x + width / 2.0, y + ROW / 2.0 + 4.0);
        styled(svg, middle, &attributes, &written);
    }
    svg.push_str("</g>\n");
}

/// An event in words, for who points at it.
fn told(event: &TraceEvent) -> String {
    let time = event.end.map(|end| {
        let time = 1e3 * (end - event.start).as_secs_f64();
        format!(", {time:.3} ms")
    });
    let algorithm = event.arguments.text("algorithm");
    let bytes = event.arguments.number("bytes");
    let parts = [
        Some(event.name().to_owned()),
        event
            .arguments
            .number("bucket")
            .map(|bucket| format!(" {bucket}")),
        time,
        algorithm.map(|algorithm| format!(", {algorithm}")),
        bytes.map(|bytes| format!(", {bytes} bytes")),
    ];
    escaped(&parts.into_iter().flatten().collect::<String>())
}

/// Bytes in the largest unit of which there is one, in powers of 1024.
fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..0x10_0000 => format!("{:.0} KB", bytes as f64 / 1024.0),
        _ => format!("{:.1} MB", bytes as f64 / (1 << 20) as f64),
    }
}

fn triangle(svg: &mut String, x: f64, tip: f64) {
    svg.push_str(&format!(
        "<path d=\"M{x:.2} {tip:.2} l-4.5 -8 h9 z\" fill=\"{AXIS}\" stroke=\"white\" \
         stroke-width=\"0.8\"/>\n"
    ));
}

/// The span that is the width of the drawing.
const STEP: &str = "step";
