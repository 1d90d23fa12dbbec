//! One line of a table of times, for people and for programs.
use collectives::Collective;
use serde::Serialize;

use super::{
    Job, Measured,
    table::{Columns, short},
};

/// One collective, size and algorithm. The keys are those of the JSON lines.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The operation.
    pub collective: &'static str,
    /// Who did the moving: `planned`.
    pub engine: &'static str,
    /// What really ran, such as `ring` or `direct+ring`; `-` for single messages.
    pub algorithm: String,
    /// What started the ranks: `threads`.
    pub launcher: &'static str,
    /// How many ranks.
    pub ranks: usize,
    /// Bytes in the whole buffer.
    pub bytes: usize,
    /// Elements in it.
    pub count: usize,
    /// Their type.
    pub dtype: &'static str,
    /// How they were folded; `none` where they were not.
    pub redop: &'static str,
    /// The median over calls of the slowest rank's time.
    pub time_us: f64,
    /// The shortest.
    pub min_us: f64,
    /// The 99th percentile.
    pub p99_us: f64,
    /// Bytes over the median, in GB/s.
    pub algbw: f64,
    /// The same times nccl-tests' factor.
    pub busbw: f64,
    /// Wrong elements over all ranks.
    pub wrong: u64,
    /// Bytes sent in a call by the rank that sends most, as counted.
    pub bytes_sent: u64,
    /// The same by formula.
    pub bytes_formula: u64,
    /// The machine's least time over the shortest measured one, where the machine
    /// was measured in the same run.
    pub of_limit: Option<f64>,
}

impl Row {
    /// The row of a measurement; `floor_us` is the machine's least time for it.
    pub fn new(job: &Job, ranks: usize, measured: &Measured, floor_us: Option<f64>) -> Self {
        let time_us = measured.times.median();
        let algbw = job.bytes() as f64 / time_us * 1e-3;
        Self {
            collective: name(job.collective),
            engine: "planned",
            algorithm: measured
                .route
                .map_or("-".to_owned(), |route| route.to_string()),
            launcher: "threads",
            ranks,
            bytes: job.bytes(),
            count: job.count,
            dtype: job.dtype.name(),
            redop: if job.reduces() { job.op.name() } else { "none" },
            time_us,
            min_us: measured.times.min(),
            p99_us: measured.times.p99(),
            algbw,
            busbw: algbw * job.bus_factor(ranks),
            wrong: measured.wrong,
            bytes_sent: measured.sent,
            bytes_formula: measured.formula,
            of_limit: floor_us.map(|floor| floor / measured.times.min()),
        }
    }

    pub(super) fn columns() -> Columns {
        Columns::new([
            ("size(B)", 10),
            ("count", 10),
            ("type", 4),
            ("redop", 7),
            ("algorithm", 14),
            ("time(us)", 9),
            ("min(us)", 9),
            ("p99(us)", 9),
            ("algbw(GB/s)", 7),
            ("busbw(GB/s)", 7),
            ("of limit", 8),
            ("sent/rank(B)", 10),
            ("formula(B)", 10),
            ("#wrong", 6),
        ])
    }

    pub(super) fn cells(&self) -> [String; 14] {
        [
            self.bytes.to_string(),
            self.count.to_string(),
            self.dtype.to_owned(),
            self.redop.to_owned(),
            self.algorithm.clone(),
            short(self.time_us),
            short(self.min_us),
            short(self.p99_us),
            short(self.algbw),
            short(self.busbw),
            self.of_limit
                .map_or("-".to_owned(), |share| format!("{:.0} %", 100.0 * share)),
            self.bytes_sent.to_string(),
            self.bytes_formula.to_string(),
            self.wrong.to_string(),
        ]
    }
}

/// The operation's name as a word of the command line.
pub(super) fn name(collective: Collective) -> &'static str {
    match collective {
        Collective::SendRecv => "sendrecv",
        other => other.name(),
    }
}
