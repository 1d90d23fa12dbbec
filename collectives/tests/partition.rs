//! Cuts: every element in one part, in order, parts alike in size.
use collectives::Partition;
use proptest::prelude::*;

use crate::world::panics;

proptest! {
    #[test]
    fn parts_follow_each_other_without_gap(len in 0usize..5000, parts in 1usize..40, piece in 1usize..70) {
        let cut = Partition::new(len, parts).with_piece(piece);
        let mut end = 0;
        for part in 0..parts {
            let range = cut.range(part);
            prop_assert_eq!(range.start, end);
            prop_assert!(range.start <= range.end);
            end = range.end;
        }
        prop_assert_eq!(end, len);
    }

    #[test]
    fn lengths_differ_by_at_most_one_and_the_longer_come_first(len in 0usize..5000, parts in 1usize..40) {
        let cut = Partition::new(len, parts);
        let lengths: Vec<_> = (0..parts).map(|part| cut.range(part).len()).collect();
        prop_assert!(lengths[0] - lengths[parts - 1] <= 1);
        prop_assert!(lengths.is_sorted_by(|a, b| a >= b));
    }

    #[test]
    fn cuts_fall_on_whole_pieces(len in 0usize..5000, parts in 1usize..40, piece in 1usize..70) {
        let cut = Partition::new(len, parts).with_piece(piece);
        let pieces: Vec<_> = (0..parts).map(|part| cut.range(part).len().div_ceil(piece)).collect();
        prop_assert!(pieces[0] - pieces[parts - 1] <= 1);
        for part in 0..parts {
            let start = cut.range(part).start;
            prop_assert!(start % piece == 0 || start == len);
        }
    }

    #[test]
    fn a_span_is_the_parts_it_holds(len in 0usize..500, parts in 1usize..40, from in 0usize..40, to in 0usize..40) {
        let (from, to) = (from.min(to).min(parts), from.max(to).min(parts));
        let cut = Partition::new(len, parts);
        let held: Vec<_> = (from..to).flat_map(|part| cut.range(part)).collect();
        prop_assert_eq!(cut.span(from..to).collect::<Vec<_>>(), held);
    }
}

#[test]
fn seventy_three_over_four_is_19_18_18_18() {
    let cut = Partition::new(73, 4);
    assert_eq!(
        [0, 1, 2, 3].map(|part| cut.range(part).len()),
        [19, 18, 18, 18]
    );
}

#[test]
fn pieces_of_4096_are_dealt_as_alink_deals_them() {
    /// Doubles, ranks, and the pieces that each rank starts at and has.
    type Row<'a> = (usize, usize, &'a [usize], &'a [usize]);
    const PIECE: usize = 4096;
    let table: [Row<'_>; 9] = [
        (0, 6, &[0; 6], &[0; 6]),
        (15, 5, &[0, 1, 1, 1, 1], &[1, 0, 0, 0, 0]),
        (
            4095,
            8,
            &[0, 1, 1, 1, 1, 1, 1, 1],
            &[1, 0, 0, 0, 0, 0, 0, 0],
        ),
        (
            4096,
            8,
            &[0, 1, 1, 1, 1, 1, 1, 1],
            &[1, 0, 0, 0, 0, 0, 0, 0],
        ),
        (4097, 3, &[0, 1, 2], &[1, 1, 0]),
        (
            3 * PIECE,
            8,
            &[0, 1, 2, 3, 3, 3, 3, 3],
            &[1, 1, 1, 0, 0, 0, 0, 0],
        ),
        (
            50 * PIECE,
            8,
            &[0, 7, 14, 20, 26, 32, 38, 44],
            &[7, 7, 6, 6, 6, 6, 6, 6],
        ),
        (49 * PIECE + 1, 5, &[0, 10, 20, 30, 40], &[10; 5]),
        (
            100 * PIECE,
            7,
            &[0, 15, 30, 44, 58, 72, 86],
            &[15, 15, 14, 14, 14, 14, 14],
        ),
    ];
    for (doubles, ranks, starts, counts) in table {
        let cut = Partition::new(doubles, ranks).with_piece(PIECE);
        for rank in 0..ranks {
            let expected = [starts[rank], starts[rank] + counts[rank]];
            let [start, end] = expected.map(|piece| (piece * PIECE).min(doubles));
            assert_eq!(
                cut.range(rank),
                start..end,
                "{doubles} doubles, rank {rank} of {ranks}"
            );
        }
    }
}

#[test]
fn no_parts_and_no_piece_are_refused() {
    assert!(panics(|| _ = Partition::new(3, 0)));
    assert!(panics(|| _ = Partition::new(3, 1).with_piece(0)));
}
