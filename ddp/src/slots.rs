//! Which parameters a module has: numbered, compared across ranks, and made equal.
use std::any::Any;
use std::collections::HashMap;
use std::fmt::Write;
use std::mem;
use std::ops::Range;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, Reparameterizer};
use burn::tensor::{Bool, DType, Device, Gradients, Int, Tensor, TensorData};
use collectives::Communicator;

use crate::bucket::{Float, SlotSpec};
use crate::hash::fnv1a;
use crate::tap::{Tap, TappedParameter, view};
use crate::{Error, Result, exact, platform};

/// Bytes of a parameter that travel in one broadcast.
const PIECE: usize = 4 << 20;

/// The parameters that require a gradient, numbered in visiting order.
///
/// Parameters without `require_grad` are no slots: frozen ones, and BatchNorm's running state,
/// which Burn presents as a parameter. A parameter that the module holds twice is one slot.
#[derive(Debug, Default)]
pub struct Slots {
    slots: Vec<Slot>,
    by_id: HashMap<ParamId, usize>,
    /// What each float parameter is, in visiting order: a slot, or not trained.
    floats: Vec<Option<usize>>,
    /// One line per parameter of any kind.
    signature: String,
    /// Whether some parameter is held twice.
    pub(crate) tied: bool,
}

#[derive(Debug)]
struct Slot {
    name: String,
    spec: SlotSpec,
    dims: Vec<usize>,
}

impl Slots {
    /// Numbers the parameters of `module`.
    pub(crate) fn number<M: Module>(module: &M) -> Result<Self> {
        let mut visitor = Numbering {
            slots: Self::default(),
            path: Vec::new(),
            failed: None,
        };
        module.visit(&mut visitor);
        match visitor.failed {
            Some(error) => Err(error),
            None => Ok(visitor.slots),
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether nothing is trained.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The size of each.
    pub fn specs(&self) -> Vec<SlotSpec> {
        self.slots.iter().map(|slot| slot.spec).collect()
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.slots.iter().map(|slot| slot.name.clone()).collect()
    }

    /// Path of the parameter.
    ///
    /// # Panics
    ///
    /// If there is no such slot.
    pub fn name(&self, slot: usize) -> &str {
        &self.slots[slot].name
    }

    /// The parameter's axes.
    ///
    /// # Panics
    ///
    /// If there is no such slot.
    pub fn dims(&self, slot: usize) -> &[usize] {
        &self.slots[slot].dims
    }

    /// The slot of a parameter, if it is trained.
    pub fn find(&self, id: ParamId) -> Option<usize> {
        self.by_id.get(&id).copied()
    }

    /// Finds the slots again after a change: a parameter with a new id, as from a loaded record,
    /// takes the slot that was in its place. Fails if one is to be trained that has no slot.
    pub(crate) fn find_again<M: Module>(&mut self, module: &M) -> Result<()> {
        let mut visitor = Found {
            floats: Vec::new(),
            path: Vec::new(),
        };
        module.visit(&mut visitor);
        let same_structure = visitor.floats.len() == self.floats.len();
        for (place, (id, trained, name)) in visitor.floats.into_iter().enumerate() {
            if !trained || self.by_id.contains_key(&id) {
                continue;
            }
            match self.floats.get(place).copied().flatten() {
                Some(slot) if same_structure => {
                    self.by_id.insert(id, slot);
                }
                _ => return Err(Error::NotWrapped { parameter: name }),
            }
        }
        Ok(())
    }

    /// Fails on every rank, with the same error, unless all ranks have this signature, `settings`
    /// and `platform`. The first line of `settings` says whether the platform matters.
    pub(crate) fn verify(
        &self,
        settings: &str,
        platform: &str,
        communicator: &mut Communicator,
    ) -> Result<()> {
        let (first, others) = settings.split_once('\n').unwrap_or((settings, ""));
        let parts = [first, platform, others, &self.signature];
        let lines = parts.iter().flat_map(|part| part.lines());
        let text = lines.collect::<Vec<_>>().join("\n");
        verify_text(text, 1..1 + platform.lines().count(), communicator)
    }
}

/// Fails on every rank, with the same error, unless `text` is the same on all. Some of its lines
/// may be of the platform.
pub(crate) fn verify_text(
    text: String,
    platform: Range<usize>,
    communicator: &mut Communicator,
) -> Result<()> {
    let mut hashes = vec![0; communicator.world_size()];
    communicator.all_gather(&[fnv1a(text.as_bytes())], &mut hashes)?;
    let differs = |rank: &usize| hashes[*rank] != hashes[0];
    let ranks: Vec<usize> = (0..hashes.len()).filter(differs).collect();
    let Some(&first) = ranks.first() else {
        return Ok(());
    };
    let rank = communicator.rank();
    let of = |root| (rank == root).then(|| text.clone());
    let zero: String = communicator.broadcast_object(of(0), 0)?;
    let other = communicator.broadcast_object(of(first), first)?;
    let lines = zero.lines().count().max(other.lines().count());
    let line = |text: &str, at| {
        text.lines()
            .nth(at)
            .unwrap_or("(no such parameter)")
            .to_owned()
    };
    let at = (0..lines)
        .find(|&at| line(&zero, at) != line(&other, at))
        .unwrap_or_default();
    let number = at + 1;
    let (zero, other) = (line(&zero, at), line(&other, at));
    Err(if platform.contains(&at) {
        Error::PlatformMismatch { ranks, zero, other }
    } else {
        Error::ModelMismatch {
            ranks,
            line: number,
            zero,
            other,
        }
    })
}

/// A replica of `module` with rank 0's values in all parameters, frozen ones and buffers too. All
/// ranks must have the same `settings`; where bits must not depend on the world size (`exact`), the
/// same platform too.
///
/// Its leaves are new: replicas of thread ranks must not share any, since their graphs would
/// merge and their backward passes wait for each other. `Module::clone` shares leaves, lazy
/// initialisers, and the running state of BatchNorm; `valid` and `train` rebuild all three, and
/// then each value is read, overwritten by rank 0's, and made a leaf again.
pub(crate) fn replicate<M: Module>(
    module: M,
    settings: &str,
    exact: bool,
    communicator: &mut Communicator,
) -> Result<(M, Slots)> {
    let mut devices = Devices::default();
    module.visit(&mut devices);
    if module.devices().len() > 1 {
        return Err(Error::ManyDevices(module.devices().len()));
    }
    let replica = module.valid().train();
    // From here on a value has one owner, unless the caller keeps a clone.
    drop(module);
    let slots = Slots::number(&replica)?;
    let platform = match exact {
        false => "",
        true => {
            exact::refuse_inexact(&replica)?;
            platform::describe()
        }
    };
    slots.verify(settings, platform, communicator)?;
    let mut broadcast = Broadcast {
        communicator,
        devices: devices.0.into_iter(),
        leaves: HashMap::new(),
        failed: None,
    };
    let replica = replica.map(&mut broadcast);
    match broadcast.failed {
        Some(error) => Err(error),
        None => Ok((replica, slots)),
    }
}

/// Puts `taps`, one per slot, behind the parameters of `module`.
pub(crate) fn tap<M: Module>(module: M, slots: &Slots, taps: &[Tap]) -> M {
    module.apply_reparameterization(Attach { slots, taps })
}

/// Lets each of `taps` deliver the gradient of the leaf that `module` now has, and of no other.
/// Whether all have one: a parameter whose values come late has none before its first use.
pub(crate) fn own<M: Module>(module: &M, slots: &Slots, taps: &[Tap]) -> bool {
    let mut own = Own {
        slots,
        taps,
        all: true,
    };
    module.visit(&mut own);
    own.all
}

struct Own<'a> {
    slots: &'a Slots,
    taps: &'a [Tap],
    all: bool,
}

impl ModuleVisitor for Own<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(slot) = self.slots.find(param.id) {
            match param.is_initialized() {
                true => self.taps[slot].own(param.base()),
                false => self.all = false,
            }
        }
    }
}

/// Gives parameters with the same id the value of the first of them, but for those whose values come
/// late.
pub(crate) fn tie<M: Module>(module: M) -> M {
    module.map(&mut Tie(HashMap::new()))
}

struct Attach<'a> {
    slots: &'a Slots,
    taps: &'a [Tap],
}

impl Reparameterizer for Attach<'_> {
    type Reparam = TappedParameter;

    fn reparameterize<const D: usize>(
        &mut self,
        _: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<TappedParameter>) {
        // Running state is found here too, and Burn ignores what is attached to it.
        let tap = self.slots.find(param.id).map(|slot| TappedParameter {
            tap: self.taps[slot].clone(),
        });
        (param, tap)
    }
}

struct Numbering {
    slots: Slots,
    path: Vec<String>,
    failed: Option<Error>,
}

impl Numbering {
    fn describe(&mut self, dtype: DType, shape: &[usize], role: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(
            self.slots.signature,
            "{} {dtype:?} {shape:?} {role}",
            self.path.join(".")
        );
    }
}

impl ModuleVisitor for Numbering {
    fn enter_module(&mut self, name: &str, container: &str) {
        if container == "Reparameterization" {
            let (parameter, by) = (self.path.join("."), name.to_owned());
            self.failed
                .get_or_insert(Error::Reparameterized { parameter, by });
        }
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (name, dtype, shape) = (self.path.join("."), param.dtype(), param.dims());
        let slot = param.is_require_grad();
        self.describe(dtype, &shape, if slot { "trained" } else { "not trained" });
        let dtype = match dtype {
            DType::F32 => Float::F32,
            DType::F64 => Float::F64,
            other => {
                if slot || matches!(other, DType::QFloat(_)) {
                    let dtype = format!("{other:?}");
                    let parameter = name;
                    let error = Error::UnsupportedDtype { parameter, dtype };
                    self.failed.get_or_insert(error);
                }
                self.slots.floats.push(None);
                return;
            }
        };
        if !slot {
            self.slots.floats.push(None);
            return;
        }
        if let Some(slot) = self.slots.find(param.id) {
            self.slots.floats.push(Some(slot));
            self.slots.tied = true;
            return;
        }
        self.slots.floats.push(Some(self.slots.slots.len()));
        self.slots.by_id.insert(param.id, self.slots.slots.len());
        let spec = SlotSpec {
            len: shape.iter().product(),
            dtype,
        };
        let dims = shape.to_vec();
        self.slots.slots.push(Slot { name, spec, dims });
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.describe(param.dtype(), &param.dims(), "not trained");
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.describe(param.dtype(), &param.dims(), "not trained");
    }
}

/// Float parameters in visiting order: their ids, whether they are trained, their paths.
struct Found {
    floats: Vec<(ParamId, bool, String)>,
    path: Vec<String>,
}

impl ModuleVisitor for Found {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let name = self.path.join(".");
        self.floats.push((param.id, param.is_require_grad(), name));
    }
}

/// Devices of the float parameters in visiting order, with their autodiff settings.
#[derive(Default)]
struct Devices(Vec<Device>);

impl ModuleVisitor for Devices {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let device = param.lazy_device();
        self.0.push(if device.is_autodiff() {
            device
        } else {
            device.autodiff()
        });
    }
}

struct Broadcast<'a> {
    communicator: &'a mut Communicator,
    devices: std::vec::IntoIter<Device>,
    /// Leaves already made, for parameters that the module holds twice.
    leaves: HashMap<ParamId, Box<dyn Any>>,
    failed: Option<Error>,
}

impl Broadcast<'_> {
    /// Overwrites `data` with rank 0's.
    fn overwrite(&mut self, data: &mut TensorData) {
        if self.failed.is_some() {
            return;
        }
        let sent = TensorData::with_bytes_mut([data], |mut bytes| {
            let mut pieces = bytes[0].chunks_mut(PIECE);
            pieces.try_for_each(|piece| self.communicator.broadcast(piece, 0))
        });
        if let Err(error) = sent {
            self.failed = Some(error.into());
        }
    }
}

impl ModuleMapper for Broadcast<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let device = self.devices.next().unwrap_or_else(|| param.device());
        let (id, tensor, mapper) = param.consume();
        let (dtype, trained) = (tensor.dtype(), tensor.is_require_grad());
        let made = self
            .leaves
            .get(&id)
            .and_then(|leaf| leaf.downcast_ref::<Tensor<D>>())
            .cloned();
        let leaf = made.unwrap_or_else(|| {
            let mut data = tensor.inner().into_data();
            self.overwrite(&mut data);
            Tensor::from_data(data, (&device, dtype)).set_require_grad(trained)
        });
        self.leaves.insert(id, Box::new(leaf.clone()));
        Param::from_mapped_value(id, leaf, mapper)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        param.map(|tensor| {
            let (device, dtype) = (tensor.device(), tensor.dtype());
            let mut data = tensor.into_data();
            self.overwrite(&mut data);
            Tensor::from_data(data, (&device, dtype))
        })
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        param.map(|tensor| {
            let (device, dtype) = (tensor.device(), tensor.dtype());
            let mut data = tensor.into_data();
            self.overwrite(&mut data);
            Tensor::from_data(data, (&device, dtype))
        })
    }
}

struct Tie(HashMap<ParamId, Box<dyn Any>>);

impl ModuleMapper for Tie {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !param.is_initialized() || !param.is_require_grad() {
            return param;
        }
        match self
            .0
            .get(&param.id)
            .and_then(|value| value.downcast_ref::<Tensor<D>>())
        {
            Some(first) => param.map(|_| first.clone()),
            None => {
                self.0.insert(param.id, Box::new(param.base()));
                param
            }
        }
    }
}

/// Visits the gradients that lie on the leaves of `module` after a backward pass.
pub(crate) fn leaf_gradients<M: Module>(
    module: &M,
    slots: &Slots,
    gradients: &Gradients,
    take: impl FnMut(usize, crate::buffer::Gradient<'_>) -> Result<()>,
) -> Result<()> {
    let mut visitor = Leaves {
        slots,
        gradients,
        seen: vec![false; slots.len()],
        take,
        result: Ok(()),
    };
    module.visit(&mut visitor);
    visitor.result
}

struct Leaves<'a, F> {
    slots: &'a Slots,
    gradients: &'a Gradients,
    seen: Vec<bool>,
    take: F,
    result: Result<()>,
}

impl<F: FnMut(usize, crate::buffer::Gradient<'_>) -> Result<()>> ModuleVisitor for Leaves<'_, F> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(slot) = self.slots.find(param.id)
            && !mem::replace(&mut self.seen[slot], true)
            && self.result.is_ok()
            && param.is_initialized()
            && param.is_require_grad()
            && let Some(gradient) = param.base().grad(self.gradients)
        {
            let data = gradient.into_data();
            self.result = view(&data).and_then(|gradient| (self.take)(slot, gradient));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use collectives::{CommunicatorConfig, launch};

    /// What each rank is told, given the platform of each.
    fn verified(platforms: [&str; 3]) -> Vec<Result<()>> {
        let outcomes = launch::spawn(3, &CommunicatorConfig::new(), |mut communicator| {
            let platform = platforms[communicator.rank()];
            let outcome = Slots::default().verify("comm_hook: A", platform, &mut communicator);
            Ok::<_, Error>(outcome)
        });
        outcomes.unwrap()
    }

    #[test]
    fn another_program_or_processor_is_told_to_every_rank_and_named() {
        let same = "program: 1\nprocessor: x";
        assert_eq!(verified([same; 3]), [Ok(()), Ok(()), Ok(())]);
        let mismatch = |zero: &str, other: &str| {
            Err(Error::PlatformMismatch {
                ranks: vec![1],
                zero: zero.into(),
                other: other.into(),
            })
        };
        let program = mismatch("program: 1", "program: 2");
        let found = verified([same, "program: 2\nprocessor: x", same]);
        assert_eq!(found, [program.clone(), program.clone(), program]);
        let processor = mismatch("processor: x", "processor: y");
        let found = verified([same, "program: 1\nprocessor: y", same]);
        assert_eq!(found, [processor.clone(), processor.clone(), processor]);
    }

    #[test]
    fn a_process_describes_itself_alike_every_time() {
        let lines: Vec<&str> = platform::describe().lines().collect();
        assert_eq!(lines.len(), 2);
        let hash = lines[0].strip_prefix("program: ").unwrap();
        assert!(u64::from_str_radix(hash, 16).is_ok(), "{hash}");
        assert!(lines[1].starts_with("processor: "));
    }
}
