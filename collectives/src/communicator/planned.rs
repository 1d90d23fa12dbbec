//! The collectives that an algorithm plans.
use super::{Communicator, Tools};
use crate::{
    Call, Collective, Element, Operator, Parts, ReduceOp, Result, Route,
    algorithm::Shape,
    executor::{self, Folds, room},
    fingerprint::terms,
};

impl Communicator {
    /// Replaces every rank's `buffer` by the reduction of them all.
    ///
    /// Bytes: 2(N-1)/N of the buffer each way per rank by ring, halving and direct;
    /// up to log2 N buffers by tree.
    ///
    /// # Errors
    ///
    /// As every call: see [`Error`](crate::Error).
    pub fn all_reduce<T: Element>(&mut self, buffer: &mut [T], op: ReduceOp) -> Result<()> {
        let operator = Some(Operator::Named(op));
        let call = self.call::<T>(Collective::AllReduce, operator, None, buffer.len());
        self.reduction(call, op, buffer)
    }

    /// As [`all_reduce`](Self::all_reduce), by the caller's own operator: associative
    /// and commutative, and the same on every rank.
    ///
    /// ```
    /// use collectives::{CommunicatorConfig, launch};
    /// let longest = |a: u32, b: u32| if a.count_ones() >= b.count_ones() { a } else { b };
    /// let most_bits = launch::spawn(3, &CommunicatorConfig::new(), |mut communicator| {
    ///     let mut mine = [[1, 7, 8][communicator.rank()]];
    ///     communicator.all_reduce_with(&mut mine, longest)?;
    ///     Ok::<_, collectives::Error>(mine[0])
    /// }).unwrap();
    /// assert_eq!(most_bits, [7; 3]);
    /// ```
    ///
    /// # Errors
    ///
    /// As every call: see [`Error`](crate::Error).
    pub fn all_reduce_with<T: Element>(
        &mut self,
        buffer: &mut [T],
        operator: impl Fn(T, T) -> T,
    ) -> Result<()> {
        let here = |acc: &mut [T], incoming: &[T]| {
            acc.iter_mut()
                .zip(incoming)
                .for_each(|(a, &b)| *a = operator(*a, b));
        };
        let aside = |acc: &mut [T::Wide], incoming: &[T::Wide]| {
            let pairs = acc.iter_mut().zip(incoming);
            pairs.for_each(|(a, &b)| *a = operator(T::narrow(*a), T::narrow(b)).widen());
        };
        let folds = Folds {
            here: &here,
            aside: &aside,
            divisor: None,
        };
        let call = self.call::<T>(
            Collective::AllReduce,
            Some(Operator::User),
            None,
            buffer.len(),
        );
        let parts = Parts::Even(self.partition(buffer.len()));
        self.planned(call, parts, buffer, &folds)
    }

    /// As [`all_reduce`](Self::all_reduce), and `then` goes over the result once, before it is
    /// spread: over each element on the rank that completes it. It is told where in the buffer its
    /// elements begin, and must be the same on every rank.
    ///
    /// Cost: by ring, halving and direct each rank's `then` sees 1/N of the buffer.
    ///
    /// ```
    /// use collectives::{CommunicatorConfig, ReduceOp, launch};
    /// let means = launch::spawn(2, &CommunicatorConfig::new(), |mut communicator| {
    ///     let mut sums = [[3.0, 1.0], [5.0, 2.0]][communicator.rank()];
    ///     let halve = |_, sums: &mut [f32]| sums.iter_mut().for_each(|sum| *sum /= 2.0);
    ///     communicator.all_reduce_then(&mut sums, ReduceOp::Sum, halve)?;
    ///     Ok::<_, collectives::Error>(sums)
    /// }).unwrap();
    /// assert_eq!(means, [[4.0, 1.5]; 2]);
    /// ```
    ///
    /// # Errors
    ///
    /// As every call: see [`Error`](crate::Error).
    pub fn all_reduce_then<T: Element>(
        &mut self,
        buffer: &mut [T],
        op: ReduceOp,
        then: impl Fn(usize, &mut [T]),
    ) -> Result<()> {
        let operator = Some(Operator::Named(op));
        let call = self.call::<T>(Collective::AllReduce, operator, None, buffer.len());
        self.check_op::<T>(call, op)?;
        let parts = Parts::Even(self.partition(buffer.len()));
        let folds = Folds::named(op, self.world_size());
        self.planned_then(call, parts, buffer, &folds, &then)
    }

    /// All-reduces several buffers as one: the latency of one call for all.
    ///
    /// The buffers' lengths must be the same on every rank, one by one.
    ///
    /// # Errors
    ///
    /// As every call: see [`Error`](crate::Error).
    pub fn all_reduce_coalesced<T: Element>(
        &mut self,
        buffers: &mut [&mut [T]],
        op: ReduceOp,
    ) -> Result<()> {
        let mut room_for_all = std::mem::take(&mut self.scratch.together);
        let len = buffers.iter().map(|buffer| buffer.len()).sum();
        let together: &mut [T] = room(&mut room_for_all, len);
        let mut rest = &mut *together;
        for buffer in buffers.iter() {
            let (own, others) = rest.split_at_mut(buffer.len());
            own.copy_from_slice(buffer);
            rest = others;
        }
        let operator = Some(Operator::Named(op));
        let call = Call {
            terms: terms(buffers.iter().map(|buffer| buffer.len())),
            ..self.call::<T>(Collective::AllReduce, operator, None, len)
        };
        let outcome = self.reduction(call, op, together);
        let mut rest = &*together;
        for buffer in buffers.iter_mut() {
            let (own, others) = rest.split_at(buffer.len());
            buffer.copy_from_slice(own);
            rest = others;
        }
        self.scratch.together = room_for_all;
        outcome
    }

    /// Replaces the buffer of `root` by the reduction of all buffers. Afterwards
    /// the other ranks' buffers hold partial results.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) if there is no rank `root`.
    pub fn reduce<T: Element>(
        &mut self,
        buffer: &mut [T],
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        let operator = Some(Operator::Named(op));
        let call = self.call::<T>(Collective::Reduce, operator, Some(root), buffer.len());
        self.reduction(call, op, buffer)
    }

    /// Copies the buffer of `root` to every rank.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) if there is no rank `root`.
    pub fn broadcast<T: Element>(&mut self, buffer: &mut [T], root: usize) -> Result<()> {
        let call = self.call::<T>(Collective::Broadcast, None, Some(root), buffer.len());
        let parts = Parts::Even(self.partition(buffer.len()));
        self.planned(call, parts, buffer, &Folds::named(ReduceOp::Sum, 1))
    }

    /// Fills `whole`, on every rank, with the parts of all ranks in rank order.
    ///
    /// Rank `r` gives part `r` of the [partition](Self::partition) of
    /// `whole.len()`. (N-1)/N of the whole each way per rank by ring.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) if `part` is not of that length.
    pub fn all_gather<T: Element>(&mut self, part: &[T], whole: &mut [T]) -> Result<()> {
        let own = self.part(whole.len());
        let call = self.call::<T>(Collective::AllGather, None, None, whole.len());
        self.check_len(call, "the part of this rank", part.len(), own.len())?;
        whole[own].copy_from_slice(part);
        self.all_gather_in_place(whole)
    }

    /// Completes `buffer` from each rank's own part of it.
    ///
    /// # Errors
    ///
    /// As every call: see [`Error`](crate::Error).
    pub fn all_gather_in_place<T: Element>(&mut self, buffer: &mut [T]) -> Result<()> {
        let call = self.call::<T>(Collective::AllGather, None, None, buffer.len());
        let parts = Parts::Even(self.partition(buffer.len()));
        self.planned(call, parts, buffer, &Folds::named(ReduceOp::Sum, 1))
    }

    /// As [`all_gather_in_place`](Self::all_gather_in_place), of a buffer that has a name: ranks
    /// that come with different ones are a mismatch, also if the lengths are the same.
    ///
    /// ```
    /// use collectives::{CommunicatorConfig, launch};
    /// let errors = launch::spawn(2, &CommunicatorConfig::new(), |mut communicator| {
    ///     let layer = communicator.rank() as u64;
    ///     let gathered = communicator.all_gather_named(layer, &mut [0.0; 4]);
    ///     Ok::<_, collectives::Error>(gathered.is_err())
    /// }).unwrap();
    /// assert_eq!(errors, [true, true]);
    /// ```
    ///
    /// # Errors
    ///
    /// As every call: see [`Error`](crate::Error).
    pub fn all_gather_named<T: Element>(&mut self, name: u64, buffer: &mut [T]) -> Result<()> {
        let call = Call {
            terms: terms([name as usize, (name >> 32) as usize].into_iter()),
            ..self.call::<T>(Collective::AllGather, None, None, buffer.len())
        };
        let parts = Parts::Even(self.partition(buffer.len()));
        self.planned(call, parts, buffer, &Folds::named(ReduceOp::Sum, 1))
    }

    /// As [`all_gather`](Self::all_gather), with `counts[r]` elements from rank `r`.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) if lengths and counts do not fit.
    pub fn all_gather_v<T: Element>(
        &mut self,
        part: &[T],
        counts: &[usize],
        whole: &mut [T],
    ) -> Result<()> {
        let call = Call {
            terms: terms(counts.iter().copied()),
            ..self.call::<T>(Collective::AllGather, None, None, whole.len())
        };
        let own = self.check_counts(call, counts, whole.len())?;
        self.check_len(call, "the part of this rank", part.len(), own.len())?;
        whole[own].copy_from_slice(part);
        self.planned(
            call,
            Parts::Counted(counts),
            whole,
            &Folds::named(ReduceOp::Sum, 1),
        )
    }

    /// Reduces all buffers and returns this rank's part of the result; the rest
    /// of `buffer` holds partial results.
    ///
    /// (N-1)/N of the buffer each way per rank by ring.
    ///
    /// # Errors
    ///
    /// As every call: see [`Error`](crate::Error).
    pub fn reduce_scatter<'a, T: Element>(
        &mut self,
        buffer: &'a mut [T],
        op: ReduceOp,
    ) -> Result<&'a mut [T]> {
        let operator = Some(Operator::Named(op));
        let call = self.call::<T>(Collective::ReduceScatter, operator, None, buffer.len());
        self.reduction(call, op, buffer)?;
        let own = self.part(buffer.len());
        Ok(&mut buffer[own])
    }

    /// As [`reduce_scatter`](Self::reduce_scatter), with `counts[r]` elements for rank `r`.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) if length and counts do not fit.
    pub fn reduce_scatter_v<'a, T: Element>(
        &mut self,
        buffer: &'a mut [T],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<&'a mut [T]> {
        let operator = Some(Operator::Named(op));
        let call = Call {
            terms: terms(counts.iter().copied()),
            ..self.call::<T>(Collective::ReduceScatter, operator, None, buffer.len())
        };
        let own = self.check_counts(call, counts, buffer.len())?;
        self.check_op::<T>(call, op)?;
        let folds = Folds::named(op, self.world_size());
        self.planned(call, Parts::Counted(counts), buffer, &folds)?;
        Ok(&mut buffer[own])
    }

    /// Returns when every rank has come here.
    ///
    /// # Errors
    ///
    /// As every call: see [`Error`](crate::Error). A time-out lists the ranks that did not come.
    pub fn barrier(&mut self) -> Result<()> {
        self.meet(Collective::Barrier, 0)
    }

    /// A barrier at which all must agree on `terms`.
    pub(super) fn meet(&mut self, collective: Collective, terms: u64) -> Result<()> {
        let call = Call {
            terms,
            ..self.call::<u8>(collective, None, None, 0)
        };
        let parts = Parts::Even(self.partition(0));
        self.planned::<u8>(call, parts, &mut [], &Folds::named(ReduceOp::Max, 1))
    }

    fn reduction<T: Element>(&mut self, call: Call, op: ReduceOp, buffer: &mut [T]) -> Result<()> {
        self.check_op::<T>(call, op)?;
        let parts = Parts::Even(self.partition(buffer.len()));
        self.planned(call, parts, buffer, &Folds::named(op, self.world_size()))
    }

    fn planned<T: Element>(
        &mut self,
        call: Call,
        parts: Parts<'_>,
        buffer: &mut [T],
        folds: &Folds<'_, T>,
    ) -> Result<()> {
        self.planned_then(call, parts, buffer, folds, &|_, _| ())
    }

    /// Runs the call; `then` goes over what this rank owns, between the two passes.
    fn planned_then<T: Element>(
        &mut self,
        call: Call,
        parts: Parts<'_>,
        buffer: &mut [T],
        folds: &Folds<'_, T>,
        then: &dyn Fn(usize, &mut [T]),
    ) -> Result<()> {
        self.check_root(call)?;
        // Ranks of which one alone is deterministic may exchange messages that fit, and
        // end with wrong values: what the route does not show of the plan goes here.
        let settings = [
            usize::from(self.config.deterministic),
            self.config.direct_piece,
        ];
        let call = Call {
            terms: call.terms ^ terms(settings.into_iter()),
            ..call
        };
        let shape = Shape {
            collective: call.collective,
            place: self.place(),
            root: call.root.unwrap_or(0),
            parts,
            dtype: T::DTYPE,
            segment: self.segment(call),
            piece: self.config.direct_piece,
            deterministic: self.config.deterministic,
            widens: call.widens(),
        };
        let route = Route::new(self.config.pick(&call, shape.place.world), &shape);
        let settles = shape.deterministic
            && shape.place.world > 1
            && call.op.is_some()
            && T::DTYPE.is_float();
        let ticket = self.begin(call, route)?;
        route.plan(&shape, &mut self.plan);
        self.run(ticket, route.traffic(&shape), |tools| {
            let Tools {
                plan,
                ticket,
                link,
                scratch,
            } = tools;
            let aside = &mut scratch.aside;
            if route.carries_wide(&shape) {
                let wide: &mut [T::Wide] = room(&mut scratch.wide, buffer.len());
                wide.iter_mut()
                    .zip(&*buffer)
                    .for_each(|(wide, &narrow)| *wide = narrow.widen());
                executor::run(&plan.reduce, wide, &folds.wide(), ticket, link, aside)?;
                folds.wide().complete(&mut wide[plan.owned.clone()]);
                let finished = buffer[plan.owned.clone()]
                    .iter_mut()
                    .zip(&wide[plan.owned.clone()]);
                finished.for_each(|(narrow, &wide)| *narrow = T::narrow(wide));
            } else {
                executor::run(&plan.reduce, buffer, folds, ticket, link, aside)?;
                if !plan.folds_aside() {
                    folds.complete(&mut buffer[plan.owned.clone()]);
                }
            }
            then(plan.owned.start, &mut buffer[plan.owned.clone()]);
            if settles {
                T::settle(&mut buffer[plan.owned.clone()]);
            }
            executor::run(&plan.spread, buffer, folds, ticket, link, aside)
        })
    }

    pub(super) fn call<T: Element>(
        &self,
        collective: Collective,
        op: Option<Operator>,
        root: Option<usize>,
        len: usize,
    ) -> Call {
        Call {
            collective,
            op,
            root,
            dtype: T::DTYPE,
            len,
            terms: 0,
        }
    }

    fn check_op<T: Element>(&mut self, call: Call, op: ReduceOp) -> Result<()> {
        if op.suits(T::DTYPE) {
            return Ok(());
        }
        let what = match op {
            ReduceOp::Mean => format!(
                "no mean of {}: take the sum, and divide as you see fit",
                T::DTYPE
            ),
            _ => format!("no {op} of {}: only integers have bits", T::DTYPE),
        };
        Err(self.refuse(call, what))
    }

    /// Refuses counts that are not one a rank, or do not add up; gives this rank's range.
    pub(super) fn check_counts(
        &mut self,
        call: Call,
        counts: &[usize],
        len: usize,
    ) -> Result<std::ops::Range<usize>> {
        if counts.len() != self.world_size() {
            let (got, due) = (counts.len(), self.world_size());
            return Err(self.refuse(call, format!("{got} counts for {due} ranks")));
        }
        let parts = Parts::Counted(counts);
        self.check_len(call, "the whole buffer", len, parts.len())?;
        Ok(parts.range(self.rank()))
    }
}
