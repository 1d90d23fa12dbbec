//! One collective on buffers of one size: how to call it, and what must come out.
use std::ops::Range;

use collectives::{Collective, Communicator, DType, Partition, Place, ReduceOp};

use super::numbers::{Number, Numbers, UNTOUCHED, Whose};

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Job {
    /// The operation.
    pub collective: Collective,
    /// The type of the elements.
    pub dtype: DType,
    /// How they are folded, where they are.
    pub op: ReduceOp,
    /// The rank at the root, where there is one.
    pub root: usize,
    /// Elements in the whole buffer.
    pub count: usize,
}

impl Job {
    /// Elements of `dtype` that `bytes` hold, cut so that equal parts are equal.
    pub fn new(
        collective: Collective,
        dtype: DType,
        op: ReduceOp,
        root: usize,
        bytes: usize,
        ranks: usize,
    ) -> Self {
        let count = bytes / dtype.size();
        let equal = matches!(
            collective,
            Collective::Gather | Collective::Scatter | Collective::AllToAll
        );
        let count = if equal { count / ranks * ranks } else { count };
        Self {
            collective,
            dtype,
            op,
            root,
            count,
        }
    }

    /// Bytes in the whole buffer.
    pub fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Whether anything is folded.
    pub fn reduces(&self) -> bool {
        matches!(
            self.collective,
            Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter
        )
    }

    /// nccl-tests' factor from algorithm to bus bandwidth: the share of the buffer
    /// that has to pass each rank's link, whatever the algorithm.
    pub fn bus_factor(&self, ranks: usize) -> f64 {
        let others = (ranks - 1) as f64 / ranks as f64;
        match self.collective {
            Collective::AllReduce => 2.0 * others,
            Collective::Broadcast | Collective::Reduce | Collective::SendRecv => 1.0,
            _ => others,
        }
    }
}

/// One rank's buffers for a job.
pub(super) struct Buffers<T> {
    /// What it puts in, kept aside.
    fresh: Vec<T>,
    /// What the call is given.
    give: Vec<T>,
    /// What the call fills, where that is another buffer.
    take: Vec<T>,
    due: Vec<Due>,
}

/// A range of the result, and whose numbers belong there, from which index on.
struct Due {
    at: Range<usize>,
    whose: Whose,
    first: usize,
}

impl<T: Number> Buffers<T> {
    pub(super) fn new(job: &Job, place: Place, numbers: &Numbers<T>) -> Self {
        let Place { rank, world } = place;
        let (n, part) = (job.count, job.count / world);
        let at_root = if rank == job.root { n } else { 0 };
        let (give, take) = match job.collective {
            Collective::Gather => (part, at_root),
            Collective::Scatter => (at_root, part),
            Collective::AllToAll | Collective::SendRecv => (n, n),
            _ => (n, 0),
        };
        let mut fresh: Vec<T> = numbers.from(Whose::Rank(rank), 0).take(give).collect();
        if job.collective == Collective::AllGather {
            let own = Partition::new(n, world).range(rank);
            fresh[..own.start].fill(T::of(UNTOUCHED));
            fresh[own.end..].fill(T::of(UNTOUCHED));
        }
        Self {
            give: fresh.clone(),
            fresh,
            take: vec![T::of(UNTOUCHED); take],
            due: due(job, place),
        }
    }

    /// Writes every buffer anew: the last call's result is gone, and this rank's
    /// core has written what it will give.
    pub(super) fn refresh(&mut self) {
        self.give.copy_from_slice(&self.fresh);
        self.take.fill(T::of(UNTOUCHED));
    }

    pub(super) fn call(
        &mut self,
        job: &Job,
        communicator: &mut Communicator,
    ) -> collectives::Result<()> {
        let Self { give, take, .. } = self;
        let place = communicator.place();
        match job.collective {
            Collective::AllReduce => communicator.all_reduce(give, job.op),
            Collective::Reduce => communicator.reduce(give, job.op, job.root),
            Collective::Broadcast => communicator.broadcast(give, job.root),
            Collective::AllGather => communicator.all_gather_in_place(give),
            Collective::ReduceScatter => communicator.reduce_scatter(give, job.op).map(drop),
            Collective::Gather => communicator.gather(give, take, job.root),
            Collective::Scatter => communicator.scatter(give, take, job.root),
            Collective::AllToAll => communicator.all_to_all(give, take),
            Collective::SendRecv => communicator.sendrecv(place.up(1), give, place.down(1), take),
            _ => communicator.barrier(),
        }
    }

    /// How many elements of the result are not what they must be.
    pub(super) fn wrong(&self, numbers: &Numbers<T>) -> u64 {
        let result = if self.take.is_empty() {
            &self.give
        } else {
            &self.take
        };
        let wrong = self.due.iter().map(|due| {
            let expected = numbers.from(due.whose, due.first);
            let pairs = result[due.at.clone()].iter().zip(expected);
            pairs.filter(|(got, expected)| *got != expected).count() as u64
        });
        wrong.sum()
    }
}

/// What must be found on the rank at `place` after the call.
fn due(job: &Job, place: Place) -> Vec<Due> {
    let Place { rank, world } = place;
    let n = job.count;
    let even = Partition::new(n, world);
    let all = |at: Range<usize>| Due {
        first: at.start,
        at,
        whose: Whose::All,
    };
    let from = |whose: usize, at: Range<usize>, first: usize| Due {
        at,
        whose: Whose::Rank(whose),
        first,
    };
    match job.collective {
        Collective::AllReduce => vec![all(0..n)],
        Collective::Reduce if rank == job.root => vec![all(0..n)],
        Collective::ReduceScatter => vec![all(even.range(rank))],
        Collective::Broadcast => vec![from(job.root, 0..n, 0)],
        Collective::AllGather => {
            let part = |owner| from(owner, even.range(owner), even.range(owner).start);
            (0..world).map(part).collect()
        }
        Collective::Gather if rank == job.root => (0..world)
            .map(|owner| from(owner, even.range(owner), 0))
            .collect(),
        Collective::Scatter => vec![from(job.root, 0..n / world, even.range(rank).start)],
        Collective::AllToAll => {
            let first = even.range(rank).start;
            (0..world)
                .map(|giver| from(giver, even.range(giver), first))
                .collect()
        }
        Collective::SendRecv => vec![from(place.down(1), 0..n, 0)],
        _ => vec![],
    }
}
