//! Where lines go: tables to standard output, JSON to a file, or JSON alone to
//! standard output.
use std::{
    fmt::Display,
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::Path,
};

use serde::Serialize;

use super::BenchError;

/// The lines of one run of the program.
pub(super) struct Output {
    table: bool,
    json: Option<Box<dyn Write>>,
}

impl Output {
    /// `json` is a file, or `-` for standard output, where no table is shown then.
    pub(super) fn new(json: Option<&Path>) -> Result<Self, BenchError> {
        let alone = json == Some(Path::new("-"));
        let json: Option<Box<dyn Write>> = match json {
            None => None,
            Some(_) if alone => Some(Box::new(io::stdout())),
            Some(path) => Some(Box::new(BufWriter::new(create(path)?))),
        };
        Ok(Self {
            table: !alone,
            json,
        })
    }

    /// A line for people.
    pub(super) fn say(&self, line: impl Display) {
        if self.table {
            // `println!` would panic when a reader such as `head` has gone; the run
            // has its exit code all the same.
            drop(writeln!(io::stdout(), "{line}"));
        }
    }

    /// A line for programs.
    pub(super) fn record(&mut self, row: &impl Serialize) {
        if let Some(json) = &mut self.json
            && let Ok(line) = serde_json::to_string(row)
        {
            drop(writeln!(json, "{line}").and_then(|()| json.flush()));
        }
    }
}

/// Makes a file, and the folders that lead to it.
fn create(path: &Path) -> Result<File, BenchError> {
    let folder = path.parent().map_or(Ok(()), fs::create_dir_all);
    folder
        .and_then(|()| File::create(path))
        .map_err(|source| BenchError::Write {
            path: path.to_owned(),
            source,
        })
}

/// Writes a whole file.
pub(super) fn write(path: &Path, text: &str) -> Result<(), BenchError> {
    create(path)?
        .write_all(text.as_bytes())
        .map_err(|source| BenchError::Write {
            path: path.to_owned(),
            source,
        })
}
