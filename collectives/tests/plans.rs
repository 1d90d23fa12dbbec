//! Every algorithm, checked as a plan: no threads, no clock, no channels.
use std::{collections::BTreeSet, ops::Range};

use collectives::{
    Algorithm, Collective, DType, Partition, Parts, Place, Plan, Route, Shape,
    schedule::{Step, Then},
};
use proptest::prelude::*;

use crate::world::{everywhere, places};

const WORLDS: [usize; 11] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11];

#[test]
fn every_plan_puts_every_sum_and_every_part_in_its_place() {
    for (algorithm, world) in everywhere(&WORLDS) {
        for len in 0..=70 {
            for call in calls(world, len, DType::F32) {
                check(algorithm, &call, world, None);
            }
        }
    }
}

#[test]
fn cutting_into_segments_changes_nothing() {
    for (algorithm, world) in everywhere(&WORLDS) {
        for len in [0, 1, 2, 5, 11, 13] {
            for call in calls(world, len, DType::F64) {
                for segment in [1, 2, 3, 8] {
                    check(algorithm, &call, world, Some(segment));
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn no_length_root_or_segment_size_breaks_a_plan(
        world in 1usize..=11,
        len in 0usize..400,
        root in 0usize..11,
        segment in 1usize..90,
        eight_bytes: bool,
    ) {
        let dtype = if eight_bytes { DType::F64 } else { DType::F32 };
        for algorithm in Algorithm::ALL {
            for call in calls(world, len, dtype) {
                if call.root.is_none_or(|it| it == root % world) {
                    check(*algorithm, &call, world, Some(segment));
                }
            }
        }
    }
}

#[test]
fn segments_hold_what_the_step_held_and_no_more_than_asked() {
    for (sent, received) in [(0, 0), (0, 7), (7, 0), (7, 7), (9, 4), (1, 30)] {
        let step = Step::send(1, 5..5 + sent).and_recv(2, 40..40 + received, Then::Reduce);
        for segment in 1..=31 {
            let cut: Vec<_> = step.segments(segment).collect();
            let sends: Vec<_> = cut.iter().filter_map(|step| step.send.clone()).collect();
            let recvs: Vec<_> = cut.iter().filter_map(|step| step.recv.clone()).collect();
            // An empty message still goes: it carries the fingerprint.
            assert_eq!(sends.len(), sent.div_ceil(segment).max(1));
            assert_eq!(recvs.len(), received.div_ceil(segment).max(1));
            assert!(
                sends
                    .iter()
                    .all(|send| send.to == 1 && send.range.len() <= segment)
            );
            assert!(
                recvs
                    .iter()
                    .all(|recv| recv.from == 2 && recv.then == Then::Reduce)
            );
            assert!(
                sends
                    .iter()
                    .flat_map(|send| send.range.clone())
                    .eq(5..5 + sent)
            );
            assert!(
                recvs
                    .iter()
                    .flat_map(|recv| recv.range.clone())
                    .eq(40..40 + received)
            );
        }
    }
}

#[test]
fn bytes_are_those_of_the_formula() {
    let lengths = (0..=70).chain([4095, 4097, 262_144, 262_145, 600_001]);
    for len in lengths {
        for (algorithm, world) in everywhere(&WORLDS) {
            for dtype in [DType::F32, DType::I64, DType::BF16] {
                for call in calls(world, len, dtype) {
                    for place in places(world) {
                        let (route, shape) = (call.route(algorithm, place), call.shape(place));
                        let mut plan = Plan::default();
                        route.plan(&shape, &mut plan);
                        let wide = match route.reduce {
                            // These pass on partial sums; the others only what ranks put in.
                            Algorithm::Tree | Algorithm::Halving if call.widens() => 4,
                            _ => dtype.size(),
                        };
                        let bytes = |count: fn(&[Step]) -> usize| {
                            count(&plan.reduce) * wide + count(&plan.spread) * dtype.size()
                        };
                        let traffic = route.traffic(&shape);
                        assert_eq!(
                            [bytes(sent), bytes(received)],
                            [traffic.sent, traffic.received],
                            "{algorithm} {call} on {place}: sent and received"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_ring_all_reduce_moves_two_buffers_less_one_rank_in_all() {
    for world in WORLDS {
        for len in (0..=70).chain([262_144, 1_000_003]) {
            for dtype in [DType::F32, DType::F64] {
                let call = call(Collective::AllReduce, None, dtype, len);
                let all = plans(Algorithm::Ring, &call, world);
                let total: usize = all.iter().map(|plan| sent(plan)).sum();
                assert_eq!(
                    total,
                    2 * (world - 1) * len,
                    "{len} elements, {world} ranks"
                );
            }
        }
    }
}

#[test]
fn a_ring_all_reduce_of_even_blocks_costs_every_rank_the_same() {
    for world in WORLDS {
        let call = call(Collective::AllReduce, None, DType::F32, world * 24);
        for plan in plans(Algorithm::Ring, &call, world) {
            assert_eq!(sent(&plan), 2 * (world - 1) * 24);
        }
    }
}

#[test]
fn a_tree_takes_two_log_hops() {
    for world in WORLDS {
        let call = call(Collective::AllReduce, None, DType::F32, 1);
        let hops = world.next_power_of_two().trailing_zeros() as usize;
        for plan in plans(Algorithm::Tree, &call, world) {
            assert!(
                plan.len() <= 2 * hops,
                "{world} ranks: {} steps",
                plan.len()
            );
        }
    }
}

#[test]
fn a_tree_folds_the_largest_power_of_two_first() {
    fn tree(ranks: &[usize]) -> String {
        match ranks {
            [one] => symbol(*one),
            _ => {
                // T(n) = T(p) + T(n - p), p the largest power of two below n.
                let power = ranks.len().next_power_of_two() / 2;
                plus(&tree(&ranks[..power]), &tree(&ranks[power..]))
            }
        }
    }
    for world in WORLDS {
        for collective in [Collective::AllReduce, Collective::ReduceScatter] {
            let call = call(collective, None, DType::F32, world);
            let end = symbols(Algorithm::Tree, &call, world);
            let ranks: Vec<_> = (0..world).collect();
            for (rank, buffer) in end.iter().enumerate() {
                assert_eq!(buffer[rank], tree(&ranks), "{call}, {world} ranks");
            }
        }
        for root in 0..world {
            let call = call(Collective::Reduce, Some(root), DType::F32, 1);
            let ranks: Vec<_> = (0..world).map(|seat| (root + seat) % world).collect();
            let end = symbols(Algorithm::Tree, &call, world);
            assert_eq!(end[root][0], tree(&ranks), "{call}, {world} ranks");
        }
    }
}

#[test]
fn deterministic_sums_are_one_tree_whatever_the_algorithm() {
    for (algorithm, world) in everywhere(&WORLDS) {
        for dtype in [DType::F32, DType::F16] {
            for case in calls(world, 2 * world + 1, dtype) {
                let reduces = !matches!(
                    case.collective,
                    Collective::Broadcast | Collective::AllGather
                );
                if !case.deterministic || !reduces {
                    continue;
                }
                let ranks: Vec<_> = (0..world).map(|rank| vec![symbol(rank)]).collect();
                let one = &tree(&ranks, &plus)[0];
                for (rank, buffer) in symbols(algorithm, &case, world).iter().enumerate() {
                    let finished = match case.collective {
                        Collective::Reduce if case.root != Some(rank) => 0..0,
                        Collective::ReduceScatter => case.parts(world).range(rank),
                        _ => 0..case.len,
                    };
                    assert!(
                        buffer[finished].iter().all(|sum| sum == one),
                        "{algorithm} {case}: {buffer:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn halving_pairs_the_nearest_first() {
    for world in [1, 2, 4, 8] {
        let case = call(Collective::AllReduce, None, DType::F32, 16);
        let ranks: Vec<_> = (0..world).map(|rank| vec![symbol(rank)]).collect();
        let one = &tree(&ranks, &plus)[0];
        for buffer in symbols(Algorithm::Halving, &case, world) {
            assert!(
                buffer.iter().all(|sum| sum == one),
                "{world} ranks: {buffer:?}"
            );
        }
    }
}

#[test]
fn what_takes_the_place_of_a_first_pass_is_shown() {
    let shown = |algorithm: Algorithm, world, dtype, deterministic, collective| {
        let case = Case {
            deterministic,
            ..call(collective, None, dtype, 10)
        };
        case.route(algorithm, Place::new(0, world)).to_string()
    };
    use Collective::{AllGather, AllReduce, ReduceScatter};
    assert_eq!(
        shown(Algorithm::Ring, 4, DType::F32, false, AllReduce),
        "ring"
    );
    assert_eq!(
        shown(Algorithm::Ring, 4, DType::F32, true, AllReduce),
        "direct+ring"
    );
    assert_eq!(
        shown(Algorithm::Ring, 4, DType::F16, false, AllReduce),
        "direct+ring"
    );
    assert_eq!(
        shown(Algorithm::Ring, 4, DType::F32, true, ReduceScatter),
        "direct"
    );
    assert_eq!(
        shown(Algorithm::Ring, 4, DType::F32, true, AllGather),
        "ring"
    );
    assert_eq!(
        shown(Algorithm::Halving, 4, DType::F32, true, AllReduce),
        "halving"
    );
    assert_eq!(
        shown(Algorithm::Halving, 6, DType::F32, true, AllReduce),
        "direct+halving"
    );
    assert_eq!(
        shown(Algorithm::Halving, 6, DType::F16, false, AllReduce),
        "halving"
    );
    assert_eq!(
        shown(Algorithm::Tree, 6, DType::F16, true, AllReduce),
        "tree"
    );
}

#[test]
fn a_ring_all_reduce_folds_in_gloos_order_and_blocks() {
    /// gloo's rule, as its source has it: elements in a block.
    fn block(len: usize, size: usize, world: usize) -> usize {
        let bytes = len * size;
        let segments = (2 * world).max(world * bytes.div_ceil(1 << 20).div_ceil(world));
        let segment = bytes.div_ceil(segments).div_ceil(size);
        segments / world * segment
    }
    let large = [262_144, 262_145, 524_289, 1_000_003, 20_000_000];
    for world in WORLDS {
        for (len, dtype) in (1..=70)
            .chain(large)
            .flat_map(|len| [(len, DType::F32), (len, DType::F64)])
        {
            let call = call(Collective::AllReduce, None, dtype, len);
            let (plans, cuts) = squeeze(plans(Algorithm::Ring, &call, world), len);
            let mut buffers = vec![];
            for rank in 0..world {
                buffers.push(vec![symbol(rank); cuts.len()]);
            }
            play(&plans, &mut buffers, plus);
            for (piece, &start) in cuts.iter().enumerate() {
                let owner = start / block(len, dtype.size(), world);
                // ((x[b-1] + x[b-2]) + …) + x[b]
                let folded = (1..=world)
                    .map(|step| symbol((owner + world - step % world) % world))
                    .reduce(|sum, next| plus(&sum, &next));
                for buffer in &buffers {
                    assert_eq!(Some(&buffer[piece]), folded.as_ref(), "{call} at {start}");
                }
            }
        }
    }
}

/// What is planned, as seen from no rank in particular.
#[derive(Clone, Debug)]
struct Case {
    collective: Collective,
    root: Option<usize>,
    dtype: DType,
    len: usize,
    /// Uneven parts, where a collective takes them.
    counts: Option<Vec<usize>>,
    segment: usize,
    deterministic: bool,
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self:?}")
    }
}

impl Case {
    fn parts(&self, world: usize) -> Parts<'_> {
        match &self.counts {
            Some(counts) => Parts::Counted(counts),
            None => Parts::Even(Partition::new(self.len, world)),
        }
    }

    fn shape(&self, place: Place) -> Shape<'_> {
        Shape {
            collective: self.collective,
            place,
            root: self.root.unwrap_or(0),
            parts: self.parts(place.world),
            dtype: self.dtype,
            segment: self.segment,
            piece: 1,
            deterministic: self.deterministic,
            widens: self.widens(),
        }
    }

    /// Sums of 16-bit floats are carried in 32 bits.
    fn widens(&self) -> bool {
        let reduces = !matches!(
            self.collective,
            Collective::Broadcast | Collective::AllGather
        );
        reduces && self.dtype.wide_size() > self.dtype.size()
    }

    fn route(&self, algorithm: Algorithm, place: Place) -> Route {
        Route::new(algorithm, &self.shape(place))
    }
}

/// Every planned call of `len` elements, with every root.
fn calls(world: usize, len: usize, dtype: DType) -> Vec<Case> {
    let rooted = |collective| (0..world).map(move |root| call(collective, Some(root), dtype, len));
    // Parts of 0, 1, 2, … elements, and what is left.
    let mut left = len;
    let mut uneven: Vec<_> = (0..world)
        .map(|rank| {
            let count = rank.min(left);
            left -= count;
            count
        })
        .collect();
    uneven[world / 2] += left;
    Collective::PLANNED
        .into_iter()
        .flat_map(|collective| match collective {
            Collective::Reduce | Collective::Broadcast => rooted(collective).collect(),
            Collective::AllReduce => vec![call(collective, None, dtype, len)],
            _ => {
                let even = call(collective, None, dtype, len);
                let counts = Some(uneven.clone());
                vec![
                    Case {
                        counts,
                        ..even.clone()
                    },
                    even,
                ]
            }
        })
        .flat_map(|case| {
            [false, true].map(|deterministic| Case {
                deterministic,
                ..case.clone()
            })
        })
        .collect()
}

fn call(collective: Collective, root: Option<usize>, dtype: DType, len: usize) -> Case {
    Case {
        collective,
        root,
        dtype,
        len,
        counts: None,
        segment: 1 << 20,
        deterministic: false,
    }
}

/// The steps of every rank, both passes.
fn plans(algorithm: Algorithm, case: &Case, world: usize) -> Vec<Vec<Step>> {
    places(world)
        .map(|place| {
            let mut plan = Plan::default();
            case.route(algorithm, place)
                .plan(&case.shape(place), &mut plan);
            plan.steps().cloned().collect()
        })
        .collect()
}

fn sent(plan: &[Step]) -> usize {
    plan.iter()
        .filter_map(|step| step.send.as_ref())
        .map(|send| send.range.len())
        .sum()
}

fn received(plan: &[Step]) -> usize {
    plan.iter()
        .filter_map(|step| step.recv.as_ref())
        .map(|recv| recv.range.len())
        .sum()
}

/// Plays `call` and checks what every rank ends with.
fn check(algorithm: Algorithm, call: &Case, world: usize, segment: Option<usize>) {
    // A digit for each rank, so that each is seen to count once, and the index above.
    let value = |rank: usize, index: usize| (index as u64) << 48 | 1 << (4 * rank);
    let sum = |index: usize| (0..world).map(|rank| value(rank, index)).sum::<u64>();
    let parts = call.parts(world);
    // What a rank need not bring it has not got, so that nothing passes by luck.
    let brings = |rank: usize, index: usize| match call.collective {
        Collective::Broadcast => call.root == Some(rank),
        Collective::AllGather => parts.range(rank).contains(&index),
        _ => true,
    };
    let mut buffers: Vec<Vec<Option<u64>>> = (0..world)
        .map(|rank| {
            let start = |index| brings(rank, index).then(|| value(rank, index));
            (0..call.len).map(start).collect()
        })
        .collect();
    let cut = Case {
        segment: segment.unwrap_or(call.segment),
        ..call.clone()
    };
    let mut plans = plans(algorithm, &cut, world);
    if let Some(segment) = segment {
        for plan in &mut plans {
            *plan = plan
                .iter()
                .flat_map(|step| step.segments(segment))
                .collect();
        }
    }
    let add = |a: &Option<u64>, b: &Option<u64>| Some(a.expect("filled") + b.expect("filled"));
    play(&plans, &mut buffers, add);
    for (rank, buffer) in buffers.iter().enumerate() {
        let (meaningful, expected): (Range<usize>, Vec<u64>) = match call.collective {
            Collective::Reduce if call.root != Some(rank) => continue,
            Collective::ReduceScatter => (parts.range(rank), parts.range(rank).map(sum).collect()),
            Collective::Broadcast => {
                let root = call.root.unwrap();
                (
                    0..call.len,
                    (0..call.len).map(|index| value(root, index)).collect(),
                )
            }
            Collective::AllGather => {
                let gathered = (0..world)
                    .flat_map(|rank| parts.range(rank).map(move |index| value(rank, index)));
                (0..call.len, gathered.collect())
            }
            _ => (0..call.len, (0..call.len).map(sum).collect()),
        };
        assert!(
            buffer[meaningful]
                .iter()
                .copied()
                .eq(expected.into_iter().map(Some)),
            "{algorithm} {call} in segments of {segment:?}: rank {rank} of {world} ends with {buffer:x?}"
        );
    }
}

/// Plays one plan per rank with rendezvous sends, the strictest transport there
/// is: a message moves only when its receiver is at the step that takes it.
fn play<E: Clone>(plans: &[Vec<Step>], buffers: &mut [Vec<E>], fold: impl Fn(&E, &E) -> E) {
    let mut aside: Vec<Vec<Option<Vec<E>>>> = vec![vec![None; plans.len()]; plans.len()];
    struct Cursor {
        step: usize,
        sends: bool,
        recvs: bool,
    }
    let open = |rank: usize, step: usize| {
        let now = plans[rank].get(step);
        if let Some(Step {
            send: Some(send),
            recv: Some(recv),
            ..
        }) = now
        {
            let apart = send.range.end <= recv.range.start || recv.range.end <= send.range.start;
            assert!(
                apart || send.range.is_empty() || recv.range.is_empty(),
                "rank {rank} sends what it receives: {now:?}"
            );
        }
        Cursor {
            step,
            sends: now.is_some_and(|step| step.send.is_some()),
            recvs: now.is_some_and(|step| step.recv.is_some()),
        }
    };
    let mut at: Vec<_> = (0..plans.len()).map(|rank| open(rank, 0)).collect();
    // A plan may begin with a step that moves nothing only where there is one rank.
    assert!(
        plans.len() == 1
            || at
                .iter()
                .zip(plans)
                .all(|(at, plan)| { plan.is_empty() || at.sends || at.recvs })
    );
    loop {
        let mut moved = false;
        for from in 0..plans.len() {
            if !at[from].sends {
                continue;
            }
            let send = plans[from][at[from].step].send.as_ref().unwrap();
            let to = send.to;
            assert_ne!(from, to, "a rank sends to itself");
            if !at[to].recvs {
                continue;
            }
            let recv = plans[to][at[to].step].recv.as_ref().unwrap();
            if recv.from != from {
                continue;
            }
            assert_eq!(
                send.range.len(),
                recv.range.len(),
                "rank {from} and rank {to} disagree on length"
            );
            let message = buffers[from][send.range.clone()].to_vec();
            if recv.then == Then::SetAside {
                let waiting = aside[to][from].replace(message);
                assert!(
                    waiting.is_none(),
                    "rank {to} had not folded what rank {from} sent"
                );
            } else {
                for (old, new) in buffers[to][recv.range.clone()].iter_mut().zip(message) {
                    *old = match recv.then {
                        Then::Reduce => fold(old, &new),
                        _ => new,
                    };
                }
            }
            at[from].sends = false;
            at[to].recvs = false;
            for rank in [from, to] {
                while !at[rank].sends && !at[rank].recvs && at[rank].step < plans[rank].len() {
                    if let Some(range) = &plans[rank][at[rank].step].fold {
                        let own = &mut buffers[rank][range.clone()];
                        aside[rank][rank] = Some(own.to_vec());
                        let all: Vec<_> = aside[rank]
                            .iter_mut()
                            .map(|theirs| theirs.take().expect("every rank's share is here"))
                            .collect();
                        own.clone_from_slice(&tree(&all, &fold));
                    }
                    at[rank] = open(rank, at[rank].step + 1);
                }
            }
            moved = true;
        }
        if !moved {
            break;
        }
    }
    for (rank, cursor) in at.iter().enumerate() {
        assert_eq!(
            cursor.step,
            plans[rank].len(),
            "deadlock: rank {rank} is stuck in {plans:?}"
        );
    }
}

/// T(n) = T(p) + T(n - p), p the largest power of two below n.
fn tree<E: Clone>(all: &[Vec<E>], fold: &impl Fn(&E, &E) -> E) -> Vec<E> {
    match all {
        [one] => one.clone(),
        _ => {
            let (left, right) = all.split_at(all.len().next_power_of_two() / 2);
            let (left, right) = (tree(left, fold), tree(right, fold));
            left.iter().zip(&right).map(|(a, b)| fold(a, b)).collect()
        }
    }
}

fn symbol(rank: usize) -> String {
    format!("x{rank}")
}

/// A sum as text. An addition has the same bits whichever side comes first.
fn plus(a: &String, b: &String) -> String {
    let (a, b) = if a < b { (a, b) } else { (b, a) };
    format!("({a}+{b})")
}

/// What every rank ends with when each element is the rank's own symbol.
fn symbols(algorithm: Algorithm, call: &Case, world: usize) -> Vec<Vec<String>> {
    let mut buffers: Vec<_> = (0..world)
        .map(|rank| vec![symbol(rank); call.len])
        .collect();
    play(&plans(algorithm, call, world), &mut buffers, plus);
    buffers
}

/// The same plans on as few elements as tell all ranges apart, so that millions
/// can be played; also the first element that each stands for.
fn squeeze(mut plans: Vec<Vec<Step>>, len: usize) -> (Vec<Vec<Step>>, Vec<usize>) {
    fn ranges(step: &mut Step) -> impl Iterator<Item = &mut Range<usize>> {
        let send = step.send.as_mut().map(|send| &mut send.range);
        let recv = step.recv.as_mut().map(|recv| &mut recv.range);
        send.into_iter().chain(recv)
    }
    let mut cuts = BTreeSet::from([0, len]);
    for range in plans.iter_mut().flatten().flat_map(ranges) {
        cuts.extend([range.start, range.end]);
    }
    let cuts: Vec<_> = cuts.into_iter().collect();
    let index = |at: usize| cuts.binary_search(&at).unwrap();
    for range in plans.iter_mut().flatten().flat_map(ranges) {
        *range = index(range.start)..index(range.end);
    }
    (plans, cuts[..cuts.len() - 1].to_vec())
}
