//! How near the limit anything can come in safe Rust: an all_reduce between two in which
//! no byte is copied. Halves of buffers change hands, and come back summed.
use std::{thread, time::Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::{Times, gate::Gate, machine::Kernel, pin::pin};

type Half = Vec<f32>;

/// One of the two: the half it sums, the half it gives away, and its ends of two channels.
struct Side {
    kept: Half,
    lent: Half,
    to: Sender<Half>,
    from: Receiver<Half>,
}

/// Microseconds of `calls` all_reduces of `bytes`, each on buffers just rewritten.
pub(super) fn handed_over(bytes: usize, calls: usize) -> Times {
    let half = || vec![1.0; bytes / size_of::<f32>() / 2];
    let ((to_right, from_left), (to_left, from_right)) = (bounded(2), bounded(2));
    let ends = [(to_right, from_right), (to_left, from_left)];
    let sides = ends.map(|(to, from)| Side {
        kept: half(),
        lent: half(),
        to,
        from,
    });
    let gate = Gate::new(2);
    let times: Vec<Vec<f64>> = thread::scope(|scope| {
        let mut number = 0..;
        let threads = sides.map(|mut side| {
            let (gate, number) = (&gate, number.next().unwrap_or(0));
            scope.spawn(move || {
                pin(number);
                let _member = gate.member();
                (0..calls).map_while(|_| side.call(gate)).collect()
            })
        });
        threads
            .into_iter()
            .filter_map(|thread| thread.join().ok())
            .collect()
    });
    let slowest = |call| times.iter().map(|times| times[call]).fold(0.0, f64::max);
    let calls = times.iter().map(Vec::len).min().unwrap_or(0);
    Times::new((0..calls).map(slowest).collect())
}

impl Side {
    /// None if the other is gone.
    fn call(&mut self, gate: &Gate) -> Option<f64> {
        self.kept.fill(1.0);
        self.lent.fill(2.0);
        gate.enter().then_some(())?;
        let start = Instant::now();
        self.to.send(std::mem::take(&mut self.lent)).ok()?;
        let mut theirs = self.from.recv().ok()?;
        Kernel::AddToBoth.pass(&mut self.kept, &mut theirs);
        self.to.send(theirs).ok()?;
        self.lent = self.from.recv().ok()?;
        let time = start.elapsed().as_secs_f64() * 1e6;
        gate.leave().then_some(time)
    }
}
