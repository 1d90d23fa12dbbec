//! Where plans meet bytes: runs a [`Schedule`](crate::Schedule) over a [`Transport`].
use std::ops::Range;

use crate::{
    Element, ReduceOp,
    schedule::{Step, Then},
    transport::{Incoming, Outgoing, Ticket, Transport, Trouble},
};

/// Runs `plan` on `buffer`, in order, in messages of the ticket's segment size.
pub(crate) fn run<T: Element>(
    plan: &[Step],
    buffer: &mut [T],
    op: ReduceOp,
    ticket: &Ticket,
    link: &mut dyn Transport,
) -> Result<(), Trouble> {
    let segment = ticket.fingerprint.segment;
    plan.iter()
        .flat_map(|step| step.segments(segment))
        .try_for_each(|step| exchange(&step, buffer, op, ticket, link))
}

/// Sends `buffer` to the rank `to`, in messages of the ticket's segment size.
pub(crate) fn send<T: Element>(
    to: usize,
    buffer: &[T],
    ticket: &Ticket,
    link: &mut dyn Transport,
) -> Result<(), Trouble> {
    Step::send(to, 0..buffer.len())
        .segments(ticket.fingerprint.segment)
        .filter_map(|step| step.send)
        .try_for_each(|send| {
            let bytes = bytemuck::cast_slice(&buffer[send.range]);
            link.exchange(ticket, Some(Outgoing { to, bytes }), None)
        })
}

fn exchange<T: Element>(
    step: &Step,
    buffer: &mut [T],
    op: ReduceOp,
    ticket: &Ticket,
    link: &mut dyn Transport,
) -> Result<(), Trouble> {
    let leaves = step.send.as_ref().map_or(0..0, |send| send.range.clone());
    let lands = step.recv.as_ref().map_or(0..0, |recv| recv.range.clone());
    let (leaving, landing) = disjoint(buffer, leaves, lands);
    let send = step.send.as_ref().map(|send| Outgoing {
        to: send.to,
        bytes: bytemuck::cast_slice(leaving),
    });
    let Some(recv) = &step.recv else {
        return link.exchange(ticket, send, None);
    };
    let len = size_of_val(landing);
    let mut land = |bytes: &[u8]| {
        let arrived: &[T] = bytemuck::cast_slice(bytes);
        match recv.then {
            Then::Replace => landing.copy_from_slice(arrived),
            Then::Reduce => T::fold(op, landing, arrived),
        }
    };
    let recv = Incoming {
        from: recv.from,
        len,
        land: &mut land,
    };
    link.exchange(ticket, send, Some(recv))
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
