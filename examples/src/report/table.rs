//! Text in columns, line by line, so that a line can be shown as soon as it is
//! known.

/// Columns of fixed width; a cell that is too long moves the rest to the right.
#[derive(Debug, Clone, PartialEq)]
pub struct Columns<const N: usize> {
    headings: [(&'static str, usize); N],
}

impl<const N: usize> Columns<N> {
    /// Columns with a heading and a width each.
    ///
    /// ```
    /// let columns = examples::Columns::new([("mode", 8), ("loss", 6)]);
    /// assert_eq!(columns.heading(), "mode      loss");
    /// assert_eq!(columns.line(["single", "0.5"].map(str::to_owned)), "single    0.5");
    /// ```
    pub const fn new(headings: [(&'static str, usize); N]) -> Self {
        Self { headings }
    }

    /// The line of headings.
    pub fn heading(&self) -> String {
        self.line(self.headings.map(|(heading, _)| heading.to_owned()))
    }

    /// A line of cells.
    pub fn line(&self, cells: [String; N]) -> String {
        let padded = cells
            .iter()
            .zip(&self.headings)
            .map(|(cell, (heading, width))| {
                let width = heading.chars().count().max(*width);
                format!("{cell:width$}  ")
            });
        padded.collect::<String>().trim_end().to_owned()
    }
}

/// A whole number with a comma before every third digit.
///
/// ```
/// assert_eq!(examples::grouped(31_002_634), "31,002,634");
/// ```
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
