//! Values of any type, by way of bytes.
use collectives::{Algorithm, Collective, Error};
use serde::{Deserialize, Serialize};

use crate::world::{by, each_rank, everywhere};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Settings {
    name: String,
    rates: Vec<f64>,
    decay: Option<f32>,
    kind: Kind,
    shape: (usize, i64),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Kind {
    Plain,
    Nested { left: Box<Kind>, right: Vec<Kind> },
}

fn settings(rank: usize) -> Settings {
    Settings {
        name: format!("rank {rank} — ü"),
        rates: (0..rank).map(|index| 0.1 * index as f64).collect(),
        decay: rank.is_multiple_of(2).then_some(f32::MIN_POSITIVE),
        kind: Kind::Nested {
            left: Box::new(Kind::Plain),
            right: vec![Kind::Plain; rank],
        },
        shape: (usize::MAX - rank, -(rank as i64)),
    }
}

#[test]
fn a_struct_reaches_every_rank_from_every_root() {
    for (algorithm, world) in everywhere(&[1, 2, 3, 5]) {
        each_rank(world, &by(algorithm), |mut communicator| {
            let rank = communicator.rank();
            for root in 0..world {
                let mine = (rank == root).then(|| settings(root));
                assert_eq!(
                    communicator.broadcast_object(mine, root),
                    Ok(settings(root))
                );
            }
            // What a rank that is not the root gives does not count.
            let mine = Some(settings(rank));
            assert_eq!(communicator.broadcast_object(mine, 0), Ok(settings(0)));
        });
    }
}

#[test]
fn every_rank_gets_every_rank_s_value_in_order() {
    for (algorithm, world) in everywhere(&[1, 2, 3, 5, 8]) {
        each_rank(world, &by(algorithm), |mut communicator| {
            let mine = settings(communicator.rank());
            let all = communicator.all_gather_object(&mine).unwrap();
            assert!(all.into_iter().eq((0..world).map(settings)));
        });
    }
}

#[test]
fn values_without_bytes_are_values() {
    for (algorithm, world) in everywhere(&[1, 3]) {
        each_rank(world, &by(algorithm), |mut communicator| {
            let rank = communicator.rank();
            let mine = (rank == 0).then_some(());
            assert_eq!(communicator.broadcast_object(mine, 0), Ok(()));
            assert_eq!(communicator.all_gather_object(&()), Ok(vec![(); world]));
            // Some with bytes, some with hardly any.
            let mine = vec![rank as u64; if rank == 1 { 0 } else { 5 }];
            let all = communicator.all_gather_object(&mine).unwrap();
            assert_eq!(all[0], [0; 5]);
            assert_eq!(all.get(1).map_or(0, Vec::len), 0);
            let mine = (rank == 0).then(String::new);
            assert_eq!(communicator.broadcast_object(mine, 0), Ok(String::new()));
        });
    }
}

#[test]
fn a_large_value_arrives_whole() {
    for &algorithm in Algorithm::ALL {
        each_rank(3, &by(algorithm), |mut communicator| {
            let rank = communicator.rank();
            let large = |rank: usize| -> Vec<u32> {
                (0..200_000u32)
                    .map(|x| x.wrapping_mul(2_654_435_761) + rank as u32)
                    .collect()
            };
            let mine = (rank == 2).then(|| large(2));
            assert_eq!(communicator.broadcast_object(mine, 2).unwrap(), large(2));
            let all = communicator.all_gather_object(&large(rank)).unwrap();
            assert!(all.into_iter().eq((0..3).map(large)));
        });
    }
}

#[test]
fn a_value_of_another_type_is_an_error_on_the_rank_that_reads_it_and_stops_the_others() {
    for &algorithm in Algorithm::ALL {
        let errors = each_rank(3, &by(algorithm), |mut communicator| {
            let rank = communicator.rank();
            let sent = (rank == 0).then(|| "four".to_owned());
            // Three numbers are the bytes of no text of that length.
            let outcome = match rank {
                1 => communicator
                    .broadcast_object::<(u64, u64, u64, Option<bool>)>(None, 0)
                    .map(drop),
                _ => communicator.broadcast_object(sent, 0).map(drop),
            };
            // The others may be through by then, or hear of it on the way.
            assert!(rank != 1 || outcome.is_err());
            outcome.and_then(|()| communicator.barrier()).unwrap_err()
        });
        assert!(
            matches!(errors[1], Error::Object { peer: 0, .. }),
            "{}",
            errors[1]
        );
        for error in errors {
            assert_eq!(error.ranks(), [0], "{error}");
            let text = error.to_string();
            assert!(
                text.contains("the object of rank 0 cannot be read"),
                "{text}"
            );
            assert!(text.contains("#2 broadcast"), "{text}");
        }
    }
}

#[test]
fn bytes_that_are_left_over_are_an_error_too() {
    let errors = each_rank(2, &by(Algorithm::Tree), |mut communicator| {
        let outcome = match communicator.rank() {
            // A number, and five letters behind it.
            0 => communicator
                .all_gather_object(&(7u8, "seven".to_owned()))
                .map(drop),
            _ => communicator.all_gather_object(&7u8).map(drop),
        };
        outcome.and_then(|()| communicator.barrier()).unwrap_err()
    });
    let text = errors[1].to_string();
    let said = "#2 all_gather of 7 x u8, by";
    assert!(!text.contains(said), "no route is known there: {text}");
    assert!(text.contains("#2 all_gather"), "{text}");
    assert!(text.contains("6 of its 7 bytes are left over"), "{text}");
}

#[test]
fn a_length_that_no_memory_holds_is_an_error_and_not_the_end_of_the_process() {
    for lie in [u64::MAX, 1 << 60] {
        let errors = each_rank(2, &by(Algorithm::Tree), |mut communicator| {
            let outcome = match communicator.rank() {
                // What an object's length looks like, from a rank that lies.
                0 => communicator.broadcast(&mut [lie], 0),
                _ => communicator.broadcast_object::<String>(None, 0).map(drop),
            };
            outcome.and_then(|()| communicator.barrier()).unwrap_err()
        });
        for error in errors {
            assert_eq!(error.ranks(), [0], "{error}");
            assert!(
                error.to_string().contains("there is no room for"),
                "{error}"
            );
        }
        let errors = each_rank(2, &by(Algorithm::Tree), |mut communicator| {
            let outcome = match communicator.rank() {
                0 => communicator.all_gather(&[lie], &mut [0, 0]),
                _ => communicator.all_gather_object(&1u8).map(drop),
            };
            outcome.and_then(|()| communicator.barrier()).unwrap_err()
        });
        for error in errors {
            assert_eq!(error.ranks(), [0], "{error}");
            assert!(
                error.to_string().contains("there is no room for"),
                "{error}"
            );
        }
    }
}

#[test]
fn a_root_without_a_value_stops_all() {
    let errors = each_rank(3, &by(Algorithm::Ring), |mut communicator| {
        communicator.broadcast_object::<u8>(None, 1).unwrap_err()
    });
    assert!(matches!(errors[1], Error::Argument { .. }), "{}", errors[1]);
    for error in errors {
        assert_eq!(error.ranks(), [1], "{error}");
        assert!(error.to_string().contains("it gives none"), "{error}");
    }
}

#[test]
fn an_object_is_two_calls_of_the_kind_it_is_made_of() {
    each_rank(3, &by(Algorithm::Ring), |mut communicator| {
        communicator.broadcast_object(Some(5u8), 0).unwrap();
        communicator.all_gather_object(&5u8).unwrap();
        for collective in [Collective::Broadcast, Collective::AllGather] {
            let row = communicator.stats().of(collective);
            assert_eq!(row.calls, 2, "{collective}");
            assert_eq!(row.bytes_sent, row.predicted_sent, "{collective}");
        }
    });
}
