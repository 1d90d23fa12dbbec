//! A case, carried out here on threads.
use collectives::{
    Collective, Communicator, Error, ReduceOp, Route, Row,
    launch::{self, LaunchError},
};

use super::{Case, Way, expected::Side};
use crate::bench::numbers::{Number, UNTOUCHED};

/// How one rank ended.
pub(super) struct Ended<T> {
    /// What it got, if it gets anything.
    pub(super) output: Side<T>,
    /// What ran; none where an operation has no algorithm.
    pub(super) route: Option<Route>,
    /// What it moved.
    pub(super) moved: Row,
}

/// How each rank ended; or the error of the one nearest to the cause.
pub(super) fn run<T: Number>(
    case: &Case,
    inputs: &[Side<T>],
    way: Way,
) -> Result<Result<Vec<Ended<T>>, Error>, LaunchError> {
    let ended = launch::spawn(case.world, &way.config(), |mut communicator| {
        let input = inputs[communicator.rank()].clone();
        let output = call(&mut communicator, case, input)?;
        let mut rows = communicator.stats().rows();
        let route = rows.next().and_then(|(key, _)| key.algorithm);
        assert!(rows.next().is_none(), "one call, one row");
        Ok::<_, Error>(Ended {
            output,
            route,
            moved: communicator.stats().total(),
        })
    });
    match ended {
        Ok(ended) => Ok(Ok(ended)),
        Err(LaunchError::Failed { rank, source }) => match source.downcast() {
            Ok(error) => Ok(Err(*error)),
            Err(source) => Err(LaunchError::Failed { rank, source }),
        },
        Err(other) => Err(other),
    }
}

fn call<T: Number>(
    communicator: &mut Communicator,
    case: &Case,
    input: Side<T>,
) -> Result<Side<T>, Error> {
    let (rank, world, root) = (communicator.rank(), case.world, case.root);
    let op = case.reduce.unwrap_or(ReduceOp::Sum);
    let gives = input.is_some();
    let mut mine = input.unwrap_or_default();
    let room = |len| vec![T::of(UNTOUCHED); len];
    let at_root = |output| (rank == root).then_some(output);
    let output = match case.collective {
        Collective::AllReduce => {
            communicator.all_reduce(&mut mine, op)?;
            Some(mine)
        }
        Collective::Reduce => {
            communicator.reduce(&mut mine, op, root)?;
            at_root(mine)
        }
        Collective::ReduceScatter => Some(communicator.reduce_scatter(&mut mine, op)?.to_vec()),
        Collective::Broadcast => {
            communicator.broadcast(&mut mine, root)?;
            Some(mine)
        }
        Collective::AllGather => {
            let even = vec![mine.len(); world];
            let counts = case.counts.as_ref().unwrap_or(&even);
            let mut whole = room(counts.iter().sum());
            match case.counts {
                Some(_) => communicator.all_gather_v(&mine, counts, &mut whole)?,
                None => communicator.all_gather(&mine, &mut whole)?,
            }
            Some(whole)
        }
        Collective::Gather => {
            let mut whole = room(if rank == root { world * mine.len() } else { 0 });
            communicator.gather(&mine, &mut whole, root)?;
            at_root(whole)
        }
        Collective::Scatter => {
            let mut part = room(case.len / world);
            communicator.scatter(&mine, &mut part, root)?;
            Some(part)
        }
        Collective::AllToAll => {
            let mut take = room(mine.len());
            communicator.all_to_all(&mine, &mut take)?;
            Some(take)
        }
        _ if gives => {
            communicator.send(root, &mine)?;
            None
        }
        _ if rank == root => {
            let mut take = room(case.len);
            communicator.recv(0, &mut take)?;
            Some(take)
        }
        _ => None,
    };
    Ok(output)
}
