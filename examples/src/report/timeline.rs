//! One step's buckets against the backward pass, as a drawing in text.

use std::time::Duration;

use ddp::StepRecord;

/// Columns of the drawing.
const WIDTH: usize = 56;

/// A line for the backward pass and one for each bucket: `·` while it fills, `░` while
/// it waits for its turn, `█` while it is reduced.
///
/// ```
/// use std::time::Duration;
/// use ddp::{BucketRecord, StepRecord};
/// let ms = Duration::from_millis;
/// let bucket = BucketRecord {
///     elements: 10, bytes: 40, ready: ms(14), start: ms(28), end: ms(56), slots: 1,
///     algorithm: "ring".into(),
/// };
/// let step = StepRecord { backward: ms(28), buckets: vec![bucket], ..Default::default() };
/// let drawing = examples::timeline(&step);
/// let lines: Vec<_> = drawing.lines().collect();
/// assert!(lines[0].contains(&"━".repeat(28)));
/// assert!(lines[1].contains(&format!("{}{}{}", "·".repeat(14), "░".repeat(14), "█".repeat(28))));
/// ```
pub fn timeline(step: &StepRecord) -> String {
    let ends = step.buckets.iter().map(|bucket| bucket.end);
    let whole = ends.max().unwrap_or_default().max(step.backward);
    let column = |time: Duration| match whole.is_zero() {
        true => 0,
        false => (time.as_secs_f64() / whole.as_secs_f64() * WIDTH as f64).round() as usize,
    };
    let mut lines = vec![format!(
        "{:22}{:WIDTH$}  {:.1} ms",
        "backward pass",
        "━".repeat(column(step.backward)),
        1e3 * step.backward.as_secs_f64(),
    )];
    for (index, bucket) in step.buckets.iter().enumerate() {
        let [ready, start, end] = [bucket.ready, bucket.start, bucket.end].map(column);
        let drawn = [
            "·".repeat(ready),
            "░".repeat(start.saturating_sub(ready)),
            // However short, it is to be seen.
            "█".repeat(end.saturating_sub(start).max(1)),
        ];
        lines.push(format!(
            "{:22}{:WIDTH$}  {:.1} ms",
            format!(
                "bucket {}, {:.2} MB",
                index + 1,
                bucket.bytes as f64 / (1 << 20) as f64
            ),
            drawn.concat(),
            1e3 * (bucket.end.saturating_sub(bucket.start)).as_secs_f64(),
        ));
    }
    lines.join("\n")
}
