//! What a rank holds, as bars: predicted in colour, counted as a line across.

use super::svg::{label, line, text, ticks};

const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 480.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 80.0;
const BOTTOM: f64 = 70.0;
/// Okabe and Ito's colours, which the colour-blind can tell apart; grey is what a step adds.
const KINDS: [(&str, &str); 4] = [
    ("parameters", "#0072b2"),
    ("gradients", "#d55e00"),
    ("optimizer's state", "#009e73"),
    ("peak of a step", "#dddddd"),
];

/// One bar, in MB.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Bar {
    /// Bars of one group stand together.
    pub(crate) group: String,
    pub(crate) name: String,
    /// Parameters, gradients, state.
    pub(crate) held: [f64; 3],
    pub(crate) peak: f64,
    /// Held and peak, as counted.
    pub(crate) counted: Option<[f64; 2]>,
}

/// Draws the bars over the names of their groups.
pub(crate) fn memory_svg(title: &str, bars: &[Bar]) -> String {
    let high = bars
        .iter()
        .map(|bar| bar.peak)
        .fold(f64::MIN_POSITIVE, f64::max)
        * 1.05;
    let y = |value: f64| HEIGHT - BOTTOM - value / high * (HEIGHT - TOP - BOTTOM);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         width=\"{WIDTH}\" height=\"{HEIGHT}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    text(
        &mut svg,
        (LEFT + WIDTH - RIGHT) / 2.0,
        26.0,
        "middle",
        title,
    );
    for value in ticks(0.0, high) {
        line(
            &mut svg,
            (LEFT, y(value)),
            (WIDTH - RIGHT, y(value)),
            "#dddddd",
        );
        let words = format!("{} MB", label(value));
        text(&mut svg, LEFT - 8.0, y(value) + 4.0, "end", &words);
    }
    let groups: Vec<&[Bar]> = bars
        .chunk_by(|left, right| left.group == right.group)
        .collect();
    // A gap as wide as a bar between two groups.
    let places = (bars.len() + groups.len()).max(1) as f64;
    let step = (WIDTH - LEFT - RIGHT) / places;
    let mut x = LEFT + step / 2.0;
    for group in groups {
        let begin = x;
        for bar in group {
            draw(&mut svg, bar, x, step, &y);
            text(
                &mut svg,
                x + step / 2.0,
                HEIGHT - BOTTOM + 18.0,
                "middle",
                &bar.name,
            );
            x += step;
        }
        text(
            &mut svg,
            (begin + x) / 2.0,
            HEIGHT - BOTTOM + 38.0,
            "middle",
            &group[0].group,
        );
        x += step;
    }
    line(&mut svg, (LEFT, y(0.0)), (WIDTH - RIGHT, y(0.0)), "#333333");
    text(
        &mut svg,
        (LEFT + WIDTH - RIGHT) / 2.0,
        HEIGHT - 12.0,
        "middle",
        "ranks",
    );
    for (index, (name, colour)) in KINDS.into_iter().enumerate() {
        let x = LEFT + 150.0 * index as f64;
        rect(&mut svg, (x, 44.0), (14.0, 14.0), colour);
        text(&mut svg, x + 20.0, 56.0, "start", name);
    }
    text(&mut svg, LEFT + 600.0, 56.0, "start", "━ counted");
    svg.push_str("</svg>\n");
    svg
}

fn draw(svg: &mut String, bar: &Bar, x: f64, step: f64, y: &dyn Fn(f64) -> f64) {
    let width = 0.8 * step;
    let mut from = 0.0;
    let kinds = bar.held.into_iter().zip(&KINDS);
    let held: f64 = bar.held.iter().sum();
    let rest = (bar.peak - held).max(0.0);
    for (value, (_, colour)) in kinds.chain([(rest, &KINDS[3])]) {
        let top = y(from + value);
        rect(svg, (x + 0.1 * step, top), (width, y(from) - top), colour);
        from += value;
    }
    for value in bar.counted.into_iter().flatten() {
        line(svg, (x, y(value)), (x + step, y(value)), "#000000");
    }
}

fn rect(svg: &mut String, (x, y): (f64, f64), (width, height): (f64, f64), colour: &str) {
    svg.push_str(&format!(
        "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\" fill=\"{colour}\"/>\n"
    ));
}
