//! Plans in virtual time: what a collective would take among more ranks, or over
//! other links, than there are.
use std::{collections::VecDeque, time::Duration};

use crate::{Place, Plan, Route, Shape, schedule::Step, transport::Link};

/// How long `route` takes if every rank begins at once and links are all that
/// costs: the time of the slowest rank.
///
/// The model is that of [`Delayed`](crate::transport::Delayed): a message leaves
/// when the ones before it have left its rank, and arrives the latency later;
/// sending does not wait, receiving does, folding is free. The `place` of `shape`
/// gives the world; its rank does not matter. Costs N plans and a few words a message.
///
/// ```
/// use std::{collections::VecDeque, time::Duration};
/// use collectives::{Algorithm, Collective, DType, Partition, Parts, Place, Shape, simulated, transport::Link};
/// let link = Link { latency: Duration::from_micros(10), bytes_per_second: 1e9 };
/// let shape = Shape {
///     collective: Collective::AllReduce,
///     place: Place::new(0, 4),
///     root: 0,
///     parts: Parts::Even(Partition::new(1_000_000, 4)),
///     dtype: DType::F32,
///     segment: usize::MAX,
///     piece: 1,
///     deterministic: false,
///     widens: false,
/// };
/// // Six turns of a quarter each.
/// let ring = simulated::time(Algorithm::Ring.into(), &shape, link);
/// assert_eq!(ring, 6 * (Duration::from_micros(10) + Duration::from_millis(1)));
/// ```
///
/// # Panics
///
/// Panics if the plans wait for each other in a circle, which the suite proves
/// that they do not.
pub fn time(route: Route, shape: &Shape<'_>, link: Link) -> Duration {
    let world = shape.place.world;
    let mut ranks: Vec<_> = (0..world)
        .map(|rank| {
            let mut plan = Plan::default();
            let place = Place::new(rank, world);
            route.plan(&Shape { place, ..*shape }, &mut plan);
            let cut = |steps: Vec<Step>, size| {
                let segments = |step: Step| step.segments(shape.segment).collect::<Vec<_>>();
                steps
                    .into_iter()
                    .flat_map(segments)
                    .map(move |step| (step, size))
                    .collect()
            };
            let mut steps: Vec<_> = cut(plan.reduce, route.reduce_size(shape));
            steps.append(&mut cut(plan.spread, shape.dtype.size()));
            Rank::new(steps)
        })
        .collect();
    let mut lanes = Lanes::new(world);
    let mut moved = true;
    while moved {
        moved = false;
        for (number, rank) in ranks.iter_mut().enumerate() {
            while rank.advance(number, link, &mut lanes) {
                moved = true;
            }
        }
    }
    assert!(
        ranks.iter().all(Rank::is_done),
        "plans wait for each other in a circle"
    );
    ranks
        .iter()
        .map(|rank| rank.clock)
        .max()
        .unwrap_or_default()
}

/// When messages arrive, by sender and receiver, oldest first.
struct Lanes {
    world: usize,
    arrivals: Vec<VecDeque<Duration>>,
}

impl Lanes {
    fn new(world: usize) -> Self {
        let arrivals = (0..world * world).map(|_| Default::default()).collect();
        Self { world, arrivals }
    }

    fn between(&mut self, from: usize, to: usize) -> &mut VecDeque<Duration> {
        &mut self.arrivals[from * self.world + to]
    }
}

struct Rank {
    /// With the bytes of an element in each.
    steps: std::vec::IntoIter<(Step, usize)>,
    /// The step whose message has left and whose arrival is awaited.
    waiting: Option<usize>,
    clock: Duration,
    leaves: Duration,
}

impl Rank {
    fn new(steps: Vec<(Step, usize)>) -> Self {
        Self {
            steps: steps.into_iter(),
            waiting: None,
            clock: Duration::ZERO,
            leaves: Duration::ZERO,
        }
    }

    fn is_done(&self) -> bool {
        self.waiting.is_none() && self.steps.as_slice().is_empty()
    }

    /// Goes as far as one step; false if it cannot.
    fn advance(&mut self, number: usize, link: Link, lanes: &mut Lanes) -> bool {
        if let Some(from) = self.waiting {
            let Some(arrives) = lanes.between(from, number).pop_front() else {
                return false;
            };
            self.clock = self.clock.max(arrives);
            self.waiting = None;
            return true;
        }
        let Some((step, size)) = self.steps.next() else {
            return false;
        };
        if let Some(send) = step.send {
            let transfer = link.transfer(send.range.len() * size);
            self.leaves = self.leaves.max(self.clock).saturating_add(transfer);
            lanes
                .between(number, send.to)
                .push_back(self.leaves.saturating_add(link.latency));
        }
        self.waiting = step.recv.map(|recv| recv.from);
        true
    }
}
