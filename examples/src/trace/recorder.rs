//! Listens to `tracing` and writes down what is over.
//!
//! A span costs two looks at the clock, a line of JSON and one lock that all threads share:
//! about two microseconds (2 cores, dev profile, 2026-11-30).

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Metadata, Subscriber, level_filters::LevelFilter};

use super::event::{Arguments, Lane, TraceEvent};

/// The spans and events of the project itself.
const TARGET: &str = "lockstep";
/// The span around all that a rank does in one step.
const STEP: &str = "step";

#[derive(Debug)]
pub(super) struct Recorder {
    began: Instant,
    spans: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// None once the file is at its end.
    file: Option<BufWriter<File>>,
    /// Why something is missing in it.
    failure: Option<io::Error>,
    open: HashMap<u64, OpenSpan>,
    lanes: HashMap<ThreadId, Lane>,
    kept: Kept,
}

#[derive(Debug)]
struct OpenSpan {
    name: &'static str,
    arguments: Arguments,
    handles: usize,
}

/// The events of one step, from the first rank's beginning of it to the last one's end.
#[derive(Debug)]
struct Kept {
    step: usize,
    ranks: usize,
    entered: usize,
    left: usize,
    events: Vec<(Lane, TraceEvent)>,
}

thread_local! {
    /// The spans that this thread is in, and since when.
    static INSIDE: RefCell<Vec<(u64, Instant)>> = const { RefCell::new(Vec::new()) };
}

/// One line of the file. Times are in microseconds, with the nanoseconds behind the point.
#[derive(Serialize)]
struct Line<'a> {
    name: &'a str,
    cat: &'a str,
    ph: &'a str,
    ts: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    /// How far a mark without a duration reaches: its thread.
    #[serde(skip_serializing_if = "Option::is_none")]
    s: Option<&'a str>,
    pid: u64,
    tid: u64,
    args: &'a Arguments,
}

/// Perfetto takes 0 for the idle process.
const PROCESS: u64 = 1;

impl Recorder {
    pub(super) fn create(path: &Path, step: usize, ranks: usize) -> io::Result<Self> {
        let mut file = BufWriter::new(File::create(path)?);
        write!(
            file,
            "[\n{}",
            metadata("process_name", 0, "name", "lockstep".into())
        )?;
        Ok(Self {
            began: Instant::now(),
            spans: AtomicU64::new(1),
            state: Mutex::new(State {
                file: Some(file),
                failure: None,
                open: HashMap::new(),
                lanes: HashMap::new(),
                kept: Kept {
                    step,
                    ranks,
                    entered: 0,
                    left: 0,
                    events: Vec::new(),
                },
            }),
        })
    }

    /// Ends the file; says so if something is missing in it.
    pub(super) fn end(&self) -> io::Result<()> {
        let mut state = self.state();
        if let Some(mut file) = state.file.take() {
            file.write_all(b"\n]\n")?;
            file.flush()?;
        }
        state.failure.take().map_or(Ok(()), Err)
    }

    /// What each lane did in the step that was kept, in the order of the lanes; nothing if not
    /// every rank came to its end.
    pub(super) fn step(&self) -> Vec<(Lane, Vec<TraceEvent>)> {
        let mut state = self.state();
        let kept = &mut state.kept;
        if kept.left < kept.ranks {
            return Vec::new();
        }
        let events = std::mem::take(&mut kept.events);
        by_lane(events, kept.step)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A thread that panicked meanwhile has at worst left a line out.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn since_beginning(&self, time: Instant) -> Duration {
        time.saturating_duration_since(self.began)
    }
}

impl State {
    fn write(&mut self, event: TraceEvent) {
        let here = thread::current();
        let lane = match self.lanes.get(&here.id()) {
            Some(lane) => lane.clone(),
            None => self.add_lane(here.id(), here.name().unwrap_or("unnamed")),
        };
        let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
        let line = Line {
            name: event.name(),
            cat: TARGET,
            ph: if event.end.is_some() { "X" } else { "i" },
            ts: micros(event.start),
            dur: event.end.map(|end| micros(end - event.start)),
            s: event.end.is_none().then_some("t"),
            pid: PROCESS,
            tid: lane.number,
            args: &event.arguments,
        };
        let line = serde_json::to_string(&line).expect("an event serialises");
        self.line(&line);
        if self.kept.entered > 0 && self.kept.left < self.kept.ranks {
            self.kept.events.push((lane, event));
        }
    }

    fn add_lane(&mut self, thread: ThreadId, name: &str) -> Lane {
        let lane = Lane::of(name, |number| {
            self.lanes.values().any(|lane| lane.number == number)
        });
        self.line(&metadata(
            "thread_name",
            lane.number,
            "name",
            lane.name.as_str().into(),
        ));
        self.line(&metadata(
            "thread_sort_index",
            lane.number,
            "sort_index",
            lane.number.into(),
        ));
        self.lanes.insert(thread, lane.clone());
        lane
    }

    fn line(&mut self, line: &str) {
        // After the end there is nothing to write to.
        let Some(file) = &mut self.file else { return };
        if let Err(error) = write!(file, ",\n{line}") {
            self.failure.get_or_insert(error);
        }
    }
}

fn metadata(what: &str, lane: u64, key: &str, value: Value) -> String {
    let mut args = Arguments::default();
    args.set(key, value);
    json!({ "name": what, "ph": "M", "pid": PROCESS, "tid": lane, "args": args }).to_string()
}

/// Whether this is all of step number `step` of a rank.
fn is_whole(name: &str, arguments: &Arguments, step: usize) -> bool {
    name == STEP && arguments.number("step") == Some(step as u64)
}

/// Sorts the events into lanes, and each rank's by the step of that rank: another rank may have
/// begun earlier or ended later.
fn by_lane(events: Vec<(Lane, TraceEvent)>, step: usize) -> Vec<(Lane, Vec<TraceEvent>)> {
    let steps: HashMap<u64, (Duration, Duration)> = events
        .iter()
        .filter(|(_, event)| is_whole(event.name(), &event.arguments, step))
        .filter_map(|(lane, event)| Some((lane.rank?, (event.start, event.end?))))
        .collect();
    let mut lanes: Vec<(Lane, Vec<TraceEvent>)> = Vec::new();
    for (lane, event) in events {
        let Some((start, end)) = lane.rank.and_then(|rank| steps.get(&rank)) else {
            continue;
        };
        if event.start < *start || event.end.unwrap_or(event.start) > *end {
            continue;
        }
        match lanes.iter_mut().find(|(known, _)| *known == lane) {
            Some((_, events)) => events.push(event),
            None => lanes.push((lane, vec![event])),
        }
    }
    lanes.sort_by_key(|(lane, _)| lane.number);
    lanes
}

impl Subscriber for Recorder {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        match self.enabled(metadata) {
            true => Interest::always(),
            false => Interest::never(),
        }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == TARGET && LevelFilter::INFO >= *metadata.level()
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::INFO)
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let id = self.spans.fetch_add(1, Ordering::Relaxed);
        let mut arguments = Arguments::default();
        attributes.record(&mut arguments);
        let span = OpenSpan {
            name: attributes.metadata().name(),
            arguments,
            handles: 1,
        };
        self.state().open.insert(id, span);
        Id::from_u64(id)
    }

    fn record(&self, span: &Id, values: &Record<'_>) {
        if let Some(span) = self.state().open.get_mut(&span.into_u64()) {
            values.record(&mut span.arguments);
        }
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let start = self.since_beginning(Instant::now());
        let mut arguments = Arguments::default();
        event.record(&mut arguments);
        let name = event.metadata().name();
        self.state()
            .write(TraceEvent::new(name, start, None, arguments));
    }

    fn enter(&self, span: &Id) {
        let id = span.into_u64();
        {
            let State { open, kept, .. } = &mut *self.state();
            let span = open.get(&id);
            let whole = span.is_some_and(|span| is_whole(span.name, &span.arguments, kept.step));
            kept.entered += usize::from(whole);
        }
        INSIDE.with_borrow_mut(|inside| inside.push((id, Instant::now())));
    }

    fn exit(&self, span: &Id) {
        let now = Instant::now();
        let id = span.into_u64();
        let since = INSIDE.with_borrow_mut(|inside| {
            let at = inside.iter().rposition(|(known, _)| *known == id)?;
            Some(inside.remove(at).1)
        });
        let mut state = self.state();
        let (Some(since), Some(span)) = (since, state.open.get(&id)) else {
            return;
        };
        let whole = is_whole(span.name, &span.arguments, state.kept.step);
        let (name, arguments) = (span.name, span.arguments.clone());
        let [start, end] = [since, now].map(|time| self.since_beginning(time));
        state.write(TraceEvent::new(name, start, Some(end), arguments));
        state.kept.left += usize::from(whole);
    }

    fn clone_span(&self, span: &Id) -> Id {
        if let Some(span) = self.state().open.get_mut(&span.into_u64()) {
            span.handles += 1;
        }
        span.clone()
    }

    fn try_close(&self, span: Id) -> bool {
        let mut state = self.state();
        let Some(open) = state.open.get_mut(&span.into_u64()) else {
            return false;
        };
        open.handles -= 1;
        let closed = open.handles == 0;
        if closed {
            state.open.remove(&span.into_u64());
        }
        closed
    }
}
