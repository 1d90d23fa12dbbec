//! Time over size, both in powers: one panel for each number of ranks, one line for
//! each algorithm.

/// One drawing beside others, on the same scales.
pub(super) struct Panel {
    pub(super) title: String,
    /// Names, and points of bytes and microseconds.
    pub(super) lines: Vec<(String, Vec<(f64, f64)>)>,
}

const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 380.0;
const LEFT: f64 = 62.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 42.0;
const BOTTOM: f64 = 52.0;
const LEGEND: f64 = 34.0;

/// How a line is drawn.
#[derive(Clone, Copy)]
struct Stroke {
    colour: &'static str,
    dashes: &'static str,
    width: f64,
}

impl Stroke {
    const GRID: Self = Self::new("#dddddd", "none", 1.0);
    const AXIS: Self = Self::new("#333333", "none", 2.0);
    /// Okabe and Ito's colours, which the colour-blind can tell apart, and dashes for print.
    const LINES: [Self; 5] = [
        Self::new("#777777", "2 4", 2.0),
        Self::new("#0072b2", "none", 2.0),
        Self::new("#d55e00", "none", 2.0),
        Self::new("#009e73", "9 4", 2.0),
        Self::new("#cc79a7", "4 3", 2.0),
    ];

    const fn new(colour: &'static str, dashes: &'static str, width: f64) -> Self {
        Self {
            colour,
            dashes,
            width,
        }
    }

    /// That of the line of that number; they come again after the last.
    fn of(index: usize) -> Self {
        Self::LINES[index % Self::LINES.len()]
    }
}

/// Draws the panels side by side.
pub(super) fn draw(panels: &[Panel]) -> String {
    let scale = Scale::over(panels);
    let (width, height) = (WIDTH * panels.len().max(1) as f64, HEIGHT + LEGEND);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    for (index, panel) in panels.iter().enumerate() {
        svg.push_str(&format!(
            "<g transform=\"translate({} 0)\">\n",
            WIDTH * index as f64
        ));
        axes(&mut svg, &scale, &panel.title);
        for (number, (_, points)) in panel.lines.iter().enumerate() {
            let points = points.iter().map(|&(x, y)| (scale.x(x), scale.y(y)));
            polyline(&mut svg, points, Stroke::of(number));
        }
        svg.push_str("</g>\n");
    }
    // All panels have the lines of the first.
    for (number, (name, _)) in panels
        .iter()
        .take(1)
        .flat_map(|panel| &panel.lines)
        .enumerate()
    {
        let (x, y) = (LEFT + 130.0 * number as f64, HEIGHT + 12.0);
        polyline(&mut svg, [(x, y), (x + 34.0, y)], Stroke::of(number));
        text(&mut svg, x + 42.0, y + 4.0, "start", name);
    }
    svg.push_str("</svg>\n");
    svg
}

/// From bytes and microseconds to paper, in powers of two and ten.
struct Scale {
    bytes: (i32, i32),
    time: (i32, i32),
}

impl Scale {
    fn over(panels: &[Panel]) -> Self {
        let points = || {
            panels
                .iter()
                .flat_map(|panel| &panel.lines)
                .flat_map(|(_, points)| points)
        };
        let range = |values: Vec<f64>| {
            let low = values
                .iter()
                .fold(f64::INFINITY, |low, &value| low.min(value));
            let high = values
                .iter()
                .fold(f64::NEG_INFINITY, |high, &value| high.max(value));
            match low.is_finite() && high.is_finite() {
                true => (
                    low.floor() as i32,
                    (high.ceil() as i32).max(low.floor() as i32 + 1),
                ),
                false => (0, 1),
            }
        };
        Self {
            bytes: range(points().map(|point| point.0.log2()).collect()),
            time: range(points().map(|point| point.1.log10()).collect()),
        }
    }

    fn x(&self, bytes: f64) -> f64 {
        let (low, high) = self.bytes;
        LEFT + (bytes.log2() - f64::from(low)) / f64::from(high - low) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, time: f64) -> f64 {
        let (low, high) = self.time;
        HEIGHT
            - BOTTOM
            - (time.log10() - f64::from(low)) / f64::from(high - low) * (HEIGHT - TOP - BOTTOM)
    }
}

fn axes(svg: &mut String, scale: &Scale, title: &str) {
    let middle = (LEFT + WIDTH - RIGHT) / 2.0;
    text(svg, middle, 24.0, "middle", title);
    text(
        svg,
        middle,
        HEIGHT - 12.0,
        "middle",
        "bytes of a rank's buffer",
    );
    svg.push_str(&format!(
        "<text x=\"16\" y=\"{0}\" text-anchor=\"middle\" transform=\"rotate(-90 16 {0})\">time in µs, shortest</text>\n",
        (TOP + HEIGHT - BOTTOM) / 2.0
    ));
    for power in scale.time.0..=scale.time.1 {
        let value = 10f64.powi(power);
        polyline(
            svg,
            [(LEFT, scale.y(value)), (WIDTH - RIGHT, scale.y(value))],
            Stroke::GRID,
        );
        text(
            svg,
            LEFT - 6.0,
            scale.y(value) + 4.0,
            "end",
            &value.to_string(),
        );
    }
    for power in (scale.bytes.0..=scale.bytes.1).filter(|power| power % 2 == 0) {
        let value = 2f64.powi(power);
        polyline(
            svg,
            [(scale.x(value), TOP), (scale.x(value), HEIGHT - BOTTOM)],
            Stroke::GRID,
        );
        let label = super::Bytes(value as usize).to_string();
        text(
            svg,
            scale.x(value),
            HEIGHT - BOTTOM + 18.0,
            "middle",
            &label,
        );
    }
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    polyline(
        svg,
        [(LEFT, TOP), (LEFT, bottom), (right, bottom)],
        Stroke::AXIS,
    );
}

fn polyline(svg: &mut String, points: impl IntoIterator<Item = (f64, f64)>, stroke: Stroke) {
    let points: Vec<_> = points
        .into_iter()
        .map(|(x, y)| format!("{x:.1},{y:.1}"))
        .collect();
    let Stroke {
        colour,
        dashes,
        width,
    } = stroke;
    svg.push_str(&format!(
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\" \
         stroke-dasharray=\"{dashes}\"/>\n",
        points.join(" ")
    ));
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, words: &str) {
    svg.push_str(&format!(
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>\n"
    ));
}
