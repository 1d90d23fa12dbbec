//! Worlds within a world: of their own number, links, deadlines and errors.
use std::{
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use collectives::{
    Algorithm, CommStream, Communicator, Error, Place, ReduceOp, Result,
    transport::{Local, Transport},
};

use crate::world::{Deed, alone, at_once, by, each_rank, everywhere, resident, soak, threads};

fn sum_of(communicator: &mut Communicator, mine: i64) -> i64 {
    let mut buffer = [mine];
    communicator.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
    buffer[0]
}

/// The members' ranks in their world, in the order of the group.
fn ranks_of(group: &mut Communicator, rank: usize) -> Vec<usize> {
    let mut all = vec![0; group.world_size()];
    group.all_gather(&[rank as u64], &mut all).unwrap();
    all.into_iter().map(|rank| rank as usize).collect()
}

#[test]
fn members_are_numbered_in_the_order_of_the_list() {
    for (algorithm, world) in everywhere(&[1, 2, 3, 5, 8]) {
        each_rank(world, &by(algorithm), |mut communicator| {
            let rank = communicator.rank();
            let lists = [
                (0..world).collect::<Vec<_>>(),
                (0..world).rev().collect(),
                (0..world).filter(|rank| rank % 2 == 0).collect(),
                vec![world - 1],
                vec![world / 2],
            ];
            for members in lists {
                let group = communicator.new_group(&members).unwrap();
                let Some(index) = members.iter().position(|&member| member == rank) else {
                    assert!(group.is_none());
                    continue;
                };
                let mut group = group.unwrap();
                assert_eq!(group.place(), Place::new(index, members.len()));
                let sum: usize = members.iter().sum();
                assert_eq!(sum_of(&mut group, rank as i64), sum as i64);
                assert_eq!(ranks_of(&mut group, rank), members);
                // Its counters are its own.
                assert_eq!(group.stats().total().calls, 2);
            }
            assert_eq!(sum_of(&mut communicator, 1), world as i64);
        });
    }
}

#[test]
fn a_split_puts_each_color_together_in_the_order_of_its_keys() {
    for (algorithm, world) in everywhere(&[1, 2, 4, 7]) {
        each_rank(world, &by(algorithm), |mut communicator| {
            let rank = communicator.rank();
            // By color alone; keys turn the order round; the same key keeps it.
            for key in [|_| 0, |rank| rank, |rank: i64| -rank, |_| i64::MIN] {
                let color = |rank: usize| [0, 7, u32::MAX][rank % 3];
                let mut members: Vec<_> =
                    (0..world).filter(|&it| color(it) == color(rank)).collect();
                members.sort_by_key(|&it| key(it as i64));
                let group = communicator.split(Some(color(rank)), key(rank as i64));
                let mut group = group.unwrap().unwrap();
                assert_eq!(ranks_of(&mut group, rank), members);
            }
            // Without a color there is no group, and the others have theirs.
            let color = (rank != 0).then_some(5);
            match communicator.split(color, 0).unwrap() {
                None => assert_eq!(rank, 0),
                Some(group) => assert_eq!(group.place(), Place::new(rank - 1, world - 1)),
            }
            assert!(communicator.split(None, 0).unwrap().is_none());
            assert_eq!(sum_of(&mut communicator, 1), world as i64);
        });
    }
}

#[test]
fn groups_of_one_split_do_not_hear_each_other() {
    each_rank(6, &by(Algorithm::Ring), |mut communicator| {
        let rank = communicator.rank();
        for _ in 0..50 {
            let mut group = communicator
                .split(Some(rank as u32 % 3), 0)
                .unwrap()
                .unwrap();
            assert_eq!(group.world_size(), 2);
            assert_eq!(sum_of(&mut group, rank as i64), 2 * (rank % 3) as i64 + 3);
        }
    });
}

#[test]
fn groups_nest() {
    for &algorithm in Algorithm::ALL {
        each_rank(8, &by(algorithm), |mut communicator| {
            let rank = communicator.rank();
            let mut half = communicator
                .split(Some(rank as u32 / 4), 0)
                .unwrap()
                .unwrap();
            let mut quarter = half
                .split(Some(half.rank() as u32 / 2), 0)
                .unwrap()
                .unwrap();
            assert_eq!(sum_of(&mut quarter, rank as i64), 4 * (rank as i64 / 2) + 1);
            let alone = quarter.new_group(&[1]).unwrap();
            assert_eq!(alone.is_some(), rank % 2 == 1);
            drop(quarter);
            let mut pair = half.new_group(&[3, 0]).unwrap();
            if let Some(pair) = &mut pair {
                let sum = sum_of(pair, rank as i64);
                assert_eq!(sum, if rank < 4 { 3 } else { 11 });
                let first = pair.new_group(&[1]).unwrap();
                assert_eq!(first.is_some(), rank % 4 == 0);
            }
            assert_eq!(sum_of(&mut half, 1), 4);
            assert_eq!(sum_of(&mut communicator, 1), 8);
        });
    }
}

#[test]
fn groups_may_be_used_from_several_threads_while_their_world_works() {
    for world in [2, 3] {
        each_rank(world, &by(Algorithm::Tree), |mut communicator| {
            let rank = communicator.rank();
            let everyone: Vec<_> = (0..world).collect();
            let [mut first, mut second] =
                [(); 2].map(|()| communicator.new_group(&everyone).unwrap().unwrap());
            let once = (world * (world + 1) / 2) as i64;
            thread::scope(|scope| {
                let use_it = |group: &mut Communicator, factor: i64| {
                    for _ in 0..1000 {
                        assert_eq!(sum_of(group, factor * (rank as i64 + 1)), factor * once);
                    }
                };
                scope.spawn(move || use_it(&mut first, 1));
                scope.spawn(move || use_it(&mut second, 10));
                use_it(&mut communicator, 100);
            });
        });
    }
}

#[test]
fn two_groups_in_opposite_order_do_not_mix() {
    each_rank(2, &by(Algorithm::Ring), |mut communicator| {
        let rank = communicator.rank() as i64;
        let groups = [(); 2].map(|()| communicator.new_group(&[0, 1]).unwrap().unwrap());
        let [a, b] = groups.map(|group| CommStream::new(group).unwrap());
        let issue =
            |stream: &CommStream, factor| stream.all_reduce([factor * (rank + 1)], ReduceOp::Sum);
        for _ in 0..1000 {
            let (sum_a, sum_b) = if rank == 0 {
                let sum_a = issue(&a, 1);
                (sum_a, issue(&b, 10))
            } else {
                let sum_b = issue(&b, 10);
                (issue(&a, 1), sum_b)
            };
            assert_eq!(sum_of(&mut communicator, 100 * (rank + 1)), 300);
            assert_eq!(sum_a.wait().unwrap(), [3]);
            assert_eq!(sum_b.wait().unwrap(), [30]);
        }
    });
}

#[test]
fn an_error_in_a_group_names_it_and_stops_the_group_alone() {
    let deeds: [(Deed, &str); 4] = [
        (|it| it.broadcast(&mut [1u8], 7), "no rank 7 to be the root"),
        (
            |it| it.all_reduce(&mut [1f32; 2], ReduceOp::Sum),
            "the length",
        ),
        (|it| Err(it.abort("enough")), "gave up: enough"),
        (
            |it| it.all_reduce(&mut [1i32], ReduceOp::Mean),
            "no mean of i32",
        ),
    ];
    for &algorithm in Algorithm::ALL {
        for (deed, said) in deeds {
            each_rank(4, &by(algorithm), |mut communicator| {
                let rank = communicator.rank();
                let mut others = communicator.new_group(&[0, 2]).unwrap();
                if let Some(mut group) = communicator.new_group(&[3, 1]).unwrap() {
                    let outcome = match rank {
                        1 => deed(&mut group),
                        _ => group.all_reduce(&mut [1f32], ReduceOp::Sum),
                    };
                    let error = outcome.and_then(|()| group.barrier()).unwrap_err();
                    let text = error.to_string();
                    assert!(text.contains(said), "{text}");
                    assert!(text.contains("of the group [3, 1]"), "{text}");
                    // Rank 1 of the world is rank 1 of the group.
                    assert!(error.ranks().contains(&1), "{text}");
                    assert_eq!(group.barrier(), Err(error));
                }
                if let Some(others) = &mut others {
                    assert_eq!(sum_of(others, rank as i64), 2);
                }
                assert_eq!(sum_of(&mut communicator, 1), 4);
                let again = communicator.new_group(&[1, 3]).unwrap();
                assert_eq!(
                    again.map(|mut it| sum_of(&mut it, rank as i64)),
                    (rank % 2 == 1).then_some(4)
                );
            });
        }
    }
}

#[test]
fn a_group_s_deadline_is_that_of_its_world_and_names_who_is_late() {
    for &algorithm in Algorithm::ALL {
        let end = Barrier::new(3);
        each_rank(3, &by(algorithm), |mut communicator| {
            let brief = Duration::from_millis(400);
            let made = communicator.within(brief).new_group(&[2, 0, 1]);
            let mut group = made.unwrap().unwrap();
            if communicator.rank() != 1 {
                let error = group.barrier().unwrap_err();
                assert_eq!(error.ranks(), [2], "{error}");
                assert!(error.to_string().contains("within 400ms"), "{error}");
                assert!(
                    error.to_string().contains("of the group [2, 0, 1]"),
                    "{error}"
                );
            }
            end.wait();
            communicator.barrier().unwrap();
        });
    }
}

#[test]
fn a_member_that_leaves_its_group_is_named_there() {
    each_rank(3, &by(Algorithm::Ring), |mut communicator| {
        let mut group = communicator.new_group(&[2, 1]).unwrap();
        match communicator.rank() {
            2 => drop(group.take()),
            1 => {
                let error = group.as_mut().unwrap().barrier().unwrap_err();
                assert!(
                    matches!(error, Error::PeerFailed { peer: 0, .. }),
                    "{error}"
                );
            }
            _ => {}
        }
        communicator.barrier().unwrap();
    });
}

#[test]
fn a_group_outlives_its_world() {
    each_rank(3, &by(Algorithm::Tree), |mut communicator| {
        let group = communicator.new_group(&[0, 1, 2]).unwrap();
        drop(communicator);
        assert_eq!(sum_of(&mut group.unwrap(), 1), 3);
    });
}

#[test]
fn lists_that_differ_are_an_error_on_all() {
    let lists: [(&[usize], &[usize]); 5] = [
        (&[0, 1, 2], &[0, 1]),
        (&[0, 1], &[0, 1, 2]),
        (&[0, 1, 2], &[0, 2, 1]),
        (&[1], &[2]),
        (&[0, 1, 2], &[2]),
    ];
    let cases = everywhere(&[3, 4])
        .flat_map(|(algorithm, world)| (0..world).map(move |odd| (algorithm, world, odd)));
    at_once(cases, |(algorithm, world, odd)| {
        for (usual, unusual) in lists {
            let config = by(algorithm).with_timeout(Duration::from_secs(5));
            let outcomes = each_rank(world, &config, |mut communicator| {
                let list = if communicator.rank() == odd {
                    unusual
                } else {
                    usual
                };
                communicator.new_group(list).map(drop)
            });
            for outcome in outcomes {
                let error = outcome.unwrap_err();
                let text = error.to_string();
                assert!(error.ranks().contains(&odd), "{algorithm}: {text}");
                assert!(
                    text.contains("differ in the counts, members or settings"),
                    "{algorithm}: {text}"
                );
            }
        }
    });
}

#[test]
fn a_list_that_cannot_be_is_refused_on_all() {
    let lists: [(&[usize], &str); 4] = [
        (&[], "a group has at least one rank"),
        (&[0, 3], "no rank 3 to be in a group: ranks are 0 to 2"),
        (&[1, 2, 1], "rank 1 stands in the group twice"),
        (&[usize::MAX], "to be in a group"),
    ];
    for (list, said) in lists {
        let errors = each_rank(3, &by(Algorithm::Tree), |mut communicator| {
            let list = if communicator.rank() == 1 {
                list
            } else {
                &[0, 1]
            };
            communicator.new_group(list).map(drop).unwrap_err()
        });
        assert!(matches!(errors[1], Error::Argument { .. }), "{}", errors[1]);
        for error in errors {
            assert_eq!(error.ranks(), [1], "{error}");
            assert!(error.to_string().contains(said), "{error}");
        }
    }
}

#[test]
fn a_group_has_its_world_s_settings() {
    let config = by(Algorithm::Halving)
        .with_segment_kb(3)
        .with_deterministic(true);
    each_rank(3, &config, |mut communicator| {
        let mut group = communicator.new_group(&[0, 1, 2]).unwrap().unwrap();
        assert_eq!(group.config(), &config);
        sum_of(&mut group, 1);
        let ran: Vec<_> = group
            .stats()
            .rows()
            .map(|(key, _)| key.to_string())
            .collect();
        assert_eq!(ran, ["all_reduce:direct+halving"]);
    });
}

#[test]
fn groups_made_and_dropped_leave_no_thread_and_no_memory() {
    alone(
        "groups::groups_made_and_dropped_leave_no_thread_and_no_memory",
        || {
            let rounds = if soak() { 1000 } else { 200 };
            let before = threads();
            let grown = each_rank(4, &by(Algorithm::Tree), |mut communicator| {
                let rank = communicator.rank();
                let mut start = 0;
                for round in 0..rounds {
                    if round == rounds / 10 {
                        start = resident();
                    }
                    let made: Result<_> = match round % 2 {
                        0 => communicator.new_group(&[3, 0, 2]),
                        _ => communicator.split(Some(rank as u32 % 2), 0),
                    };
                    if let Some(mut group) = made.unwrap() {
                        group.all_reduce(&mut [1f32; 1000], ReduceOp::Sum).unwrap();
                        CommStream::new(group).unwrap().barrier().wait().unwrap();
                    }
                }
                communicator.barrier().unwrap();
                resident().saturating_sub(start)
            });
            assert!(grown[0] < 5 << 20, "{} bytes", grown[0]);
            let start = Instant::now();
            // The system takes a moment to clear away a thread that has been joined.
            while threads() != before {
                assert!(
                    start.elapsed() < Duration::from_secs(5),
                    "{} threads",
                    threads()
                );
                thread::yield_now();
            }
        },
    );
}

#[test]
fn a_member_that_is_gone_before_it_joins_is_not_waited_for() {
    let ways: [fn(Local) -> Option<Local>; 2] = [
        |_dropped| None,
        |mut link| {
            link.close();
            Some(link)
        },
    ];
    for way in ways {
        for early in [false, true] {
            let mut mesh = Local::mesh(3);
            let (late, mut link) = (mesh.remove(2), mesh.remove(0));
            let (gone, late) = match early {
                true => (way(late), None),
                false => (None, Some(late)),
            };
            let end = link.split(1, &[2, 0]).unwrap();
            let mut group = Communicator::new(end, &by(Algorithm::Ring)).unwrap();
            let gone = late.and_then(way).or(gone);
            let error = group.barrier().unwrap_err();
            assert!(
                matches!(error, Error::PeerFailed { peer: 0, .. }),
                "{error}"
            );
            drop(gone);
        }
    }
}
