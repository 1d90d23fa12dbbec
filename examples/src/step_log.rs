//! The records of all steps as a file: a line of JSON for each step and rank.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ddp::StepRecord;
use serde::Serialize;

use crate::Error;

/// A file of step records that all ranks write to. `docs/records.md` lists its fields.
///
/// Each line is one write of a whole line, at the end of its step: a run that is killed leaves
/// the steps it had done, and another program can follow.
#[derive(Debug)]
pub(crate) struct StepLog {
    path: PathBuf,
    file: Mutex<(File, Option<io::Error>)>,
}

/// What the training loop knows of a step besides its record.
#[derive(Debug, Serialize)]
pub(crate) struct StepInfo {
    pub(crate) epoch: usize,
    pub(crate) lr: f64,
    /// All that this rank did in the step, reading the rows included.
    #[serde(rename = "step_us", serialize_with = "micros")]
    pub(crate) time: Duration,
}

#[derive(Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    info: &'a StepInfo,
    samples_per_second: f64,
    hidden: f64,
    #[serde(flatten)]
    record: &'a StepRecord,
}

impl StepLog {
    /// Opens `path`, and replaces what is there.
    ///
    /// # Errors
    /// [`Error::Write`] if no file can be there.
    pub(crate) fn create(path: &Path) -> Result<Self, Error> {
        let file = File::create(path).map_err(|error| Error::write(path, &error))?;
        Ok(Self {
            path: path.to_owned(),
            file: Mutex::new((file, None)),
        })
    }

    /// Writes the line of one rank's step. What cannot be written is told at the end: training
    /// does not stop for it.
    pub(crate) fn write(&self, info: &StepInfo, record: &StepRecord) {
        let line = Line {
            info,
            samples_per_second: record.samples as f64 / info.time.as_secs_f64(),
            hidden: record.hidden(),
            record,
        };
        let mut line = serde_json::to_vec(&line).expect("a record serialises");
        line.push(b'\n');
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let (file, failure) = &mut *file;
        // Half a line, as a full disk leaves it, gets no other behind it.
        if failure.is_none() {
            *failure = file.write_all(&line).err();
        }
    }

    /// Says whether all lines were written.
    ///
    /// # Errors
    /// [`Error::Write`] with the first reason why not.
    pub(crate) fn finish(self) -> Result<(), Error> {
        let (_, failure) = self
            .file
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        failure.map_or(Ok(()), |error| Err(Error::write(&self.path, &error)))
    }
}

fn micros<S: serde::Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u64(time.as_micros() as u64)
}
