//! What the machine could do at best: the limit that times are held against.
//!
//! Bandwidth is counted as what the program loads and stores, in GB/s.
use std::{
    hint::black_box,
    thread,
    time::{Duration, Instant},
};

use crossbeam_channel::bounded;

use super::{
    Times,
    gate::{Gate, cores},
    pin::pin,
};

/// Bytes of both arrays of a kernel, for each thread.
pub const WORKING_SETS: [usize; 6] = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];

/// One way to go through two arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// `a = b`.
    Copy,
    /// `a = a + b`.
    Add,
    /// `a, b = a + b`: an all_reduce between two, as it would be without messages.
    AddToBoth,
}

impl Kernel {
    /// Every kernel.
    pub const ALL: [Self; 3] = [Self::Copy, Self::Add, Self::AddToBoth];

    /// Goes through both arrays once.
    pub(super) fn pass(self, a: &mut [f32], b: &mut [f32]) {
        match self {
            Self::Copy => a.copy_from_slice(b),
            Self::Add => a.iter_mut().zip(b).for_each(|(a, b)| *a += *b),
            Self::AddToBoth => a.iter_mut().zip(b).for_each(|(a, b)| {
                *a += *b;
                *b = *a;
            }),
        }
    }

    /// Loads and stores for each byte of the working set: two arrays, each half of it.
    fn traffic(self) -> f64 {
        match self {
            Self::Copy => 1.0,
            Self::Add => 1.5,
            Self::AddToBoth => 2.0,
        }
    }
}

impl std::fmt::Display for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Copy => "a = b",
            Self::Add => "a += b",
            Self::AddToBoth => "a, b = a + b",
        })
    }
}

/// The best bandwidth of one kernel, number of threads and working set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bandwidth {
    /// What was done.
    pub kernel: Kernel,
    /// By how many threads at once.
    pub threads: usize,
    /// Bytes of both arrays, for each thread.
    pub working_set: usize,
    /// GB/s of all threads.
    pub best: f64,
}

/// The machine, as measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// By kernel, threads and working set.
    pub bandwidths: Vec<Bandwidth>,
    /// Microseconds from one thread to another through a channel: half a round trip.
    pub hand_over: Times,
}

impl Machine {
    /// Measures once; about a second.
    pub fn measure() -> Self {
        let mut threads = vec![1, cores().min(2), cores()];
        threads.dedup();
        let mut bandwidths = vec![];
        for kernel in Kernel::ALL {
            for &threads in &threads {
                bandwidths.extend(WORKING_SETS.map(|working_set| Bandwidth {
                    kernel,
                    threads,
                    working_set,
                    best: bandwidth(kernel, threads, working_set),
                }));
            }
        }
        Self {
            bandwidths,
            hand_over: hand_over(),
        }
    }

    /// The better of two rounds.
    pub fn and(mut self, round: Self) -> Self {
        for (best, other) in self.bandwidths.iter_mut().zip(&round.bandwidths) {
            best.best = best.best.max(other.best);
        }
        self.hand_over = self.hand_over.and(round.hand_over);
        self
    }

    /// The least time of an all_reduce of `bytes` among `ranks`, in microseconds:
    /// one hand-over, since nobody can begin without knowing that the others have, and
    /// the traffic of the kernel that needs no messages. There, whoever owns a slice
    /// reads it once from every buffer and writes the result once into every buffer:
    /// 2·N·S bytes for buffers of S bytes, so 4·S for two ranks, shared by as many
    /// threads as run at once.
    pub fn floor_us(&self, ranks: usize, bytes: usize) -> f64 {
        if ranks == 1 {
            return 0.0;
        }
        let counts = self.bandwidths.iter().map(|row| row.threads);
        let threads = counts
            .filter(|&threads| threads <= ranks)
            .max()
            .unwrap_or(1);
        let traffic = 2.0 * (ranks * bytes) as f64;
        let gb_per_s = self.at(Kernel::AddToBoth, threads, ranks * bytes / threads);
        self.hand_over.min() + traffic / gb_per_s * 1e-3
    }

    /// The bandwidth at any working set, between the measured ones.
    fn at(&self, kernel: Kernel, threads: usize, working_set: usize) -> f64 {
        let row: Vec<_> = (self.bandwidths.iter())
            .filter(|row| row.kernel == kernel && row.threads == threads)
            .map(|row| ((row.working_set as f64).ln(), row.best))
            .collect();
        interpolate(&row, (working_set.max(1) as f64).ln())
    }
}

/// The value at `x` on the line through `points`, in ascending order; beyond them that
/// of the nearest.
pub(super) fn interpolate(points: &[(f64, f64)], x: f64) -> f64 {
    let after = points.partition_point(|point| point.0 < x);
    match (
        after.checked_sub(1).map(|index| points[index]),
        points.get(after),
    ) {
        (Some((x0, y0)), Some(&(x1, y1))) => y0 + (y1 - y0) * (x - x0) / (x1 - x0),
        (Some((_, y)), None) | (None, Some(&(_, y))) => y,
        (None, None) => f64::NAN,
    }
}

/// The best of a few bursts, each long enough for the clock.
fn bandwidth(kernel: Kernel, threads: usize, working_set: usize) -> f64 {
    const BURSTS: usize = 5;
    const BURST: usize = 24 << 20;
    let passes = (BURST / working_set).max(1);
    let len = working_set / 2 / size_of::<f32>();
    let gate = Gate::new(threads);
    let burst = |thread| {
        pin(thread);
        let _member = gate.member();
        // Written once, so that every page is one of this thread's own.
        let (mut a, mut b) = (vec![1.0; len], vec![1.0; len]);
        kernel.pass(&mut a, &mut b);
        let mut times = [Duration::MAX; BURSTS];
        for time in &mut times {
            if !gate.enter() {
                break;
            }
            let start = Instant::now();
            for _ in 0..passes {
                kernel.pass(black_box(&mut a), black_box(&mut b));
            }
            *time = start.elapsed();
        }
        times
    };
    let times: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..threads)
            .map(|index| scope.spawn(move || burst(index)))
            .collect();
        threads
            .into_iter()
            .filter_map(|thread| thread.join().ok())
            .collect()
    });
    let slowest = |burst: usize| {
        times
            .iter()
            .map(|times| times[burst])
            .max()
            .unwrap_or(Duration::MAX)
    };
    let best = (0..BURSTS).map(slowest).min().unwrap_or(Duration::MAX);
    (threads * passes * working_set) as f64 * kernel.traffic() / best.as_secs_f64() * 1e-9
}

/// Half of a round trip between two threads, again and again.
fn hand_over() -> Times {
    const ROUND_TRIPS: u64 = 5000;
    let (to, from_here) = bounded::<u64>(4);
    let (back, from_there) = bounded::<u64>(4);
    let round_trip = move |word| {
        let start = Instant::now();
        // The other thread ends only when `to` is gone.
        let answer = to.send(word).map(|()| from_there.recv());
        let time = start.elapsed();
        debug_assert_eq!(answer, Ok(Ok(word)));
        time.as_secs_f64() * 1e6 / 2.0
    };
    thread::scope(|scope| {
        scope.spawn(move || {
            pin(1);
            from_here.iter().try_for_each(|word| back.send(word))
        });
        let here = scope.spawn(move || {
            pin(0);
            Times::new((0..ROUND_TRIPS).map(round_trip).collect())
        });
        here.join().unwrap_or_default()
    })
}
