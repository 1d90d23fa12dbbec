//! What a listener of `tracing` sees of a world.
use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use collectives::{Algorithm, Collective, CommStream, CommunicatorConfig, ReduceOp, launch};
use tracing::{
    Dispatch, Event, Metadata, Subscriber,
    dispatcher::with_default,
    field::{Field, Visit},
    span::{Attributes, Id, Record},
};

use crate::world::by;

/// A span: the thread, the name, the fields.
type Seen = (String, &'static str, BTreeMap<&'static str, String>);

/// Remembers the spans of the library's target.
#[derive(Default)]
struct Listener {
    ids: AtomicU64,
    seen: Mutex<Vec<Seen>>,
}

struct Fields(BTreeMap<&'static str, String>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "lockstep"
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let mut fields = Fields(BTreeMap::new());
        attributes.record(&mut fields);
        let here = thread::current().name().unwrap_or_default().to_owned();
        let name = attributes.metadata().name();
        self.seen.lock().unwrap().push((here, name, fields.0));
        Id::from_u64(1 + self.ids.fetch_add(1, Ordering::Relaxed))
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// What is seen of `body`, heard on this thread alone.
fn heard(body: impl FnOnce()) -> Vec<Seen> {
    let listener = Arc::new(Listener::default());
    let dispatch = Dispatch::new(listener.clone());
    // One subscriber alone is switched off by the first thread that does not have it: the
    // tests beside this one have such threads.
    let _second = Dispatch::new(listener.clone());
    with_default(&dispatch, body);
    std::mem::take(&mut *listener.seen.lock().unwrap())
}

#[test]
fn each_call_is_a_span_with_its_rank_algorithm_bytes_and_number() {
    let seen = heard(|| {
        launch::spawn(2, &by(Algorithm::Ring), |mut communicator| {
            communicator.all_reduce(&mut [1.0f32; 6], ReduceOp::Sum)?;
            communicator.barrier()?;
            let to = 1 - communicator.rank();
            communicator.sendrecv(to, &[1u8; 3], to, &mut [0; 3])
        })
        .unwrap();
    });
    for rank in 0..2 {
        let thread = format!("rank {rank}");
        let spans: Vec<_> = seen.iter().filter(|(at, _, _)| *at == thread).collect();
        let names: Vec<_> = spans.iter().map(|(_, name, _)| *name).collect();
        let calls = [
            Collective::AllReduce,
            Collective::Barrier,
            Collective::SendRecv,
        ];
        assert_eq!(names, calls.map(Collective::name));
        let field = |span: usize, name| spans[span].2.get(name).map(String::as_str);
        let rank = rank.to_string();
        assert!((0..3).all(|span| field(span, "rank") == Some(&rank)));
        // Two ranks: one half out in each pass, of 6 x 4 bytes.
        assert_eq!(field(0, "algorithm"), Some("ring"));
        assert_eq!(field(0, "bytes"), Some("24"));
        assert_eq!(
            [0, 1].map(|span| field(span, "call")),
            [Some("1"), Some("2")]
        );
        // A single message has no plan.
        assert_eq!(
            (field(2, "algorithm"), field(2, "bytes")),
            (None, Some("3"))
        );
    }
}

#[test]
fn a_listener_of_the_callers_thread_hears_the_communication_threads_and_no_other_world() {
    let elsewhere = thread::spawn(|| {
        for _ in 0..50 {
            launch::spawn(2, &CommunicatorConfig::new(), |mut communicator| {
                communicator.all_reduce(&mut [1.0f32; 7], ReduceOp::Max)
            })
            .unwrap();
        }
    });
    let seen = heard(|| {
        launch::spawn(3, &CommunicatorConfig::new(), |communicator| {
            let stream = CommStream::new(communicator)?;
            stream.all_reduce(vec![1.0f32; 3], ReduceOp::Sum).wait()
        })
        .unwrap();
    });
    elsewhere.join().unwrap();
    let mut threads: Vec<_> = seen
        .iter()
        .map(|(at, name, _)| (at.as_str(), *name))
        .collect();
    threads.sort_unstable();
    let all = ["rank 0 comm", "rank 1 comm", "rank 2 comm"];
    assert_eq!(threads, all.map(|at| (at, "all_reduce")));
}
