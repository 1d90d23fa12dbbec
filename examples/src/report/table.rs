//! Text in columns.

/// Rows of text, printed in columns as wide as they need to be.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table that starts with a row of headings.
    ///
    /// ```
    /// let mut table = examples::Table::new(["mode", "loss"]);
    /// table.row(["single", "0.5"].map(str::to_owned));
    /// assert_eq!(table.to_string(), "mode    loss\nsingle  0.5\n");
    /// ```
    pub fn new<const N: usize>(headings: [&str; N]) -> Self {
        Self {
            rows: vec![headings.map(str::to_owned).to_vec()],
        }
    }

    /// Adds a row.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.to_vec());
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let line: String = row
                .iter()
                .zip(&widths)
                .map(|(cell, &width)| format!("{cell:width$}  "))
                .collect();
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
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
