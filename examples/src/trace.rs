//! The trace of a run: what every thread did when, for Perfetto and as a drawing.

mod event;
mod recorder;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tracing::Dispatch;
use tracing::dispatcher::with_default;

use crate::Error;
use crate::report::step_svg;
use recorder::Recorder;

pub(crate) use event::{Lane, TraceEvent};

/// A file of trace events that is being written.
///
/// It is in the JSON array format that Perfetto and `chrome://tracing` open, one event a line.
/// All threads share one clock and one process; each has a lane of its own, in the order rank
/// 0, rank 0's communication, rank 1 and so on. The spans and events of the target `lockstep`
/// are recorded, with their fields as `args`.
///
/// Each event is written when it is over, so memory does not grow with the run. Only one step
/// is kept, to be drawn. When the recording is finished, or dropped because of an error or a
/// panic, the file is valid JSON; the readers named above take one that was cut off, too.
///
/// ```
/// use examples::Recording;
/// use tracing::info_span;
///
/// let path = std::env::temp_dir().join(format!("lockstep-{}.json", std::process::id()));
/// let recording = Recording::create(&path, 1, 1)?;
/// recording.record(|| info_span!(target: "lockstep", "forward", rank = 0).in_scope(|| 6 * 7));
/// recording.finish()?;
/// let events: Vec<serde_json::Value> = serde_json::from_slice(&std::fs::read(&path)?)?;
/// let forward = events.iter().find(|event| event["name"] == "forward").unwrap();
/// assert_eq!((&forward["ph"], &forward["args"]["rank"]), (&"X".into(), &0.into()));
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Recording {
    path: PathBuf,
    drawn: usize,
    recorder: Arc<Recorder>,
}

impl Recording {
    /// Opens `path`, and replaces what is there. Of the `ranks` ranks' steps, number `drawn` is
    /// kept for the drawing.
    ///
    /// # Errors
    /// [`Error::Write`] if no file can be there.
    pub fn create(path: &Path, drawn: usize, ranks: usize) -> Result<Self, Error> {
        let drawing = drawing_path(path);
        if drawing.is_dir() {
            let error = std::io::Error::from(std::io::ErrorKind::IsADirectory);
            return Err(Error::write(&drawing, &error));
        }
        let recorder = Recorder::create(path, drawn, ranks);
        let recorder = recorder.map_err(|error| Error::write(path, &error))?;
        Ok(Self {
            path: path.to_owned(),
            drawn,
            recorder: Arc::new(recorder),
        })
    }

    /// Runs `body` and records what this thread does in it, and the ranks that it spawns.
    /// Other runs in this process, at the same time or later, are not seen.
    pub fn record<R>(&self, body: impl FnOnce() -> R) -> R {
        let listener = Dispatch::new(self.recorder.clone());
        // With one subscriber in the process, `tracing` asks that of whichever thread comes to
        // a callsite first, and a thread that nobody records would switch it off for all.
        let second = Dispatch::new(self.recorder.clone());
        let outcome = with_default(&listener, body);
        drop((listener, second));
        // Back to callsites that cost nothing.
        tracing::callsite::rebuild_interest_cache();
        outcome
    }

    /// Ends the file, and draws the step that was kept beside it, under the same name with the
    /// extension `svg`. A run that did not come to the end of that step has no drawing.
    ///
    /// # Errors
    /// [`Error::Write`] if something could not be written, now or before.
    pub fn finish(self) -> Result<(), Error> {
        let end = self.recorder.end();
        end.map_err(|error| Error::write(&self.path, &error))?;
        let lanes = self.recorder.step();
        if lanes.is_empty() {
            return Ok(());
        }
        let path = drawing_path(&self.path);
        let drawing = step_svg(&format!("Step {}", self.drawn), &lanes);
        std::fs::write(&path, drawing).map_err(|error| Error::write(&path, &error))
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // After an error that the caller already has.
        drop(self.recorder.end());
    }
}

/// Where the drawing of a trace lies.
pub(crate) fn drawing_path(trace: &Path) -> PathBuf {
    trace.with_extension("svg")
}
