//! Virtual time against times worked out by hand, and real delays against both.
use std::{
    sync::Barrier,
    time::{Duration, Instant},
};

use collectives::{
    Algorithm, Collective, Communicator, CommunicatorConfig, DType, Error, Partition, Parts, Place,
    ReduceOp, Route, Shape, simulated,
    transport::{Delayed, Faults, Faulty, Link, Local},
};

use crate::{
    calls::CALLS,
    world::{by, each_over, everywhere},
};

const LATENCY: Duration = Duration::from_micros(10);
/// A megabyte a millisecond.
const LINK: Link = Link {
    latency: LATENCY,
    bytes_per_second: 1e9,
};

fn shape(collective: Collective, world: usize, len: usize) -> Shape<'static> {
    Shape {
        collective,
        place: Place::new(0, world),
        root: 0,
        parts: Parts::Even(Partition::new(len, world)),
        dtype: DType::F32,
        segment: usize::MAX,
        piece: 1,
        deterministic: false,
        widens: false,
    }
}

/// The time of a buffer of `megabytes`, in messages as large as they come.
fn time(algorithm: Algorithm, collective: Collective, world: usize, megabytes: usize) -> Duration {
    let shape = shape(collective, world, megabytes * 250_000);
    simulated::time(algorithm.into(), &shape, LINK)
}

/// The time in which so many megabytes leave a rank.
fn leave(megabytes: usize) -> Duration {
    Duration::from_millis(megabytes as u64)
}

#[test]
fn one_rank_takes_no_time() {
    for &algorithm in Algorithm::ALL {
        for collective in Collective::PLANNED {
            assert_eq!(time(algorithm, collective, 1, 4), Duration::ZERO);
        }
    }
}

#[test]
fn a_ring_takes_two_passes_of_n_less_one_turns() {
    for world in [2, 3, 4, 8] {
        let turns = (world - 1) as u32;
        let turn = leave(1) + LATENCY;
        let all = |collective| time(Algorithm::Ring, collective, world, world);
        assert_eq!(all(Collective::AllReduce), 2 * turns * turn);
        assert_eq!(all(Collective::ReduceScatter), turns * turn);
        assert_eq!(all(Collective::AllGather), turns * turn);
        // A chain of N pieces over N - 1 hops: the last piece leaves after all others.
        let chain = world as u32 * leave(1) + turns * LATENCY + (turns - 1) * leave(1);
        assert_eq!(all(Collective::Broadcast), chain, "{world} ranks");
    }
}

#[test]
fn a_tree_takes_a_hop_a_level_each_way() {
    let hop = leave(4) + LATENCY;
    let all = |collective, world| time(Algorithm::Tree, collective, world, 4);
    for (world, levels) in [(2, 1), (4, 2), (8, 3), (16, 4)] {
        // The far half is served first, so the longest way down waits for nobody.
        assert_eq!(all(Collective::Broadcast, world), levels * hop);
        assert_eq!(all(Collective::Reduce, world), levels * hop);
        assert_eq!(all(Collective::AllReduce, world), 2 * levels * hop);
    }
    // Both leaves of three speak to the root at once; it answers one after the other.
    assert_eq!(all(Collective::AllReduce, 3), hop + 2 * leave(4) + LATENCY);
}

#[test]
fn direct_takes_as_long_as_a_ring_where_links_are_alike() {
    for world in [2, 3, 4, 8] {
        let turns = (world - 1) as u32;
        let all = |collective| time(Algorithm::Direct, collective, world, world);
        assert_eq!(all(Collective::AllReduce), 2 * turns * (leave(1) + LATENCY));
        assert_eq!(all(Collective::AllGather), turns * (leave(1) + LATENCY));
    }
}

#[test]
fn halving_takes_halves_of_halves_and_back() {
    let all = |world| time(Algorithm::Halving, Collective::AllReduce, world, 8);
    assert_eq!(all(2), 2 * (leave(4) + LATENCY));
    assert_eq!(all(4), 2 * (leave(4) + leave(2) + 2 * LATENCY));
    assert_eq!(all(8), 2 * (leave(4) + leave(2) + leave(1) + 3 * LATENCY));
}

#[test]
fn naive_sends_everything_through_one_link() {
    for world in [2, 3, 4, 8] {
        // All arrive at once; then one buffer after the other leaves.
        let way_in = leave(4) + LATENCY;
        let way_out = (world - 1) as u32 * leave(4) + LATENCY;
        let all = time(Algorithm::Naive, Collective::AllReduce, world, 4);
        assert_eq!(all, way_in + way_out);
    }
}

#[test]
fn without_bytes_only_hops_count() {
    let free = Link {
        latency: LATENCY,
        bytes_per_second: f64::INFINITY,
    };
    let hops = |algorithm: Algorithm, world| {
        let shape = shape(Collective::AllReduce, world, 1 << 20);
        simulated::time(algorithm.into(), &shape, free).div_duration_f64(LATENCY)
    };
    for (world, levels) in [(2, 1), (4, 2), (8, 3), (64, 6)] {
        assert_eq!(hops(Algorithm::Naive, world), 2.0);
        assert_eq!(hops(Algorithm::Tree, world), f64::from(2 * levels));
        assert_eq!(hops(Algorithm::Halving, world), f64::from(2 * levels));
        assert_eq!(hops(Algorithm::Ring, world), (2 * (world - 1)) as f64);
    }
}

#[test]
fn segments_overlap_hops_that_would_follow_each_other() {
    let chain = |segment| {
        let shape = Shape {
            segment,
            ..shape(Collective::Reduce, 8, 1_000_000)
        };
        simulated::time(Algorithm::Tree.into(), &shape, LINK)
    };
    // A step waits for what it receives: a child's whole buffer, segment by segment.
    assert!(chain(10_000) <= chain(usize::MAX));
}

#[test]
fn a_thousand_ranks_are_no_trouble() {
    let hop = |bytes: f64| LATENCY + Duration::from_secs_f64(bytes / 1e9);
    // 64 elements, 256 bytes, a rank.
    let all = |algorithm: Algorithm| {
        let shape = shape(Collective::AllReduce, 1024, 1024 * 64);
        simulated::time(algorithm.into(), &shape, LINK)
    };
    assert_eq!(all(Algorithm::Ring), 2 * 1023 * hop(256.0));
    assert_eq!(all(Algorithm::Direct), 2 * 1023 * hop(256.0));
    assert_eq!(all(Algorithm::Tree), 2 * 10 * hop(262_144.0));
    let halves: Duration = (0..10).map(|level| hop(f64::from(131_072 >> level))).sum();
    assert_eq!(all(Algorithm::Halving), 2 * halves);
}

#[test]
fn what_is_labelled_direct_plus_ring_is_timed_as_that() {
    let shape = Shape {
        deterministic: true,
        ..shape(Collective::AllReduce, 4, 1_000_000)
    };
    let route = Route::new(Algorithm::Ring, &shape);
    assert_eq!(route.to_string(), "direct+ring");
    let due = 6 * (leave(1) + LATENCY);
    assert_eq!(simulated::time(route, &shape, LINK), due);
}

// ---- the same delays, for real

const SLOW: Link = Link {
    latency: Duration::from_millis(2),
    bytes_per_second: 50e6,
};

#[test]
fn delayed_links_take_at_least_the_simulated_time() {
    for (algorithm, world) in everywhere(&[2, 3, 4]) {
        for (collective, len) in [
            (Collective::AllReduce, 1000),
            (Collective::AllReduce, 150_000),
            (Collective::Broadcast, 150_000),
            (Collective::ReduceScatter, 150_000),
            (Collective::AllGather, 150_000),
        ] {
            let start = Barrier::new(world);
            let mesh = Delayed::mesh(Local::mesh(world), SLOW);
            let times = each_over(mesh, &by(algorithm), |mut communicator| {
                start.wait();
                let start = Instant::now();
                call(&mut communicator, collective, len);
                (start, Instant::now())
            });
            let begin = times.iter().map(|(start, _)| *start).min().unwrap();
            let end = times.iter().map(|(_, end)| *end).max().unwrap();
            let shape = Shape {
                segment: (CommunicatorConfig::new().segment_kb << 10) / DType::F32.size(),
                ..shape(collective, world, len)
            };
            let least = simulated::time(algorithm.into(), &shape, SLOW);
            assert!(
                end - begin >= least,
                "{algorithm} {collective} of {len} among {world}: {:?}, not {least:?}",
                end - begin
            );
        }
    }
}

fn call(communicator: &mut Communicator, collective: Collective, len: usize) {
    let (rank, world) = (communicator.rank(), communicator.world_size());
    let mut buffer = vec![rank as f32 + 1.0; len];
    let sum = (world * (world + 1) / 2) as f32;
    match collective {
        Collective::AllReduce => {
            communicator.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            assert!(buffer.iter().all(|&x| x == sum));
        }
        Collective::Broadcast => {
            communicator.broadcast(&mut buffer, 0).unwrap();
            assert!(buffer.iter().all(|&x| x == 1.0));
        }
        Collective::AllGather => {
            communicator.all_gather_in_place(&mut buffer).unwrap();
            let cut = communicator.partition(len);
            for rank in 0..world {
                assert!(
                    buffer[cut.range(rank)]
                        .iter()
                        .all(|&x| x == rank as f32 + 1.0)
                );
            }
        }
        _ => {
            let part = communicator.reduce_scatter(&mut buffer, ReduceOp::Sum);
            assert!(part.unwrap().iter().all(|&x| x == sum));
        }
    }
}

#[test]
fn delayed_links_give_right_results_for_every_call() {
    let quick = Link {
        latency: Duration::from_micros(200),
        bytes_per_second: 1e8,
    };
    for world in [2, 3] {
        // Faults on top of delays: middleware stacks.
        let mesh = Delayed::mesh(Local::mesh(world), quick)
            .into_iter()
            .map(|link| Faulty::new(link, Faults::none(1)));
        each_over(
            mesh,
            &by(Algorithm::Direct).with_segment_kb(1),
            |mut communicator| {
                for (name, call) in CALLS {
                    assert!(call(&mut communicator, 400).unwrap(), "{name}");
                }
            },
        );
    }
}

#[test]
fn a_deadline_holds_on_links_that_are_slower_than_it() {
    let never = Link {
        latency: Duration::from_secs(3600),
        bytes_per_second: 1e9,
    };
    let config = by(Algorithm::Ring).with_timeout(Duration::from_millis(200));
    let start = Instant::now();
    let mesh = Delayed::mesh(Local::mesh(2), never);
    // No wait outlasts it, and what would have come later has not come.
    each_over(mesh, &config, |mut communicator| {
        let other = 1 - communicator.rank();
        let error = communicator
            .all_reduce(&mut [1f32; 4], ReduceOp::Sum)
            .unwrap_err();
        assert!(error.to_string().contains("nothing came within"), "{error}");
        assert!(error.ranks().contains(&other) || matches!(error, Error::Aborted { .. }));
    });
    assert!(start.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_link_that_cannot_be_is_one_on_which_nothing_arrives() {
    let config = by(Algorithm::Ring).with_timeout(Duration::from_millis(50));
    for bytes_per_second in [0.0, -1.0, f64::NAN, 1e-300] {
        let link = Link {
            latency: Duration::MAX,
            bytes_per_second,
        };
        assert_eq!(link.transfer(0), Duration::ZERO);
        assert_eq!(link.transfer(1), Duration::MAX);
        each_over(
            Delayed::mesh(Local::mesh(2), link),
            &config,
            |mut communicator| {
                communicator
                    .all_reduce(&mut [1f32; 4], ReduceOp::Sum)
                    .unwrap_err();
            },
        );
        let shape = shape(Collective::AllReduce, 2, 4);
        let time = simulated::time(Algorithm::Ring.into(), &shape, link);
        assert_eq!(time, Duration::MAX);
    }
}
