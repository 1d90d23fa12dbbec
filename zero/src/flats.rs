//! Stages 1 and 2: whole buckets of parameters, on their way or there.
//!
//! A step ends when its gathers have begun. A parameter is waited for when it is first used, or read in
//! any other way: until then it is one of Burn's uninitialized ones, whose value is made by waiting.
use std::sync::{Mutex, OnceLock, PoisonError};

use burn::tensor::{Device, Tensor};
use collectives::{CommStream, Work};
use ddp::{Buffer, Failure, Float};

use crate::shards::Collect;

/// The buckets of one step.
#[derive(Debug)]
pub(crate) struct Flats {
    buckets: Vec<Flat>,
    device: Device,
    failure: Failure,
}

#[derive(Debug)]
struct Flat {
    dtype: Float,
    len: usize,
    coming: Mutex<Option<Work<Buffer>>>,
    there: OnceLock<Tensor<1>>,
}

impl Flats {
    /// Starts to gather the pieces of all ranks, in the order in which the next forward pass uses them:
    /// of a plan made for the backward pass that is the reverse one. `old` is what they were in before,
    /// to be filled anew.
    pub(crate) fn gather(
        own: &Collect<'_>,
        mut old: Vec<Option<Tensor<1>>>,
        device: Device,
        stream: &CommStream,
        failure: Failure,
    ) -> Self {
        let pieces = own.pieces;
        let plan = pieces.plan();
        old.resize_with(plan.len(), || None);
        let mut buckets = Vec::with_capacity(plan.len());
        for bucket in (0..plan.len()).rev() {
            let (dtype, len) = (plan.dtype(bucket), plan.gradients_in(bucket));
            let fits = |buffer: &Buffer| buffer.dtype() == dtype && buffer.len() == len;
            // Nobody looks at the old values any more, unless the user keeps a clone of the module.
            let room = old[bucket].take().and_then(ddp::reclaim).filter(fits);
            let mut room = room.unwrap_or_else(|| Buffer::zeros(dtype, len));
            own.write(bucket, pieces.part(bucket).start, &mut room);
            let work = stream.run(move |communicator| {
                match &mut room {
                    Buffer::F32(values) => communicator.all_gather_in_place(values)?,
                    Buffer::F64(values) => communicator.all_gather_in_place(values)?,
                }
                Ok(room)
            });
            buckets.push(Flat {
                dtype,
                len,
                coming: Mutex::new(Some(work)),
                there: OnceLock::new(),
            });
        }
        buckets.reverse();
        Self {
            buckets,
            device,
            failure,
        }
    }

    /// A bucket, waited for. Zeros if it could not be had, and the error is told.
    pub(crate) fn wait(&self, bucket: usize) -> Tensor<1> {
        let flat = &self.buckets[bucket];
        let there = flat.there.get_or_init(|| {
            let coming = &mut *flat.coming.lock().unwrap_or_else(PoisonError::into_inner);
            let arrived = match coming.take().map(Work::wait) {
                Some(Ok(arrived)) => arrived,
                lost => {
                    if let Some(Err(error)) = lost {
                        self.failure.tell(error.into());
                    }
                    Buffer::zeros(flat.dtype, flat.len)
                }
            };
            ddp::flat(arrived, &self.device)
        });
        there.clone()
    }

    /// Waits for all of them.
    ///
    /// # Errors
    ///
    /// The first of the failure.
    pub(crate) fn wait_for_all(&self) -> ddp::Result<()> {
        for bucket in 0..self.buckets.len() {
            self.wait(bucket);
        }
        self.failure.told().map_or(Ok(()), Err)
    }

    /// What is there.
    pub(crate) fn into_tensors(self) -> Vec<Option<Tensor<1>>> {
        let there = |flat: Flat| flat.there.into_inner();
        self.buckets.into_iter().map(there).collect()
    }

    /// Bytes of all of them.
    pub(crate) fn bytes(&self) -> usize {
        let bytes = |flat: &Flat| flat.len * flat.dtype.bytes();
        self.buckets.iter().map(bytes).sum()
    }
}
