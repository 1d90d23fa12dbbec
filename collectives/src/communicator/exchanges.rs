//! The collectives that move parts between two buffers, and single messages.
use super::{Communicator, Messages, Tools};
use crate::{
    Algorithm, Call, Collective, Element, Parts, Place, Result, Traffic,
    algorithm::exchange,
    executor,
    fingerprint::terms,
    schedule::{Step, Then},
    transport::Ticket,
};

impl Communicator {
    /// Fills `whole`, on `root`, with every rank's `part` in rank order. Parts are
    /// of one length; the other ranks give an empty `whole`.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) if there is no rank `root`, or a
    /// length does not fit.
    pub fn gather<T: Element>(&mut self, part: &[T], whole: &mut [T], root: usize) -> Result<()> {
        let len = part.len() * self.world_size();
        let call = self.call::<T>(Collective::Gather, None, Some(root), len);
        self.gather_parts(call, Parts::Even(self.partition(len)), part, whole)
    }

    /// As [`gather`](Self::gather), with `counts[r]` elements from rank `r`.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) if lengths and counts do not fit.
    pub fn gather_v<T: Element>(
        &mut self,
        part: &[T],
        counts: &[usize],
        whole: &mut [T],
        root: usize,
    ) -> Result<()> {
        let len = Parts::Counted(counts).len();
        let call = Call {
            terms: terms(counts.iter().copied()),
            ..self.call::<T>(Collective::Gather, None, Some(root), len)
        };
        self.check_counts(call, counts, len)?;
        self.gather_parts(call, Parts::Counted(counts), part, whole)
    }

    /// Gives every rank its `part` of the `whole` that `root` has. Parts are of one
    /// length; the other ranks give an empty `whole`.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) if there is no rank `root`, or a
    /// length does not fit.
    pub fn scatter<T: Element>(&mut self, whole: &[T], part: &mut [T], root: usize) -> Result<()> {
        let len = part.len() * self.world_size();
        let call = self.call::<T>(Collective::Scatter, None, Some(root), len);
        self.scatter_parts(call, Parts::Even(self.partition(len)), whole, part)
    }

    /// As [`scatter`](Self::scatter), with `counts[r]` elements for rank `r`.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) if lengths and counts do not fit.
    pub fn scatter_v<T: Element>(
        &mut self,
        whole: &[T],
        counts: &[usize],
        part: &mut [T],
        root: usize,
    ) -> Result<()> {
        let len = Parts::Counted(counts).len();
        let call = Call {
            terms: terms(counts.iter().copied()),
            ..self.call::<T>(Collective::Scatter, None, Some(root), len)
        };
        self.check_counts(call, counts, len)?;
        self.scatter_parts(call, Parts::Counted(counts), whole, part)
    }

    /// Part `r` of `give` goes to rank `r`, and what rank `r` gives this rank lands
    /// in part `r` of `take`. Parts are of one length.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) if the buffers differ in length or
    /// do not cut into equal parts.
    pub fn all_to_all<T: Element>(&mut self, give: &[T], take: &mut [T]) -> Result<()> {
        let call = self.call::<T>(Collective::AllToAll, None, None, give.len());
        self.check_len(call, "what is taken", take.len(), give.len())?;
        let world = self.world_size();
        if !give.len().is_multiple_of(world) {
            let what = format!(
                "{} elements do not cut into {world} equal parts",
                give.len()
            );
            return Err(self.refuse(call, what));
        }
        let parts = Parts::Even(self.partition(give.len()));
        self.exchange_parts(call, parts, give, parts, take)
    }

    /// As [`all_to_all`](Self::all_to_all), with `give_counts[r]` elements for rank
    /// `r` and `take_counts[r]` from it.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) if lengths and counts do not fit;
    /// [`Error::Protocol`](crate::Error::Protocol) if two ranks' counts differ; where they
    /// differ by whole messages, a mismatch at the next call of these two.
    pub fn all_to_all_v<T: Element>(
        &mut self,
        give: &[T],
        give_counts: &[usize],
        take: &mut [T],
        take_counts: &[usize],
    ) -> Result<()> {
        // Ranks give and take as they like: only the two of a pair must agree.
        let call = self.call::<T>(Collective::AllToAll, None, None, 0);
        self.check_counts(call, give_counts, give.len())?;
        self.check_counts(call, take_counts, take.len())?;
        let (from, to) = (Parts::Counted(give_counts), Parts::Counted(take_counts));
        self.exchange_parts(call, from, give, to, take)
    }

    /// Sends `buffer` to the rank `to`, which receives it with [`recv`](Self::recv).
    ///
    /// May return before it has arrived, or wait until it is received: two ranks
    /// that both send much before either receives wait until the deadline. They
    /// want [`sendrecv`](Self::sendrecv).
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) if `to` is this rank or none.
    pub fn send<T: Element>(&mut self, to: usize, buffer: &[T]) -> Result<()> {
        let ticket = self.message::<T>(to, buffer.len(), |messages| &mut messages.sent[to])?;
        self.plan.spread.push(Step::send(to, 0..buffer.len()));
        let traffic = Traffic {
            sent: size_of_val(buffer),
            received: 0,
        };
        self.between(ticket, traffic, buffer, &mut [])
    }

    /// Receives what the rank `from` has [sent](Self::send).
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) if `from` is this rank or none.
    pub fn recv<T: Element>(&mut self, from: usize, buffer: &mut [T]) -> Result<()> {
        let ticket =
            self.message::<T>(from, buffer.len(), |messages| &mut messages.received[from])?;
        self.plan
            .spread
            .push(Step::recv(from, 0..buffer.len(), Then::Replace));
        let traffic = Traffic {
            sent: 0,
            received: size_of_val(buffer),
        };
        self.between(ticket, traffic, &[], buffer)
    }

    /// Sends to one rank while it receives from one, the same or another: safe where
    /// all ranks do so at once, whatever the size.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) if a rank is this one or none.
    pub fn sendrecv<T: Element>(
        &mut self,
        to: usize,
        give: &[T],
        from: usize,
        take: &mut [T],
    ) -> Result<()> {
        let out = self.message::<T>(to, give.len(), |messages| &mut messages.sent[to])?;
        let back = self.message::<T>(from, take.len(), |messages| &mut messages.received[from])?;
        let ticket = Ticket {
            expected: back.expected,
            ..out
        };
        let step = Step::send(to, 0..give.len()).and_recv(from, 0..take.len(), Then::Replace);
        self.plan.spread.push(step);
        let traffic = Traffic {
            sent: size_of_val(give),
            received: size_of_val(take),
        };
        self.between(ticket, traffic, give, take)
    }

    fn gather_parts<T: Element>(
        &mut self,
        call: Call,
        parts: Parts<'_>,
        part: &[T],
        whole: &mut [T],
    ) -> Result<()> {
        let (root, own, len) = self.rooted(call, parts, part.len(), whole.len())?;
        let ticket = self.begin(call, Algorithm::Direct.into())?;
        exchange::gather(self.place(), root, parts, &mut self.plan.spread);
        let traffic = match self.rank() == root {
            true => {
                whole[own.clone()].copy_from_slice(part);
                Traffic {
                    sent: 0,
                    received: (len - own.len()) * size_of::<T>(),
                }
            }
            false => Traffic {
                sent: size_of_val(part),
                received: 0,
            },
        };
        self.between(ticket, traffic, part, whole)
    }

    fn scatter_parts<T: Element>(
        &mut self,
        call: Call,
        parts: Parts<'_>,
        whole: &[T],
        part: &mut [T],
    ) -> Result<()> {
        let (root, own, len) = self.rooted(call, parts, part.len(), whole.len())?;
        let ticket = self.begin(call, Algorithm::Direct.into())?;
        exchange::scatter(self.place(), root, parts, &mut self.plan.spread);
        let traffic = match self.rank() == root {
            true => {
                part.copy_from_slice(&whole[own.clone()]);
                Traffic {
                    sent: (len - own.len()) * size_of::<T>(),
                    received: 0,
                }
            }
            false => Traffic {
                sent: 0,
                received: size_of_val(part),
            },
        };
        self.between(ticket, traffic, whole, part)
    }

    fn exchange_parts<T: Element>(
        &mut self,
        call: Call,
        from: Parts<'_>,
        give: &[T],
        to: Parts<'_>,
        take: &mut [T],
    ) -> Result<()> {
        let place = self.place();
        let (give_own, take_own) = (from.range(place.rank), to.range(place.rank));
        self.check_len(
            call,
            "what this rank takes from itself",
            take_own.len(),
            give_own.len(),
        )?;
        let traffic = Traffic {
            sent: (give.len() - give_own.len()) * size_of::<T>(),
            received: (take.len() - take_own.len()) * size_of::<T>(),
        };
        let ticket = self.begin(call, Algorithm::Direct.into())?;
        exchange::all_to_all(place, from, to, &mut self.plan.spread);
        take[take_own].copy_from_slice(&give[give_own]);
        self.between(ticket, traffic, give, take)
    }

    /// Carries out the plan from one buffer into another.
    fn between<T: Element>(
        &mut self,
        ticket: Ticket,
        traffic: Traffic,
        source: &[T],
        target: &mut [T],
    ) -> Result<()> {
        self.run(ticket, traffic, |tools| {
            let Tools {
                plan, ticket, link, ..
            } = tools;
            executor::run_between(&plan.spread, source, target, ticket, link)
        })
    }

    /// Checks a call with a root, the only rank that has the whole buffer; gives the
    /// root, this rank's range, and the length of all.
    fn rooted(
        &mut self,
        call: Call,
        parts: Parts<'_>,
        part: usize,
        whole: usize,
    ) -> Result<(usize, std::ops::Range<usize>, usize)> {
        self.check_root(call)?;
        let (root, rank) = (call.root.unwrap_or(0), self.rank());
        let own = parts.range(rank);
        self.check_len(call, "the part of this rank", part, own.len())?;
        let due = if rank == root { parts.len() } else { 0 };
        self.check_len(call, "the whole, which only the root has,", whole, due)?;
        Ok((root, own, parts.len()))
    }

    /// Begins a single message to or from `peer`; `count` is the number of those so far.
    fn message<T: Element>(
        &mut self,
        peer: usize,
        len: usize,
        count: impl FnOnce(&mut Messages) -> &mut u64,
    ) -> Result<Ticket> {
        let Place { rank, world } = self.place();
        let call = self.call::<T>(Collective::SendRecv, None, None, len);
        if peer >= world || peer == rank {
            let what = format!(
                "no rank {peer} to speak to: ranks are 0 to {}, and this one is {rank}",
                world - 1
            );
            return Err(self.refuse(call, what));
        }
        let count = count(&mut self.messages);
        *count += 1;
        let seq = *count;
        self.enter()?;
        self.plan.clear();
        Ok(self.ticket(self.fingerprint(call, seq, None)))
    }
}
