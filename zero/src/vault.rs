//! Stage 3: where the parameters are when nobody uses them.
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use collectives::{CommStream, Work};
use ddp::{Buffer, Lender};

use crate::pieces::Pieces;

/// This rank's parts of all buckets of parameters. Lends whole buckets, by gathering.
#[derive(Debug)]
pub(crate) struct Vault {
    pieces: Pieces,
    stream: Arc<CommStream>,
    parts: Mutex<Vec<Buffer>>,
}

impl Vault {
    pub(crate) fn new(pieces: Pieces, stream: Arc<CommStream>, parts: Vec<Buffer>) -> Self {
        Self {
            pieces,
            stream,
            parts: Mutex::new(parts),
        }
    }

    /// Takes the parts out, to be stepped and put back.
    pub(crate) fn take(&self) -> Vec<Buffer> {
        mem::take(&mut self.lock())
    }

    pub(crate) fn put(&self, parts: Vec<Buffer>) {
        *self.lock() = parts;
    }

    /// A copy of the parts.
    pub(crate) fn copy(&self) -> Vec<Buffer> {
        self.lock().clone()
    }

    /// Bytes of the parts.
    pub(crate) fn bytes(&self) -> usize {
        let bytes = |part: &Buffer| part.len() * part.dtype().bytes();
        self.lock().iter().map(bytes).sum()
    }

    // Nothing is half done behind this lock when its holder panics.
    fn lock(&self) -> MutexGuard<'_, Vec<Buffer>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lender for Vault {
    fn lend(&self, bucket: usize) -> ddp::Result<Work<Buffer>> {
        let plan = self.pieces.plan();
        let mut whole = Buffer::zeros(plan.dtype(bucket), plan.gradients_in(bucket));
        let own = self.pieces.part(bucket);
        {
            let parts = self.lock();
            let lost = ddp::Error::State("the parameters are away in a step that failed");
            let part = parts.get(bucket).ok_or(lost)?;
            match (&mut whole, part) {
                (Buffer::F32(whole), Buffer::F32(part)) => whole[own].copy_from_slice(part),
                (Buffer::F64(whole), Buffer::F64(part)) => whole[own].copy_from_slice(part),
                _ => return Err(ddp::Error::State("a bucket has two types")),
            }
        }
        Ok(self.stream.run(move |communicator| {
            // Ranks whose forward passes differ must not mix two buckets of one length.
            let name = bucket as u64;
            match &mut whole {
                Buffer::F32(values) => communicator.all_gather_named(name, values)?,
                Buffer::F64(values) => communicator.all_gather_named(name, values)?,
            }
            Ok(whole)
        }))
    }
}
