//! What was moved for gradients.

use collectives::{Collective, Row, Stats};

/// What reductions moved so far: all-reduces, and where micro-shards do not close the exchange and
/// the gathering of their blocks.
pub(crate) fn reductions(stats: &Stats) -> Row {
    stats.of(Collective::AllReduce)
        + stats.of(Collective::AllToAll)
        + stats.of(Collective::AllGather)
}

/// The bytes of `row` beyond those of `before`.
pub(crate) fn minus(row: Row, before: Row) -> Row {
    Row {
        bytes_sent: row.bytes_sent - before.bytes_sent,
        predicted_sent: row.predicted_sent - before.predicted_sent,
        ..row
    }
}
