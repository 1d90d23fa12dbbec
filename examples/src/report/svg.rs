//! Curves as a drawing: axes, grid, legend; one file, no script, no font.
//!
//! Curves that should coincide are drawn so that all of them stay visible:
//! the first widest and solid, each later one thinner and dashed, on top.

use super::Curve;

const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 480.0;
/// Room beside the drawing for what stands there.
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 60.0;
/// Okabe and Ito's colours, which the colour-blind can tell apart.
const COLOURS: [&str; 7] = [
    "#999999", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9",
];
const STROKES: [(f64, &str); 5] = [
    (7.0, "none"),
    (3.5, "14 6"),
    (2.0, "6 8"),
    (2.0, "2 6"),
    (1.5, "10 3 2 3"),
];

/// Draws the curves over their steps.
///
/// Values that are not finite leave gaps.
///
/// ```
/// use examples::{Curve, curves_svg};
///
/// let curve = Curve { name: "a < b".to_owned(), values: vec![2.3, 1.0] };
/// let drawing = curves_svg("loss", "step", "loss", &[curve]);
/// assert!(drawing.starts_with("<svg ") && drawing.contains("a &lt; b"));
/// ```
pub fn curves_svg(title: &str, across: &str, up: &str, curves: &[Curve]) -> String {
    let steps = curves.iter().map(|curve| curve.values.len()).max();
    let steps = steps.unwrap_or(0).max(2);
    let frame = Frame {
        first: 1.0,
        last: steps as f64,
        range: value_range(curves),
    };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         width=\"{WIDTH}\" height=\"{HEIGHT}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    let centre = (LEFT + WIDTH - RIGHT) / 2.0;
    text(&mut svg, centre, 28.0, "middle", title);
    text(&mut svg, centre, HEIGHT - 16.0, "middle", across);
    let middle = (TOP + HEIGHT - BOTTOM) / 2.0;
    svg.push_str(&format!(
        "<text x=\"20\" y=\"{middle}\" text-anchor=\"middle\" transform=\"rotate(-90 20 {middle})\">{}</text>\n",
        escaped(up)
    ));
    grid(&mut svg, &frame);
    for (index, curve) in curves.iter().enumerate() {
        svg.push_str(&polylines(&frame, index, curve));
    }
    legend(&mut svg, curves);
    svg.push_str("</svg>\n");
    svg
}

/// Where values lie on the paper.
struct Frame {
    first: f64,
    last: f64,
    range: (f64, f64),
}

impl Frame {
    fn x(&self, step: f64) -> f64 {
        LEFT + (step - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        let (low, high) = self.range;
        HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
    }
}

/// From 0, or below it, to a little above the largest value.
fn value_range(curves: &[Curve]) -> (f64, f64) {
    let values = || {
        let all = curves.iter().flat_map(|curve| curve.values.iter().copied());
        all.filter(|value| value.is_finite())
    };
    let low = values().fold(0.0, f64::min);
    let high = values().fold(low, f64::max);
    match high > low {
        true => (low, high + 0.05 * (high - low)),
        false => (low, low + 1.0),
    }
}

fn grid(svg: &mut String, frame: &Frame) {
    for value in ticks(frame.range.0, frame.range.1) {
        let y = frame.y(value);
        line(svg, (LEFT, y), (WIDTH - RIGHT, y), "#dddddd");
        text(svg, LEFT - 8.0, y + 4.0, "end", &label(value));
    }
    for step in ticks(frame.first, frame.last) {
        let x = frame.x(step);
        line(
            svg,
            (x, HEIGHT - BOTTOM),
            (x, HEIGHT - BOTTOM + 5.0),
            "#333333",
        );
        text(svg, x, HEIGHT - BOTTOM + 20.0, "middle", &label(step));
    }
    let corner = (LEFT, HEIGHT - BOTTOM);
    line(svg, corner, (WIDTH - RIGHT, HEIGHT - BOTTOM), "#333333");
    line(svg, corner, (LEFT, TOP), "#333333");
}

/// Round numbers (1, 2 or 5 times a power of ten apart), four to ten of them.
pub(super) fn ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / 8.0;
    let power = 10f64.powf(rough.log10().floor());
    let nice = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
    let step = nice
        .into_iter()
        .find(|&step| step >= rough)
        .unwrap_or(rough);
    let first = (low / step).ceil() as i64;
    let last = (high / step).floor() as i64;
    (first..=last).map(|count| count as f64 * step).collect()
}

/// Without the digits that only rounding put there.
pub(super) fn label(value: f64) -> String {
    let rounded = (value * 1e9).round() / 1e9;
    rounded.to_string()
}

pub(super) fn line(svg: &mut String, from: (f64, f64), to: (f64, f64), colour: &str) {
    svg.push_str(&format!(
        "<line x1=\"{:.2}\" y1=\"{:.2}\" x2=\"{:.2}\" y2=\"{:.2}\" stroke=\"{colour}\"/>\n",
        from.0, from.1, to.0, to.1
    ));
}

pub(super) fn text(svg: &mut String, x: f64, y: f64, anchor: &str, words: &str) {
    styled(svg, (x, y), &format!("text-anchor=\"{anchor}\""), words);
}

/// Words with attributes of their own.
pub(super) fn styled(svg: &mut String, (x, y): (f64, f64), attributes: &str, words: &str) {
    svg.push_str(&format!(
        "<text x=\"{x:.2}\" y=\"{y:.2}\" {attributes}>{}</text>\n",
        escaped(words)
    ));
}

/// The attributes of curve `index`'s line.
fn stroke(index: usize) -> String {
    let (width, dashes) = STROKES[index.min(STROKES.len() - 1)];
    let colour = COLOURS[index % COLOURS.len()];
    format!(
        "fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\" stroke-dasharray=\"{dashes}\""
    )
}

fn polylines(frame: &Frame, index: usize, curve: &Curve) -> String {
    let mut svg = String::new();
    let mut step = 0;
    for run in curve.values.split(|value| !value.is_finite()) {
        let points: Vec<String> = run
            .iter()
            .enumerate()
            .map(|(at, &value)| {
                let x = frame.x((step + at + 1) as f64);
                format!("{x:.2},{:.2}", frame.y(value))
            })
            .collect();
        // The value that is not finite takes a step too.
        step += run.len() + 1;
        if !points.is_empty() {
            let points = points.join(" ");
            svg.push_str(&format!(
                "<polyline points=\"{points}\" {}/>\n",
                stroke(index)
            ));
        }
    }
    svg
}

fn legend(svg: &mut String, curves: &[Curve]) {
    let x = WIDTH - RIGHT - 190.0;
    for (index, curve) in curves.iter().enumerate() {
        let y = TOP + 14.0 + 22.0 * index as f64;
        svg.push_str(&format!(
            "<polyline points=\"{x},{y} {},{y}\" {}/>\n",
            x + 56.0,
            stroke(index)
        ));
        text(svg, x + 66.0, y + 4.0, "start", &curve.name);
    }
}

pub(super) fn escaped(words: &str) -> String {
    words
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}
