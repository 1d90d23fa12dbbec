//! Rows of f64 in one allocation.

/// A table of f64, row by row.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    columns: usize,
    values: Vec<f64>,
}

impl Matrix {
    /// Takes `values` as rows of `columns` numbers.
    ///
    /// # Panics
    /// If `values` is no whole number of rows, which is a caller's mistake.
    ///
    /// ```
    /// let matrix = examples::Matrix::new(2, vec![1.0, 2.0, 3.0, 4.0]);
    /// assert_eq!(matrix.rows(), 2);
    /// assert_eq!(matrix.row(1), [3.0, 4.0]);
    /// ```
    pub fn new(columns: usize, values: Vec<f64>) -> Self {
        let whole = match columns {
            0 => values.is_empty(),
            _ => values.len().is_multiple_of(columns),
        };
        assert!(whole, "{} values in rows of {columns}", values.len());
        Self { columns, values }
    }

    /// How many rows.
    pub fn rows(&self) -> usize {
        self.values.len().checked_div(self.columns).unwrap_or(0)
    }

    /// Numbers in a row.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// One row.
    pub fn row(&self, row: usize) -> &[f64] {
        &self.values[row * self.columns..(row + 1) * self.columns]
    }

    /// All rows, one after another.
    pub fn iter(&self) -> impl Iterator<Item = &[f64]> {
        (0..self.rows()).map(|row| self.row(row))
    }

    /// All numbers, row by row.
    pub fn values(&self) -> &[f64] {
        &self.values
    }

    /// All numbers, row by row, to change.
    pub fn values_mut(&mut self) -> &mut [f64] {
        &mut self.values
    }

    /// A copy of some rows.
    pub fn part(&self, rows: std::ops::Range<usize>) -> Self {
        let values = &self.values[rows.start * self.columns..rows.end * self.columns];
        Self::new(self.columns, values.to_vec())
    }
}
