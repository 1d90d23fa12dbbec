//! Numbers separated by commas: no header, one row a line.

use std::path::Path;

use super::{DataError, Matrix};

/// Reads rows of f64. Blanks around numbers and empty lines are passed over.
///
/// # Errors
/// [`DataError::NotANumber`], [`DataError::NotFinite`], [`DataError::Ragged`],
/// [`DataError::Empty`], each with its place; [`DataError::Read`].
pub fn read_csv(path: &Path) -> Result<Matrix, DataError> {
    let file = path.display().to_string();
    match std::fs::read_to_string(path) {
        // Spreadsheets put a byte order mark in front.
        Ok(text) => parse(&file, text.strip_prefix('\u{feff}').unwrap_or(&text)),
        Err(error) => Err(DataError::Read {
            file,
            reason: error.to_string(),
        }),
    }
}

fn parse(file: &str, text: &str) -> Result<Matrix, DataError> {
    let mut columns = 0;
    let mut values = Vec::new();
    let lines = text
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty());
    for (row, (index, content)) in lines.enumerate() {
        let line = index + 1;
        let before = values.len();
        for (index, field) in content.split(',').enumerate() {
            values.push(number(file, row, line, index + 1, field.trim())?);
        }
        let got = values.len() - before;
        if row == 0 {
            columns = got;
        } else if got != columns {
            return Err(DataError::Ragged {
                file: file.to_owned(),
                row,
                line,
                got,
                expected: columns,
            });
        }
    }
    if values.is_empty() {
        return Err(DataError::Empty {
            file: file.to_owned(),
        });
    }
    Ok(Matrix::new(columns, values))
}

fn number(
    file: &str,
    row: usize,
    line: usize,
    column: usize,
    text: &str,
) -> Result<f64, DataError> {
    let value: f64 = text.parse().map_err(|_| DataError::NotANumber {
        file: file.to_owned(),
        line,
        column,
        text: text.to_owned(),
    })?;
    if !value.is_finite() {
        return Err(DataError::NotFinite {
            file: file.to_owned(),
            row,
            line,
            column,
            value: value.to_string(),
        });
    }
    Ok(value)
}
