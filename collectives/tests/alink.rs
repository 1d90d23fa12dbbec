//! Alink's AllReduce, live: pieces of 4096 doubles, dealt evenly, each reduced by one
//! subtask and given back to all. That is `direct` with `direct_piece = 4096`.
//!
//! The table is that of the partition arithmetic in Alink's source, worked out by hand.
use collectives::{Algorithm, CommunicatorConfig, ReduceOp, transport::Counts};

use crate::world::{by, each_rank};

const PIECE: usize = 4096;

/// Doubles in the buffer, and how many pieces each subtask reduces.
const TABLE: [(usize, &[usize]); 12] = [
    (0, &[0, 0, 0, 0, 0, 0]),
    (15, &[1, 0, 0, 0, 0, 0, 0, 0]),
    (4095, &[1, 0, 0, 0, 0]),
    (4096, &[1, 0, 0, 0, 0]),
    (4097, &[1, 1, 0]),
    (8192, &[1, 1, 0, 0]),
    (8 * PIECE, &[3, 3, 2]),
    (3 * PIECE, &[1, 1, 1, 0, 0, 0, 0, 0]),
    (204_800, &[10, 10, 10, 10, 10]),
    (204_800, &[7, 7, 6, 6, 6, 6, 6, 6]),
    (204_801, &[7, 7, 7, 6, 6, 6, 6, 6]),
    (409_600, &[15, 15, 14, 14, 14, 14, 14]),
];

/// One piece a message, as there.
fn alink() -> CommunicatorConfig {
    by(Algorithm::Direct)
        .with_direct_piece(PIECE)
        .with_segment_kb(PIECE * size_of::<f64>() / 1024)
}

#[test]
fn each_subtask_reduces_its_pieces_and_gives_them_to_all() {
    for (len, pieces) in TABLE {
        // The last piece, which the last subtask that has any reduces, may be short.
        let mut left = len;
        let owned: Vec<_> = pieces
            .iter()
            .map(|&pieces| {
                let own = left.min(pieces * PIECE);
                left -= own;
                own
            })
            .collect();
        assert_eq!(left, 0, "the table covers the buffer");
        let world = pieces.len();
        each_rank(world, &alink(), |mut communicator| {
            let rank = communicator.rank();
            let whole = |rank: usize, index: usize| ((rank + 1) * (index % 1000)) as f64;
            let mut buffer: Vec<_> = (0..len).map(|index| whole(rank, index)).collect();
            communicator.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            let ranks = world * (world + 1) / 2 - 1;
            assert!((0..len).all(|index| buffer[index] == whole(ranks, index)));

            let stats = communicator.stats();
            for peer in (0..world).filter(|&peer| peer != rank) {
                // The peer's pieces, to be reduced there; then this rank's, reduced.
                // Where there are none an empty message keeps the ranks in step.
                let due = |first: usize, second: usize| Counts {
                    bytes: ((owned[first] + owned[second]) * size_of::<f64>()) as u64,
                    messages: (pieces[first].max(1) + pieces[second].max(1)) as u64,
                };
                let what = format!("{len} doubles, rank {rank} and {peer} of {world}");
                assert_eq!(stats.sent_to(peer), due(peer, rank), "{what}");
                assert_eq!(stats.received_from(peer), due(rank, peer), "{what}");
            }
            let total = stats.total();
            assert_eq!(total.bytes_sent, total.predicted_sent);
            assert_eq!(total.bytes_received, total.predicted_received);
        });
    }
}

#[test]
fn fifteen_doubles_are_reduced_by_the_first_subtask_alone() {
    let received = each_rank(8, &alink(), |mut communicator| {
        let mut sums = [1.0f64; 15];
        communicator.all_reduce(&mut sums, ReduceOp::Sum).unwrap();
        assert_eq!(sums, [8.0; 15]);
        communicator.stats().total().bytes_received
    });
    // From seven ranks their fifteen, against fifteen back from the one.
    assert_eq!(received, [7 * 120, 120, 120, 120, 120, 120, 120, 120]);
}
