//! Counts what passes: the measured side of every statistic.
use std::sync::Arc;

use super::{Incoming, Outgoing, Ticket, Transport, Trouble};
use crate::{Board, Place};

/// Any transport, with every payload byte and message counted once it has passed, and
/// messages numbered, so that a lost one is missed.
#[derive(Debug)]
pub struct Counted<T> {
    inner: T,
    sent: Vec<Counts>,
    received: Vec<Counts>,
}

/// Bytes and messages in one direction. Headers are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Payload bytes.
    pub bytes: u64,
    /// Messages, empty ones included.
    pub messages: u64,
}

impl Counts {
    fn add(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
        self.messages += 1;
    }
}

impl<T: Transport> Counted<T> {
    /// Counts what passes through `inner`.
    pub fn new(inner: T) -> Self {
        let none = vec![Counts::default(); inner.place().world];
        Self {
            inner,
            sent: none.clone(),
            received: none,
        }
    }

    /// What went out, by the rank it went to.
    pub fn sent(&self) -> &[Counts] {
        &self.sent
    }

    /// What came in, by the rank it came from.
    pub fn received(&self) -> &[Counts] {
        &self.received
    }
}

impl<T: Transport> Transport for Counted<T> {
    fn place(&self) -> Place {
        self.inner.place()
    }

    fn board(&self) -> &Arc<Board> {
        self.inner.board()
    }

    fn exchange(
        &mut self,
        ticket: &Ticket,
        send: Option<Outgoing<'_>>,
        recv: Option<Incoming<'_>>,
    ) -> Result<(), Trouble> {
        let out = send.as_ref().map(|send| (send.to, send.bytes.len()));
        let back = recv.as_ref().map(|recv| (recv.from, recv.len));
        let mut ticket = *ticket;
        if let Some((to, _)) = out {
            ticket.fingerprint.message = self.sent[to].messages + 1;
        }
        if let Some((from, _)) = back {
            ticket.expected.message = self.received[from].messages + 1;
        }
        self.inner.exchange(&ticket, send, recv)?;
        if let Some((to, bytes)) = out {
            self.sent[to].add(bytes);
        }
        if let Some((from, bytes)) = back {
            self.received[from].add(bytes);
        }
        Ok(())
    }

    fn split(&mut self, id: u64, members: &[usize]) -> Result<Box<dyn Transport>, Trouble> {
        self.inner.split(id, members)
    }

    fn close(&mut self) {
        self.inner.close();
    }
}

impl Transport for Box<dyn Transport> {
    fn place(&self) -> Place {
        (**self).place()
    }

    fn board(&self) -> &Arc<Board> {
        (**self).board()
    }

    fn exchange(
        &mut self,
        ticket: &Ticket,
        send: Option<Outgoing<'_>>,
        recv: Option<Incoming<'_>>,
    ) -> Result<(), Trouble> {
        (**self).exchange(ticket, send, recv)
    }

    fn split(&mut self, id: u64, members: &[usize]) -> Result<Box<dyn Transport>, Trouble> {
        (**self).split(id, members)
    }

    fn close(&mut self) {
        (**self).close();
    }
}
