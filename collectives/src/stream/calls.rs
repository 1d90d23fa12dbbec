//! Every call of a communicator, as work: buffers go in by value and come back.
use serde::{Serialize, de::DeserializeOwned};

use super::{CommStream, Work};
use crate::{Communicator, Element, ReduceOp};

impl CommStream {
    /// Starts an [all_reduce](Communicator::all_reduce) of `buffer`.
    pub fn all_reduce<T, B>(&self, mut buffer: B, op: ReduceOp) -> Work<B>
    where
        T: Element,
        B: AsMut<[T]> + Send + 'static,
    {
        self.run(move |comm| comm.all_reduce(buffer.as_mut(), op).map(|()| buffer))
    }

    /// Starts a [reduce](Communicator::reduce) of `buffer` onto `root`.
    pub fn reduce<T, B>(&self, mut buffer: B, op: ReduceOp, root: usize) -> Work<B>
    where
        T: Element,
        B: AsMut<[T]> + Send + 'static,
    {
        self.run(move |comm| comm.reduce(buffer.as_mut(), op, root).map(|()| buffer))
    }

    /// Starts a [broadcast](Communicator::broadcast) of `buffer` from `root`.
    pub fn broadcast<T, B>(&self, mut buffer: B, root: usize) -> Work<B>
    where
        T: Element,
        B: AsMut<[T]> + Send + 'static,
    {
        self.run(move |comm| comm.broadcast(buffer.as_mut(), root).map(|()| buffer))
    }

    /// Starts an [all_gather](Communicator::all_gather_in_place) of `buffer`.
    pub fn all_gather<T, B>(&self, mut buffer: B) -> Work<B>
    where
        T: Element,
        B: AsMut<[T]> + Send + 'static,
    {
        self.run(move |comm| comm.all_gather_in_place(buffer.as_mut()).map(|()| buffer))
    }

    /// Starts a [reduce_scatter](Communicator::reduce_scatter) of `buffer`, which
    /// comes back whole: this rank's part of it holds the result.
    pub fn reduce_scatter<T, B>(&self, mut buffer: B, op: ReduceOp) -> Work<B>
    where
        T: Element,
        B: AsMut<[T]> + Send + 'static,
    {
        self.run(move |comm| {
            comm.reduce_scatter(buffer.as_mut(), op)?;
            Ok(buffer)
        })
    }

    /// Starts an [all_gather](Communicator::all_gather_v) of `part` into `whole`.
    pub fn all_gather_v<T, P, B>(&self, part: P, counts: Vec<usize>, mut whole: B) -> Work<B>
    where
        T: Element,
        P: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + Send + 'static,
    {
        self.run(move |comm| {
            comm.all_gather_v(part.as_ref(), &counts, whole.as_mut())?;
            Ok(whole)
        })
    }

    /// Starts a [reduce_scatter](Communicator::reduce_scatter_v) of `buffer`, which
    /// comes back whole: this rank's range of it holds the result.
    pub fn reduce_scatter_v<T, B>(&self, mut buffer: B, counts: Vec<usize>, op: ReduceOp) -> Work<B>
    where
        T: Element,
        B: AsMut<[T]> + Send + 'static,
    {
        self.run(move |comm| {
            comm.reduce_scatter_v(buffer.as_mut(), &counts, op)?;
            Ok(buffer)
        })
    }

    /// Starts an [all_reduce](Communicator::all_reduce_coalesced) of several buffers.
    pub fn all_reduce_coalesced<T: Element>(
        &self,
        mut buffers: Vec<Vec<T>>,
        op: ReduceOp,
    ) -> Work<Vec<Vec<T>>> {
        self.run(move |comm| {
            let mut slices: Vec<_> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
            comm.all_reduce_coalesced(&mut slices, op)?;
            Ok(buffers)
        })
    }

    /// Starts a [gather](Communicator::gather) of `part` into `whole`, which all but
    /// the root give empty.
    pub fn gather<T, P, B>(&self, part: P, mut whole: B, root: usize) -> Work<B>
    where
        T: Element,
        P: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + Send + 'static,
    {
        self.run(move |comm| {
            comm.gather(part.as_ref(), whole.as_mut(), root)?;
            Ok(whole)
        })
    }

    /// Starts a [scatter](Communicator::scatter) of `whole`, which all but the root
    /// give empty, into `part`.
    pub fn scatter<T, P, B>(&self, whole: P, mut part: B, root: usize) -> Work<B>
    where
        T: Element,
        P: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + Send + 'static,
    {
        self.run(move |comm| {
            comm.scatter(whole.as_ref(), part.as_mut(), root)?;
            Ok(part)
        })
    }

    /// Starts an [all_to_all](Communicator::all_to_all) of `give` into `take`.
    pub fn all_to_all<T, P, B>(&self, give: P, mut take: B) -> Work<B>
    where
        T: Element,
        P: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + Send + 'static,
    {
        self.run(move |comm| {
            comm.all_to_all(give.as_ref(), take.as_mut())?;
            Ok(take)
        })
    }

    /// Starts a [send](Communicator::send) of `buffer`, which comes back.
    pub fn send<T, B>(&self, to: usize, buffer: B) -> Work<B>
    where
        T: Element,
        B: AsRef<[T]> + Send + 'static,
    {
        self.run(move |comm| comm.send(to, buffer.as_ref()).map(|()| buffer))
    }

    /// Starts a [recv](Communicator::recv) into `buffer`.
    pub fn recv<T, B>(&self, from: usize, mut buffer: B) -> Work<B>
    where
        T: Element,
        B: AsMut<[T]> + Send + 'static,
    {
        self.run(move |comm| comm.recv(from, buffer.as_mut()).map(|()| buffer))
    }

    /// Starts a [barrier](Communicator::barrier).
    pub fn barrier(&self) -> Work<()> {
        self.run(Communicator::barrier)
    }

    /// Starts an [all_reduce](Communicator::all_reduce_with) of `buffer` by the caller's
    /// own operator.
    pub fn all_reduce_with<T, B>(
        &self,
        mut buffer: B,
        operator: impl Fn(T, T) -> T + Send + 'static,
    ) -> Work<B>
    where
        T: Element,
        B: AsMut<[T]> + Send + 'static,
    {
        self.run(move |comm| {
            comm.all_reduce_with(buffer.as_mut(), operator)
                .map(|()| buffer)
        })
    }

    /// Starts a [gather](Communicator::gather_v) of `part`, with `counts[r]` elements from
    /// rank `r`, into `whole`.
    pub fn gather_v<T, P, B>(
        &self,
        part: P,
        counts: Vec<usize>,
        mut whole: B,
        root: usize,
    ) -> Work<B>
    where
        T: Element,
        P: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + Send + 'static,
    {
        self.run(move |comm| {
            comm.gather_v(part.as_ref(), &counts, whole.as_mut(), root)?;
            Ok(whole)
        })
    }

    /// Starts a [scatter](Communicator::scatter_v) of `whole`, with `counts[r]` elements
    /// for rank `r`, into `part`.
    pub fn scatter_v<T, P, B>(
        &self,
        whole: P,
        counts: Vec<usize>,
        mut part: B,
        root: usize,
    ) -> Work<B>
    where
        T: Element,
        P: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + Send + 'static,
    {
        self.run(move |comm| {
            comm.scatter_v(whole.as_ref(), &counts, part.as_mut(), root)?;
            Ok(part)
        })
    }

    /// Starts an [all_to_all](Communicator::all_to_all_v), with `give_counts[r]` elements
    /// for rank `r` and `take_counts[r]` from it.
    pub fn all_to_all_v<T, P, B>(
        &self,
        give: P,
        give_counts: Vec<usize>,
        mut take: B,
        take_counts: Vec<usize>,
    ) -> Work<B>
    where
        T: Element,
        P: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + Send + 'static,
    {
        self.run(move |comm| {
            comm.all_to_all_v(give.as_ref(), &give_counts, take.as_mut(), &take_counts)?;
            Ok(take)
        })
    }

    /// Starts a [sendrecv](Communicator::sendrecv).
    pub fn sendrecv<T, P, B>(&self, to: usize, give: P, from: usize, mut take: B) -> Work<B>
    where
        T: Element,
        P: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + Send + 'static,
    {
        self.run(move |comm| {
            comm.sendrecv(to, give.as_ref(), from, take.as_mut())?;
            Ok(take)
        })
    }

    /// Starts a [broadcast](Communicator::broadcast_object) of the value of `root`.
    pub fn broadcast_object<V>(&self, value: Option<V>, root: usize) -> Work<V>
    where
        V: Serialize + DeserializeOwned + Send + 'static,
    {
        self.run(move |comm| comm.broadcast_object(value, root))
    }

    /// Starts an [all_gather](Communicator::all_gather_object) of every rank's value.
    pub fn all_gather_object<V>(&self, value: V) -> Work<Vec<V>>
    where
        V: Serialize + DeserializeOwned + Send + 'static,
    {
        self.run(move |comm| comm.all_gather_object(&value))
    }

    /// Starts the making of a [group](Communicator::new_group) of `ranks`.
    pub fn new_group(&self, ranks: Vec<usize>) -> Work<Option<Communicator>> {
        self.run(move |comm| comm.new_group(&ranks))
    }

    /// Starts a [split](Communicator::split) into groups by `color`.
    pub fn split(&self, color: Option<u32>, key: i64) -> Work<Option<Communicator>> {
        self.run(move |comm| comm.split(color, key))
    }
}
