//! Where plans meet bytes: runs steps over a [`Transport`].
use std::ops::Range;

use crate::{
    Element, Place, ReduceOp,
    schedule::{Step, Then},
    transport::{Incoming, Outgoing, Ticket, Transport, Trouble},
};

/// Folds the second slice into the first.
type Fold<'a, T> = dyn Fn(&mut [T], &[T]) + 'a;

/// How elements become one: where they lie, and while they are wide.
pub(crate) struct Folds<'a, T: Element> {
    /// Folds what arrives into what lies there.
    pub(crate) here: &'a Fold<'a, T>,
    /// The same for what was set aside.
    pub(crate) aside: &'a Fold<'a, T::Wide>,
    /// What the sum is divided by at the end, for a mean.
    pub(crate) divisor: Option<usize>,
}

impl<T: Element> Folds<'static, T> {
    /// The folds of `op` among `world` ranks.
    pub(crate) fn named(op: ReduceOp, world: usize) -> Self {
        // A function for each operation: a closure over `op` could not be `'static`.
        macro_rules! folds {
            ($($op:ident)*) => {
                match op {
                    $(ReduceOp::$op => Self {
                        here: &|acc, incoming| T::fold(ReduceOp::$op, acc, incoming),
                        aside: &|acc, incoming| T::Wide::fold(ReduceOp::$op, acc, incoming),
                        divisor: (op == ReduceOp::Mean).then_some(world),
                    },)*
                }
            };
        }
        folds!(Sum Mean Min Max Product And Or Xor)
    }
}

impl<'a, T: Element> Folds<'a, T> {
    /// The same for a buffer that is wide from the start.
    pub(crate) fn wide(&self) -> Folds<'a, T::Wide> {
        Folds {
            here: self.aside,
            aside: self.aside,
            divisor: self.divisor,
        }
    }

    /// The last step of a mean, by the owner of a range, once all is summed.
    pub(crate) fn complete(&self, owned: &mut [T]) {
        if let Some(count) = self.divisor {
            T::divide(owned, count);
        }
    }
}

/// Runs `steps` on `buffer`, in order, in messages of the ticket's segment size.
pub(crate) fn run<T: Element>(
    steps: &[Step],
    buffer: &mut [T],
    folds: &Folds<'_, T>,
    ticket: &Ticket,
    link: &mut dyn Transport,
    aside: &mut Aside,
) -> Result<(), Trouble> {
    let place = link.place();
    for step in steps
        .iter()
        .flat_map(|step| step.segments(ticket.fingerprint.segment))
    {
        let leaves = step.send.as_ref().map_or(0..0, |send| send.range.clone());
        let lands = step.recv.as_ref().map_or(0..0, |recv| recv.range.clone());
        let (leaving, landing) = disjoint(buffer, leaves, lands);
        let mut land = |from: usize, then: Then, bytes: &[u8]| {
            let arrived: &[T] = bytemuck::cast_slice(bytes);
            match then {
                Then::Replace => landing.copy_from_slice(arrived),
                Then::Reduce => (folds.here)(landing, arrived),
                Then::SetAside => aside.put(from, arrived),
            }
        };
        exchange(&step, leaving, &mut land, ticket, link)?;
        if let Some(range) = step.fold {
            aside.fold(place, &mut buffer[range], folds);
        }
    }
    Ok(())
}

/// Runs `steps`, which send out of `source` and receive into `target`.
pub(crate) fn run_between<T: Element>(
    steps: &[Step],
    source: &[T],
    target: &mut [T],
    ticket: &Ticket,
    link: &mut dyn Transport,
) -> Result<(), Trouble> {
    for step in steps
        .iter()
        .flat_map(|step| step.segments(ticket.fingerprint.segment))
    {
        let leaves = step.send.as_ref().map_or(0..0, |send| send.range.clone());
        let lands = step.recv.as_ref().map_or(0..0, |recv| recv.range.clone());
        let landing = &mut target[lands];
        let mut land = |_, _, bytes: &[u8]| landing.copy_from_slice(bytemuck::cast_slice(bytes));
        exchange(&step, &source[leaves], &mut land, ticket, link)?;
    }
    Ok(())
}

fn exchange<T: Element>(
    step: &Step,
    leaving: &[T],
    land: &mut dyn FnMut(usize, Then, &[u8]),
    ticket: &Ticket,
    link: &mut dyn Transport,
) -> Result<(), Trouble> {
    let send = step.send.as_ref().map(|send| Outgoing {
        to: send.to,
        bytes: bytemuck::cast_slice(leaving),
    });
    match &step.recv {
        None if send.is_none() => Ok(()),
        None => link.exchange(ticket, send, None),
        Some(recv) => {
            let recv = Incoming {
                from: recv.from,
                len: recv.range.len() * size_of::<T>(),
                land: &mut |bytes| land(recv.from, recv.then, bytes),
            };
            link.exchange(ticket, send, Some(recv))
        }
    }
}

/// What waits to be folded, by rank: at most a message each. Kept from call to call.
#[derive(Debug, Default)]
pub(crate) struct Aside(Vec<Vec<u64>>);

impl Aside {
    fn put<T: Element>(&mut self, rank: usize, elements: &[T]) {
        let lane = self.lane::<T::Wide>(rank, elements.len());
        lane.iter_mut()
            .zip(elements)
            .for_each(|(wide, &element)| *wide = element.widen());
    }

    /// Adds `own` and what the others set aside, neighbours first, then neighbours
    /// of neighbours: T(n) = T(p) + T(n - p), p the largest power of two below n.
    fn fold<T: Element>(
        &mut self,
        Place { rank, world }: Place,
        own: &mut [T],
        folds: &Folds<'_, T>,
    ) {
        self.put(rank, own);
        let mut apart = 1;
        while apart < world {
            for left in (0..world - apart).step_by(2 * apart) {
                let (lefts, rights) = self.0.split_at_mut(left + apart);
                let right = &bytemuck::cast_slice(&rights[0])[..own.len()];
                let left = &mut bytemuck::cast_slice_mut(&mut lefts[left])[..own.len()];
                (folds.aside)(left, right);
            }
            apart *= 2;
        }
        let sum = self.lane::<T::Wide>(0, own.len());
        folds.wide().complete(sum);
        own.iter_mut()
            .zip(&*sum)
            .for_each(|(element, &wide)| *element = T::narrow(wide));
    }

    fn lane<T: Element>(&mut self, rank: usize, len: usize) -> &mut [T] {
        if self.0.len() <= rank {
            self.0.resize_with(rank + 1, Vec::new);
        }
        room(&mut self.0[rank], len)
    }
}

/// Room for `len` elements in `words`, holding anything.
pub(crate) fn room<T: Element>(words: &mut Vec<u64>, len: usize) -> &mut [T] {
    let needed = (len * size_of::<T>()).div_ceil(size_of::<u64>());
    if words.len() < needed {
        words.resize(needed, 0);
    }
    &mut bytemuck::cast_slice_mut(words)[..len]
}

/// Borrows `shared` and `exclusive`, which do not overlap, out of one slice.
fn disjoint<T>(slice: &mut [T], shared: Range<usize>, exclusive: Range<usize>) -> (&[T], &mut [T]) {
    if shared.end <= exclusive.start {
        let (left, right) = slice.split_at_mut(exclusive.start);
        (&left[shared], &mut right[..exclusive.len()])
    } else {
        let (left, right) = slice.split_at_mut(shared.start);
        (&right[..shared.len()], &mut left[exclusive])
    }
}
