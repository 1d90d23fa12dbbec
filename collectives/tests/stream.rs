//! Collectives in the background: in order, with their buffers, whatever is dropped.
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc::channel,
    },
    thread,
    time::{Duration, Instant},
};

use collectives::{
    Algorithm, CommStream, Communicator, CommunicatorConfig, Error, ReduceOp, launch,
    transport::Local,
};

use crate::world::{by, each_rank, ends, everywhere};

/// The ways in which work can run.
const KINDS: [fn(Communicator) -> CommStream; 2] = [threaded, CommStream::inline];

fn threaded(communicator: Communicator) -> CommStream {
    CommStream::new(communicator).unwrap()
}

/// More than any prompt error takes, less than a deadline.
const PROMPT: Duration = Duration::from_secs(5);

#[test]
fn work_is_done_in_the_order_in_which_it_was_issued() {
    for stream_of in KINDS {
        for (algorithm, world) in everywhere(&[1, 2, 3]) {
            each_rank(world, &by(algorithm), |communicator| {
                let stream = stream_of(communicator);
                let (done, order) = channel();
                let works: Vec<_> = (0..50)
                    .map(|turn| {
                        let done = done.clone();
                        stream.run(move |communicator| {
                            let mut buffer = [turn];
                            communicator.all_reduce(&mut buffer, ReduceOp::Sum)?;
                            done.send(turn).unwrap();
                            Ok(buffer[0])
                        })
                    })
                    .collect();
                // Asked for last first: waiting does not decide the order.
                for (turn, work) in works.into_iter().enumerate().rev() {
                    assert_eq!(work.wait().unwrap(), world as i32 * turn as i32);
                }
                drop(done);
                assert!(order.iter().eq(0..50));
            });
        }
    }
}

#[test]
fn the_buffer_that_went_in_comes_back() {
    for stream_of in KINDS {
        each_rank(3, &by(Algorithm::Ring), |communicator| {
            let place = communicator.place();
            let stream = stream_of(communicator);
            assert_eq!(stream.place(), place);
            let mut buffer = Vec::with_capacity(1000);
            buffer.resize(10, place.rank as f32);
            let (address, capacity) = (buffer.as_ptr(), buffer.capacity());
            let buffer = stream.all_reduce(buffer, ReduceOp::Sum).wait().unwrap();
            assert_eq!(buffer, [3.0; 10]);
            assert_eq!((buffer.as_ptr(), buffer.capacity()), (address, capacity));
            let boxed: Box<[f32]> = vec![place.rank as f32; 4].into();
            assert_eq!(*stream.broadcast(boxed, 2).wait().unwrap(), [2.0; 4]);
            assert_eq!(
                stream.all_gather([place.rank as u8; 3]).wait().unwrap(),
                [0, 1, 2]
            );
            let part = stream
                .reduce_scatter([1i64, 2, 3], ReduceOp::Sum)
                .wait()
                .unwrap();
            assert_eq!(part[place.rank], 3 * (place.rank as i64 + 1));
            let sum = stream.reduce([1.5f64], ReduceOp::Sum, 1).wait().unwrap();
            assert!(place.rank != 1 || sum == [4.5]);
            assert_eq!(stream.stats().unwrap().total().calls, 5);
        });
    }
}

#[test]
fn every_call_may_be_work() {
    for stream_of in KINDS {
        each_rank(3, &by(Algorithm::Tree), |communicator| {
            let rank = communicator.rank();
            let stream = stream_of(communicator);
            let counts = || vec![1, 0, 2];
            let own = vec![rank as f32; counts()[rank]];
            let at_root = |root, len| vec![-1f32; if rank == root { len } else { 0 }];
            // All issued before any is waited for: each keeps what belongs to it.
            let all_gather_v = stream.all_gather_v(own, counts(), vec![-1f32; 3]);
            let reduce_scatter_v =
                stream.reduce_scatter_v(vec![1i64, 2, 3], counts(), ReduceOp::Sum);
            let coalesced = stream
                .all_reduce_coalesced(vec![vec![1u8; 2], vec![], vec![rank as u8]], ReduceOp::Sum);
            let gather = stream.gather([rank as f32, 7.0], at_root(1, 6), 1);
            let whole: Vec<u32> = if rank == 2 { vec![10, 20, 30] } else { vec![] };
            let scatter = stream.scatter(whole, [0u32], 2);
            let all_to_all = stream.all_to_all([rank as i32; 3], [-1; 3]);
            let message = match rank {
                0 => Some(stream.send(2, vec![5u64; 4])),
                1 => None,
                _ => Some(stream.recv(0, vec![0u64; 4])),
            };
            let gather_v = stream.gather_v(
                vec![rank as u8; counts()[rank]],
                counts(),
                if rank == 0 { vec![9u8; 3] } else { vec![] },
                0,
            );
            let parts: Vec<i64> = if rank == 1 { vec![4, 5, 6] } else { vec![] };
            let scatter_v = stream.scatter_v(parts, counts(), vec![0i64; counts()[rank]], 1);
            // Rank r gives each rank r elements.
            let give = vec![rank as f64; 3 * rank];
            let all_to_all_v =
                stream.all_to_all_v(give, vec![rank; 3], vec![-1f64; 3], vec![0, 1, 2]);
            let place = stream.place();
            let sendrecv = stream.sendrecv(place.up(1), [rank as i32], place.down(1), [-1]);
            let with = stream.all_reduce_with([rank as u32], |a: u32, b| a.max(b));
            let object = stream.all_gather_object(rank);
            let told = stream.broadcast_object((rank == 2).then(|| "two".to_owned()), 2);
            let split = stream.split(Some(0), 0);
            let group = stream.new_group(vec![2, 0]);

            assert_eq!(all_gather_v.wait().unwrap(), [0.0, 2.0, 2.0]);
            let sums = reduce_scatter_v.wait().unwrap();
            assert_eq!(
                sums[[0..1, 1..1, 1..3][rank].clone()],
                [3, 6, 9][[0..1, 1..1, 1..3][rank].clone()]
            );
            assert_eq!(coalesced.wait().unwrap(), [vec![3, 3], vec![], vec![3]]);
            let gathered = gather.wait().unwrap();
            assert!(rank != 1 || gathered == [0.0, 7.0, 1.0, 7.0, 2.0, 7.0]);
            assert_eq!(scatter.wait().unwrap(), [10 * (rank as u32 + 1)]);
            assert_eq!(all_to_all.wait().unwrap(), [0, 1, 2]);
            if let Some(message) = message {
                assert_eq!(message.wait().unwrap(), [5; 4]);
            }
            assert_eq!(sendrecv.wait().unwrap(), [(rank as i32 + 2) % 3]);
            assert_eq!(with.wait().unwrap(), [2]);
            assert_eq!(object.wait().unwrap(), [0, 1, 2]);
            assert_eq!(told.wait().unwrap(), "two");
            let gathered = gather_v.wait().unwrap();
            assert!(rank != 0 || gathered == [0, 2, 2]);
            assert_eq!(
                scatter_v.wait().unwrap(),
                [4, 5, 6][[0..1, 1..1, 1..3][rank].clone()]
            );
            assert_eq!(all_to_all_v.wait().unwrap(), [1.0, 2.0, 2.0]);
            let group = group.wait().unwrap();
            assert_eq!(
                group.map(|group| group.rank()),
                [Some(1), None, Some(0)][rank]
            );
            // The group has a stream of its own, beside that of its world.
            let group = stream_of(split.wait().unwrap().unwrap());
            let (sum, barrier) = (group.all_reduce([1u64], ReduceOp::Sum), stream.barrier());
            assert_eq!(sum.wait().unwrap(), [3]);
            barrier.wait().unwrap();
        });
    }
}

#[test]
fn work_with_wrong_arguments_is_an_error_and_not_a_panic() {
    for stream_of in KINDS {
        each_rank(2, &by(Algorithm::Ring), |communicator| {
            let stream = stream_of(communicator);
            let error = stream.gather([1u8], vec![0u8; 7], 0).wait().unwrap_err();
            assert!(error.to_string().contains("elements long"), "{error}");
            let work = stream.all_gather_v([1u8], vec![1; 5], [0u8; 2]);
            assert_eq!(work.wait(), Err(error));
        });
    }
}

#[test]
fn work_is_finished_when_the_last_rank_has_come() {
    let (go, gone) = channel::<()>();
    let (go, gone) = (std::sync::Mutex::new(Some(go)), std::sync::Mutex::new(gone));
    each_rank(2, &by(Algorithm::Tree), |communicator| {
        let rank = communicator.rank();
        let stream = CommStream::new(communicator).unwrap();
        if rank == 0 {
            let work = stream.all_reduce([1.0f32], ReduceOp::Sum);
            // Rank 1 has not been let go, so this cannot be.
            assert!(!work.is_finished());
            drop(go.lock().unwrap().take());
            let start = Instant::now();
            while !work.is_finished() {
                assert!(start.elapsed() < PROMPT);
                thread::yield_now();
            }
            assert_eq!(work.wait().unwrap(), [2.0]);
        } else {
            gone.lock().unwrap().recv().unwrap_err();
            assert_eq!(
                stream.all_reduce([1.0f32], ReduceOp::Sum).wait().unwrap(),
                [2.0]
            );
        }
    });
}

#[test]
fn a_dropped_handle_changes_nothing_for_the_others() {
    for stream_of in KINDS {
        each_rank(3, &by(Algorithm::Ring), |communicator| {
            let rank = communicator.rank();
            let stream = stream_of(communicator);
            for turn in 0..20 {
                let work = stream.all_reduce(vec![turn; 100], ReduceOp::Sum);
                match turn % 3 == rank as i32 {
                    true => drop(work),
                    false => assert_eq!(work.wait().unwrap(), [3 * turn; 100]),
                }
            }
            assert_eq!(stream.barrier().wait(), Ok(()));
        });
    }
}

#[test]
fn a_dropped_stream_lets_the_issued_work_finish() {
    for stream_of in KINDS {
        each_rank(3, &by(Algorithm::Tree), |communicator| {
            let stream = stream_of(communicator);
            let works: Vec<_> = (0..20u64)
                .map(|turn| stream.all_reduce([turn], ReduceOp::Sum))
                .collect();
            drop(stream);
            for (turn, work) in (0..).zip(works) {
                assert!(work.is_finished());
                assert_eq!(work.wait().unwrap(), [3 * turn]);
            }
        });
    }
}

#[test]
fn the_communicator_comes_back_when_its_work_is_done() {
    for stream_of in KINDS {
        each_rank(2, &by(Algorithm::Ring), |communicator| {
            let stream = stream_of(communicator);
            let work = stream.all_reduce([1u32], ReduceOp::Sum);
            let mut communicator = stream.into_communicator().unwrap();
            assert!(work.is_finished());
            assert_eq!(work.wait().unwrap(), [2]);
            let mut buffer = [3u32];
            communicator.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            assert_eq!((buffer, communicator.stats().total().calls), ([6], 2));
            stream_of(communicator).barrier().wait().unwrap();
        });
    }
}

#[test]
fn work_that_panics_is_an_error_on_every_rank() {
    for stream_of in KINDS {
        for (algorithm, world) in everywhere(&[1, 2, 4]) {
            let start = Instant::now();
            each_rank(world, &by(algorithm), |communicator| {
                let rank = communicator.rank();
                let stream = stream_of(communicator);
                let work = match rank {
                    0 => stream.run(|_| panic!("no such layer")),
                    _ => stream.all_reduce(vec![1.0f32; 10], ReduceOp::Sum),
                };
                let error = work.wait().unwrap_err();
                assert_eq!(error.ranks(), [0], "{error}");
                assert!(
                    error.to_string().contains("panicked: no such layer"),
                    "{error}"
                );
                // The stream lives, and says the same again.
                assert_eq!(stream.barrier().wait(), Err(error));
            });
            assert!(start.elapsed() < PROMPT);
        }
    }
}

#[test]
fn work_issued_after_a_failure_fails_alike() {
    for stream_of in KINDS {
        each_rank(2, &by(Algorithm::Ring), |communicator| {
            let rank = communicator.rank();
            let stream = stream_of(communicator);
            let works: Vec<_> = (0..5)
                .map(|_| stream.all_reduce(vec![1.0f32; 3 + rank], ReduceOp::Sum))
                .collect();
            let errors: Vec<_> = works
                .into_iter()
                .map(|work| work.wait().unwrap_err())
                .collect();
            assert!(errors.iter().all(|error| error == &errors[0]));
            assert!(
                errors[0].to_string().contains("the length"),
                "{}",
                errors[0]
            );
        });
    }
}

#[test]
fn a_barrier_issued_behind_pending_work_waits_for_it() {
    for stream_of in KINDS {
        for (algorithm, world) in everywhere(&[2, 3]) {
            each_rank(world, &by(algorithm), |communicator| {
                let stream = stream_of(communicator);
                for _ in 0..50 {
                    let sum = stream.all_reduce(vec![1.0f32; 1000], ReduceOp::Sum);
                    stream.barrier().wait().unwrap();
                    assert!(sum.is_finished());
                    assert_eq!(sum.wait().unwrap(), vec![world as f32; 1000]);
                }
            });
        }
    }
}

#[test]
fn two_communicators_in_opposite_order_do_not_mix() {
    let config = by(Algorithm::Ring);
    let meshes = [Local::mesh(2), Local::mesh(2)];
    let [first, second] = meshes.map(|mesh| mesh.into_iter());
    thread::scope(|scope| {
        for (a, b) in first.zip(second) {
            let config = &config;
            scope.spawn(move || {
                let [a, b] = [a, b].map(|link| Communicator::new(link, config).unwrap());
                let rank = a.rank() as i32;
                let [a, b] = [a, b].map(|communicator| CommStream::new(communicator).unwrap());
                let issue = |stream: &CommStream, factor| {
                    stream.all_reduce([factor * (rank + 1)], ReduceOp::Sum)
                };
                for _ in 0..1000 {
                    // Each communicator has a thread of its own; the ranks differ in order.
                    let (sum_a, sum_b) = if rank == 0 {
                        let sum_a = issue(&a, 1);
                        (sum_a, issue(&b, 10))
                    } else {
                        let sum_b = issue(&b, 10);
                        (issue(&a, 1), sum_b)
                    };
                    assert_eq!(sum_a.wait().unwrap(), [3]);
                    assert_eq!(sum_b.wait().unwrap(), [30]);
                }
            });
        }
    });
}

#[test]
fn a_thread_that_panics_takes_its_stream_along() {
    for stream_of in KINDS {
        for (algorithm, world) in everywhere(&[2, 4]) {
            let start = Instant::now();
            let ends = ends(&vec![by(algorithm); world], |communicator| {
                let rank = communicator.rank();
                let stream = stream_of(communicator);
                stream.barrier().wait().unwrap();
                assert_ne!(rank, 1, "this rank panics");
                stream
                    .all_reduce(vec![1.0f32; 10], ReduceOp::Sum)
                    .wait()
                    .unwrap_err()
            });
            for (rank, end) in ends.into_iter().enumerate() {
                match (rank, end) {
                    (1, end) => drop(end.unwrap_err()),
                    (_, Ok(error)) => {
                        assert_eq!(error.ranks(), [1], "{error}");
                        assert!(error.to_string().contains("panicked"), "{error}");
                    }
                    (_, Err(said)) => panic!("{said}"),
                }
            }
            assert!(start.elapsed() < PROMPT);
        }
    }
}

#[test]
fn clean_up_that_issues_work_during_a_panic_fails_at_once() {
    struct CleanUp(CommStream, std::sync::mpsc::Sender<Result<(), Error>>);
    impl Drop for CleanUp {
        fn drop(&mut self) {
            let outcome = self.0.barrier().wait();
            drop(self.1.send(outcome));
        }
    }
    for stream_of in KINDS {
        let start = Instant::now();
        let (said, outcomes) = channel();
        let error = launch::spawn(2, &CommunicatorConfig::new(), |communicator| {
            let rank = communicator.rank();
            let stream = stream_of(communicator);
            stream.barrier().wait()?;
            if rank == 1 {
                let _clean_up = CleanUp(stream, said.clone());
                panic!("the first cause");
            }
            stream.all_reduce([1.0f32], ReduceOp::Sum).wait().map(drop)
        })
        .unwrap_err();
        assert_eq!(error.to_string(), "rank 1 panicked: the first cause");
        let error = outcomes.recv().unwrap().unwrap_err();
        assert_eq!(error.ranks(), [1], "{error}");
        assert!(start.elapsed() < PROMPT, "{:?}", start.elapsed());
    }
}

#[test]
fn inline_work_runs_on_the_thread_that_issues_it_and_is_finished_at_once() {
    each_rank(2, &by(Algorithm::Ring), |communicator| {
        let place = communicator.place();
        let stream = CommStream::inline(communicator);
        for turn in 0..20u32 {
            let work = stream.run(move |communicator| {
                let mut buffer = [turn];
                communicator.all_reduce(&mut buffer, ReduceOp::Sum)?;
                Ok((buffer, thread::current().id()))
            });
            assert!(work.is_finished());
            assert_eq!(work.wait().unwrap(), ([2 * turn], thread::current().id()));
        }
        assert_eq!(stream.place(), place);
        assert_eq!(stream.stats().unwrap().total().calls, 20);
    });
}

#[test]
fn inline_work_of_several_threads_runs_one_at_a_time() {
    let communicator = Communicator::new(Local::mesh(1).remove(0), &by(Algorithm::Ring)).unwrap();
    let stream = CommStream::inline(communicator);
    let inside = Arc::new(AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..200 {
                    let inside = inside.clone();
                    let work = stream.run(move |communicator| {
                        let others = inside.fetch_add(1, Ordering::SeqCst);
                        communicator.barrier()?;
                        thread::yield_now();
                        inside.fetch_sub(1, Ordering::SeqCst);
                        Ok(others)
                    });
                    assert_eq!(work.wait(), Ok(0));
                }
            });
        }
    });
    assert_eq!(stream.stats().unwrap().total().calls, 400);
}
