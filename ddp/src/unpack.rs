//! From buckets to the gradients that an optimizer takes, and back: views, not copies.
use burn::backend::TensorMetadata;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor, TensorData};

use crate::bucket::BucketPlan;
use crate::buffer::Buffer;
use crate::replica::Replica;

/// One flat tensor on `device`, which takes the buffer's memory over.
pub fn flat(buffer: Buffer, device: &Device) -> Tensor<1> {
    match buffer {
        Buffer::F32(values) => {
            let len = values.len();
            Tensor::from_data(TensorData::new(values, [len]), (device, DType::F32))
        }
        Buffer::F64(values) => {
            let len = values.len();
            Tensor::from_data(TensorData::new(values, [len]), (device, DType::F64))
        }
    }
}

/// The memory of a flat tensor, if nobody else looks at it any more: neither a clone nor a view.
pub fn reclaim(flat: Tensor<1>) -> Option<Buffer> {
    let flat = flat.into_dispatch();
    if !flat.kind.can_mut() {
        return None;
    }
    let data = Tensor::<1>::from_dispatch(flat).into_data();
    match data.dtype() {
        DType::F32 => data.try_into_vec().ok().map(Buffer::F32),
        DType::F64 => data.try_into_vec().ok().map(Buffer::F64),
        _ => None,
    }
}

/// A view of the buckets for each parameter of the `replica` that some rank used.
pub(crate) fn gradients<M: Module>(
    replica: &Replica<M>,
    plan: &BucketPlan,
    used: &[usize],
    flats: &[Tensor<1>],
) -> GradientsParams {
    let mut views = Views {
        replica,
        plan,
        used,
        flats,
        gradients: GradientsParams::new(),
    };
    replica.module().visit(&mut views);
    views.gradients
}

struct Views<'a, M: Module> {
    replica: &'a Replica<M>,
    plan: &'a BucketPlan,
    used: &'a [usize],
    flats: &'a [Tensor<1>],
    gradients: GradientsParams,
}

impl<M: Module> ModuleVisitor for Views<'_, M> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(slot) = self
            .replica
            .slots()
            .find(param.id)
            .filter(|&slot| self.used[slot] > 0)
        else {
            return;
        };
        let (bucket, range) = self.plan.locate(slot);
        let gradient = self.flats[bucket]
            .clone()
            .slice([range])
            .reshape(param.dims());
        self.gradients.register::<D>(param.id, gradient);
    }
}
