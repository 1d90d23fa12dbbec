//! Text in columns, to the right, line by line: a line can be shown as soon as it
//! is known.

/// Columns of fixed width; a cell that is too long moves the rest to the right.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Columns(Vec<(String, usize)>);

impl Columns {
    pub(super) fn new(headings: impl IntoIterator<Item = (impl Into<String>, usize)>) -> Self {
        let wide_enough = |(heading, width): (_, usize)| {
            let heading: String = Into::into(heading);
            let width = width.max(heading.chars().count());
            (heading, width)
        };
        Self(headings.into_iter().map(wide_enough).collect())
    }

    pub(super) fn heading(&self) -> String {
        let headings: Vec<_> = self.0.iter().map(|(heading, _)| heading.clone()).collect();
        self.line(&headings)
    }

    pub(super) fn line(&self, cells: &[String]) -> String {
        let padded = cells
            .iter()
            .zip(&self.0)
            .map(|(cell, (_, width))| format!("{cell:>width$}"));
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    }
}

/// A number with about four digits that mean something.
pub(super) fn short(number: f64) -> String {
    match number.abs() {
        size if !size.is_finite() => "-".to_owned(),
        size if size >= 1000.0 => format!("{number:.0}"),
        size if size >= 100.0 => format!("{number:.1}"),
        size if size >= 10.0 => format!("{number:.2}"),
        _ => format!("{number:.3}"),
    }
}
