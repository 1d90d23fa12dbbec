//! Where lines go: tables to standard output, JSON to a file, or JSON alone to
//! standard output.
use std::{
    fmt::Display,
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use serde::Serialize;

use super::BenchError;

const STDOUT: &str = "standard output";

/// The lines of one run of the program.
pub(super) struct Output {
    table: bool,
    json: Option<(PathBuf, Box<dyn Write>)>,
}

/// The first line that could not be written, and why.
static LOST: Mutex<Option<BenchError>> = Mutex::new(None);

/// Whether every line was written.
///
/// # Errors
///
/// [`BenchError::Write`] with what the first that was not failed with.
pub(super) fn all_written() -> Result<(), BenchError> {
    let lost = LOST.lock().unwrap_or_else(PoisonError::into_inner).take();
    lost.map_or(Ok(()), Err)
}

/// Keeps why a line was lost. A reader such as `head` that has gone has seen enough; a
/// full disk is another matter.
fn written(to: &Path, outcome: io::Result<()>) {
    if let Err(source) = outcome
        && source.kind() != io::ErrorKind::BrokenPipe
    {
        let mut lost = LOST.lock().unwrap_or_else(PoisonError::into_inner);
        lost.get_or_insert_with(|| BenchError::Write {
            path: to.to_owned(),
            source,
        });
    }
}

impl Output {
    /// `json` is a file, or `-` for standard output, where no table is shown then.
    pub(super) fn new(json: Option<&Path>) -> Result<Self, BenchError> {
        let alone = json == Some(Path::new("-"));
        let json: Option<(PathBuf, Box<dyn Write>)> = match json {
            None => None,
            Some(_) if alone => Some((STDOUT.into(), Box::new(io::stdout()))),
            Some(path) => Some((path.to_owned(), Box::new(BufWriter::new(create(path)?)))),
        };
        Ok(Self {
            table: !alone,
            json,
        })
    }

    /// A line for people.
    pub(super) fn say(&self, line: impl Display) {
        if self.table {
            // `println!` would panic when it cannot be written.
            written(Path::new(STDOUT), writeln!(io::stdout(), "{line}"));
        }
    }

    /// A line for programs.
    pub(super) fn record(&mut self, row: &impl Serialize) {
        if let Some((path, json)) = &mut self.json
            && let Ok(line) = serde_json::to_string(row)
        {
            written(path, writeln!(json, "{line}").and_then(|()| json.flush()));
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
