//! From a module to this rank's pieces of it, and back.
//!
//! A module of pieces is the user's own, with its ids and paths, so that parameter groups and
//! learning rates fall where they always did. Only its trained parameters are other tensors: of D
//! axes still, the first as long as the piece, the others 1.
use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, ParamMapper, Parameter};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor, TensorData};
use ddp::{Buffer, Float, Slots};

use crate::flats::Flats;
use crate::pieces::{Piece, Pieces};

/// The gradients of a module of pieces: views of the parts of the buckets.
pub(crate) struct Gradients<'a> {
    pub(crate) slots: &'a Slots,
    pub(crate) pieces: &'a Pieces,
    pub(crate) used: &'a [usize],
    /// Per bucket a flat tensor, and where in it this rank's part begins.
    pub(crate) parts: &'a [(Tensor<1>, usize)],
    pub(crate) gradients: GradientsParams,
}

impl ModuleVisitor for Gradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let used = |slot: &usize| self.used[*slot] > 0;
        let Some(slot) = self.slots.find(param.id).filter(used) else {
            return;
        };
        let piece = self.pieces.of(slot);
        // Without a gradient the optimizer keeps no state, and of an empty piece there is none.
        if piece.len() == 0 {
            return;
        }
        let (part, start) = &self.parts[piece.bucket];
        let range = piece.in_part.start + start..piece.in_part.end + start;
        let gradient = part.clone().slice([range]);
        self.gradients
            .register::<D>(param.id, gradient.reshape(thin::<D>(piece.len())));
    }
}

/// The axes of a piece.
fn thin<const D: usize>(len: usize) -> [usize; D] {
    let mut shape = [1; D];
    shape[0] = len;
    shape
}

/// Puts this rank's piece where a parameter was.
pub(crate) struct Cut<'a> {
    pub(crate) slots: &'a Slots,
    pub(crate) pieces: &'a Pieces,
    /// This rank's part of every bucket of parameters, if the module holds placeholders.
    pub(crate) parts: Option<&'a [Tensor<1>]>,
}

impl ModuleMapper for Cut<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(slot) = self.slots.find(param.id) else {
            return param;
        };
        let Piece {
            bucket,
            in_part,
            in_slot,
        } = self.pieces.of(slot);
        param.map(|whole| {
            let trained = whole.is_require_grad();
            let len = whole.dims().iter().product::<usize>();
            let piece: Tensor<D> = match in_slot.len() {
                0 => nothing(&whole),
                held => {
                    let flat = match self.parts {
                        None => whole.inner().reshape([len]).slice([in_slot]),
                        Some(parts) => parts[bucket].clone().slice([in_part]),
                    };
                    flat.reshape(thin::<D>(held))
                }
            };
            Tensor::from_inner(piece).set_require_grad(trained)
        })
    }
}

/// One element that stands for none, without autodiff.
fn nothing<const D: usize>(like: &Tensor<D>) -> Tensor<D> {
    let device = like.device().without_autodiff();
    Tensor::zeros([1; D], (&device, like.dtype()))
}

/// Takes the pieces out of a module, into the part of each bucket.
pub(crate) struct Collect<'a> {
    pub(crate) slots: &'a Slots,
    pub(crate) pieces: &'a Pieces,
    /// Per slot its piece, once it has been met.
    pub(crate) values: Vec<Option<TensorData>>,
}

impl ModuleMapper for Collect<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(slot) = self.slots.find(param.id) else {
            return param;
        };
        let empty = self.pieces.of(slot).len() == 0;
        let found = &mut self.values[slot];
        param.map(|piece| {
            let trained = piece.is_require_grad();
            let rest = Tensor::from_inner(nothing(&piece)).set_require_grad(trained);
            // An optimizer updates only the first of two parameters with one id.
            if !empty && found.is_none() {
                *found = Some(piece.inner().into_data());
            }
            rest
        })
    }
}

impl<'a> Collect<'a> {
    pub(crate) fn new(slots: &'a Slots, pieces: &'a Pieces) -> Self {
        Self {
            slots,
            pieces,
            values: vec![None; slots.len()],
        }
    }

    /// Puts a piece in its place, given its bytes.
    pub(crate) fn take_in(&mut self, slot: usize, bytes: Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        let dtype = match self.slots.specs()[slot].dtype {
            Float::F32 => DType::F32,
            Float::F64 => DType::F64,
        };
        let len = bytes.len() / dtype.size();
        self.values[slot] = Some(TensorData::from_bytes_vec(bytes, [len], dtype));
    }

    /// This rank's part of every bucket.
    pub(crate) fn parts(&self) -> Vec<Buffer> {
        let plan = self.pieces.plan();
        let part = |bucket| {
            let mut part = Buffer::zeros(plan.dtype(bucket), self.pieces.part(bucket).len());
            self.write(bucket, 0, &mut part);
            part
        };
        (0..plan.len()).map(part).collect()
    }

    /// Writes the pieces that lie in `bucket` to `buffer`, in which this rank's part begins at
    /// `start`.
    pub(crate) fn write(&self, bucket: usize, start: usize, buffer: &mut Buffer) {
        for &slot in self.pieces.plan().slots_in(bucket) {
            let Some(data) = &self.values[slot] else {
                continue;
            };
            let Piece { in_part, .. } = self.pieces.of(slot);
            let range = in_part.start + start..in_part.end + start;
            match buffer {
                Buffer::F32(values) => {
                    values[range].copy_from_slice(data.as_slice().unwrap_or(&[]))
                }
                Buffer::F64(values) => {
                    values[range].copy_from_slice(data.as_slice().unwrap_or(&[]))
                }
            }
        }
    }
}

/// Makes whole parameters again: views of the buckets, each waited for when it is first looked at.
pub(crate) struct Fill<'a> {
    slots: &'a Slots,
    pieces: &'a Pieces,
    flats: &'a Arc<Flats>,
    device: &'a Device,
    /// Parameters made already, for those that the module holds twice.
    made: HashMap<ParamId, Box<dyn Any>>,
}

impl<'a> Fill<'a> {
    pub(crate) fn new(
        slots: &'a Slots,
        pieces: &'a Pieces,
        flats: &'a Arc<Flats>,
        device: &'a Device,
    ) -> Self {
        Self {
            slots,
            pieces,
            flats,
            device,
            made: HashMap::new(),
        }
    }
}

impl ModuleMapper for Fill<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(slot) = self.slots.find(param.id) else {
            return param;
        };
        let (bucket, range) = self.pieces.plan().locate(slot);
        let dims: Result<[usize; D], _> = self.slots.dims(slot).try_into();
        let Ok(dims) = dims else {
            return param;
        };
        let trained = param.is_require_grad();
        // Whether it would be trained after `valid` and `train`.
        let active = param.valid().train().is_require_grad();
        let (id, _, mapper) = param.consume();
        let flats = self.flats.clone();
        let view = move || flats.wait(bucket).slice([range]).reshape(dims);
        // Burn offers no way to hand such things to a parameter that has no value yet.
        let plain = format!("{mapper:?}") == format!("{:?}", ParamMapper::<Tensor<D>>::default());
        if !plain || active != trained {
            // A leaf of its own, whatever it was cut from.
            let whole = view().detach().set_require_grad(trained);
            return Param::from_mapped_value(id, whole, mapper);
        }
        let made = self.made.get(&id);
        if let Some(first) = made.and_then(|first| first.downcast_ref::<Param<Tensor<D>>>()) {
            return first.clone();
        }
        let late = move |device: &Device, trained: bool| {
            let whole = view().load_to_device(device);
            whole.detach().set_require_grad(trained)
        };
        let param = Param::uninitialized(id, late, self.device.clone(), trained, dims.into());
        self.made.insert(id, Box::new(param.clone()));
        param
    }
}

/// Puts placeholders where parameters were: of the same shapes, one element in memory.
pub(crate) struct Empty<'a> {
    pub(crate) slots: &'a Slots,
    pub(crate) device: &'a Device,
}

impl ModuleMapper for Empty<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(slot) = self.slots.find(param.id) else {
            return param;
        };
        let dims: Result<[usize; D], _> = self.slots.dims(slot).try_into();
        let Ok(dims) = dims else {
            return param;
        };
        param.map(|value| {
            let device = (self.device, value.dtype());
            let placeholder = match dims.contains(&0) {
                true => Tensor::zeros(dims, device),
                false => Tensor::<D>::zeros([1; D], device).expand(dims),
            };
            placeholder
                .detach()
                .set_require_grad(value.is_require_grad())
        })
    }
}

/// The ids of the slots' parameters.
pub(crate) fn ids<M: Module>(module: &M, slots: &Slots) -> Vec<Option<u64>> {
    struct Ids<'a>(&'a Slots, Vec<Option<u64>>);
    impl ModuleVisitor for Ids<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(slot) = self.0.find(param.id) {
                self.1[slot] = Some(param.id.val());
            }
        }
    }
    let mut ids = Ids(slots, vec![None; slots.len()]);
    module.visit(&mut ids);
    ids.1
}

/// The device of the trained parameters, with its autodiff settings.
pub(crate) fn device<M: Module>(module: &M, slots: &Slots) -> Device {
    struct Find<'a>(&'a Slots, Option<Device>);
    impl ModuleVisitor for Find<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if self.0.find(param.id).is_some() && self.1.is_none() {
                self.1 = Some(param.lazy_device());
            }
        }
    }
    let mut found = Find(slots, None);
    module.visit(&mut found);
    found.1.unwrap_or_default()
}
