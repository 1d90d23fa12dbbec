//! Checkpoints: one file of whole parameters and whole state, whoever held which piece of them.
//!
//! A safetensors file, so that Python reads it too: `model.{path}` is a parameter, trained or not, and
//! `optimizer.{path}.{field}` what the optimizer keeps of one, in the parameter's shape; numbers of its
//! state (the step of Adam, say) lie in the file's metadata under such names, as JSON. Rank 0 writes it,
//! a tensor at a time. Each rank reads what it needs, so that a file fits every world size and stage.
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bool, BoolStore, DType, Device, Int, Tensor, TensorData};
use burn_pack::{Bytes, Scalar, Writer};
use collectives::CommStream;
use ddp::{Float, Slots};
use safetensors::tensor::{Dtype, Metadata, View};
use serde::{Deserialize, Serialize};

use crate::pieces::Pieces;
use crate::trial::Kept;
use crate::{Error, Result, state};

/// A tensor whose pieces lie on all ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Column {
    slot: usize,
    is_f64: bool,
}

impl Column {
    fn size(&self) -> usize {
        if self.is_f64 { 8 } else { 4 }
    }

    fn dtype(&self) -> Dtype {
        if self.is_f64 { Dtype::F64 } else { Dtype::F32 }
    }
}

/// What one rank has of a checkpoint.
#[derive(Default)]
pub(crate) struct Own {
    columns: BTreeMap<String, Column>,
    /// This rank's piece of each column, as bytes.
    pieces: HashMap<String, Vec<u8>>,
    /// Numbers of the optimizer's state.
    scalars: BTreeMap<String, String>,
    /// Parameters that are not trained, by name: every rank has them.
    untrained: BTreeMap<String, TensorData>,
}

/// Announces that there is no further column.
const END: u64 = u64::MAX;

impl Own {
    /// `parameters` has this rank's piece of each slot.
    pub(crate) fn new<M: Module>(
        module: &M,
        slots: &Slots,
        parameters: Vec<Option<TensorData>>,
        optimizer: &ModuleOptimizer,
    ) -> Result<Self> {
        let mut own = Self::default();
        let specs = slots.specs();
        for (slot, piece) in parameters.into_iter().enumerate() {
            let name = format!("model.{}", slots.name(slot));
            let is_f64 = specs[slot].dtype == Float::F64;
            own.columns.insert(name.clone(), Column { slot, is_f64 });
            let bytes = piece.map_or_else(Vec::new, |piece| piece.as_bytes().to_vec());
            own.pieces.insert(name, bytes);
        }
        for (id, state) in state::of(optimizer)? {
            let Some(slot) = slots.find(id.into()) else {
                continue;
            };
            let name = |field: &str| format!("optimizer.{}.{field}", slots.name(slot));
            for (field, (dtype, bytes)) in state.tensors {
                let is_f64 = dtype == DType::F64;
                own.columns.insert(name(&field), Column { slot, is_f64 });
                own.pieces.insert(name(&field), bytes.to_vec());
            }
            for (field, scalar) in state.scalars {
                let json = serde_json::to_string(&scalar).map_err(|error| record(&error))?;
                own.scalars.insert(name(&field), json);
            }
        }
        let mut visitor = Untrained {
            slots,
            path: Vec::new(),
            found: BTreeMap::new(),
        };
        module.visit(&mut visitor);
        own.untrained = visitor.found;
        Ok(own)
    }

    /// Writes the file, on rank 0; the other ranks give their pieces.
    pub(crate) fn save(
        mut self,
        path: &Path,
        slots: &Slots,
        pieces: &Pieces,
        stream: &CommStream,
    ) -> Result<()> {
        same_path(path, stream)?;
        // A rank without a piece of a parameter has no state of it, and does not know its fields.
        let known = (self.columns.clone(), self.scalars.clone());
        let known = stream.run(move |communicator| communicator.all_gather_object(&known));
        for (columns, scalars) in known.wait()? {
            self.columns.extend(columns);
            self.scalars.extend(scalars);
        }
        let names: Vec<&String> = self.columns.keys().collect();
        let gather = |at: usize| -> collectives::Result<Vec<u8>> {
            let column = &self.columns[names[at]];
            let count = |rank| pieces.of_rank(rank, column.slot).len() * column.size();
            let counts: Vec<usize> = (0..pieces.place().world).map(count).collect();
            let piece = self.pieces.get(names[at]).cloned().unwrap_or_default();
            let gathered = stream.run(move |communicator| {
                let len = match communicator.rank() {
                    0 => counts.iter().sum(),
                    _ => 0,
                };
                let mut whole = vec![0u8; len];
                communicator.gather_v(&piece, &counts, &mut whole, 0)?;
                Ok(whole)
            });
            gathered.wait()
        };
        // Rank 0 says which column is next: in which order a file is written is its own affair.
        let announce = |at: u64| stream.broadcast(vec![at], 0).wait().map(|at| at[0]);
        let written = if pieces.place().rank == 0 {
            let failed = RefCell::new(None);
            let fetch = |at: usize| {
                let fetched = announce(at as u64).and_then(|_| gather(at));
                fetched.map_err(|error| {
                    failed.borrow_mut().get_or_insert(error);
                })
            };
            let column = |(at, (name, column)): (usize, (&String, &Column))| Entry {
                name: name.clone(),
                dtype: column.dtype(),
                dims: slots.dims(column.slot).to_vec(),
                source: Source::Pieces(at, &fetch),
            };
            let entries = self.columns.iter().enumerate().map(column);
            let mut entries: Vec<(String, Entry<'_>)> =
                entries.map(|entry| (entry.name.clone(), entry)).collect();
            for (name, data) in &self.untrained {
                let Some(dtype) = dtype_of(data.dtype()) else {
                    continue;
                };
                let entry = Entry {
                    name: name.clone(),
                    dtype,
                    dims: data.shape().to_vec(),
                    source: Source::Here(data.as_bytes()),
                };
                entries.push((name.clone(), entry));
            }
            let scalars = self.scalars.clone().into_iter().collect();
            let aside = beside(path);
            // The writer makes files for their owner alone; what others may do is as for any new file.
            let readable = File::create(&aside)
                .and_then(|file| file.metadata())
                .map(|data| data.permissions());
            let written = safetensors::serialize_to_file(entries, Some(scalars), &aside)
                .map_err(|error| error.to_string());
            // What is only partly there must not take the place of what was there before.
            let failed = failed.take();
            if failed.is_some() || written.is_err() {
                drop(fs::remove_file(&aside));
            }
            if let Some(error) = failed {
                return Err(error.into());
            }
            let written = written.and_then(|()| {
                let opened = readable.and_then(|rights| fs::set_permissions(&aside, rights));
                opened.map_err(|error| error.to_string())?;
                fs::rename(&aside, path).map_err(|error| {
                    drop(fs::remove_file(&aside));
                    error.to_string()
                })
            });
            announce(END)?;
            written
        } else {
            loop {
                match announce(END)? {
                    END => break Ok(()),
                    at => drop(gather(at as usize)?),
                }
            }
        };
        agree(path, written, stream).map(drop)
    }
}

/// Where a file is written before it takes the place of `path`.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".part");
    path.with_file_name(name)
}

/// All ranks mean one file: two would be told apart only by what becomes of the training.
fn same_path(path: &Path, stream: &CommStream) -> Result<()> {
    let own = path.display().to_string();
    let all = stream.run(move |communicator| communicator.all_gather_object(&own));
    let all = all.wait()?;
    match all.iter().position(|other| *other != all[0]) {
        None => Ok(()),
        Some(rank) => {
            let what = format!("it names {}, and rank 0 this one", all[rank]);
            Err(checkpoint(Path::new(&all[0]), rank, what))
        }
    }
}

/// Every rank learns of the first rank's error.
fn agree<R>(path: &Path, own: Result<R, String>, stream: &CommStream) -> Result<R> {
    let said = own.as_ref().err().cloned();
    let all = stream.run(move |communicator| communicator.all_gather_object(&said));
    let mut errors = all.wait()?.into_iter().enumerate();
    let first = errors.find_map(|(rank, error)| error.map(|what| (rank, what)));
    match (first, own) {
        (None, Ok(value)) => Ok(value),
        (Some((rank, what)), _) => Err(checkpoint(path, rank, what)),
        (None, Err(what)) => Err(checkpoint(path, 0, what)),
    }
}

fn checkpoint(path: &Path, rank: usize, what: String) -> Error {
    Error::Checkpoint {
        path: path.display().to_string(),
        rank,
        what,
    }
}

fn record(error: &dyn std::fmt::Display) -> Error {
    Error::Record(error.to_string())
}

/// A tensor on its way into the file.
struct Entry<'a> {
    name: String,
    dtype: Dtype,
    dims: Vec<usize>,
    source: Source<'a>,
}

enum Source<'a> {
    /// The number of its column, and who gets it.
    Pieces(usize, &'a dyn Fn(usize) -> Result<Vec<u8>, ()>),
    Here(&'a [u8]),
}

impl View for Entry<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.dims
    }

    fn data(&self) -> Cow<'_, [u8]> {
        match self.source {
            Source::Here(bytes) => bytes.into(),
            // After an error the file is thrown away, and its lengths must still be right.
            Source::Pieces(at, fetch) => fetch(at).unwrap_or(vec![0; self.data_len()]).into(),
        }
    }

    fn data_len(&self) -> usize {
        self.dims.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

/// A file that has been found to fit the module.
pub(crate) struct Saved {
    file: File,
    metadata: Metadata,
    /// Where the tensors begin.
    start: u64,
}

impl Saved {
    /// Opens `path` and compares it with what is to be trained; all ranks do, and agree.
    pub(crate) fn open<M: Module>(
        path: &Path,
        module: &M,
        slots: &Slots,
        kept: &[Kept],
        stream: &CommStream,
    ) -> Result<Self> {
        same_path(path, stream)?;
        let own = Self::read(path).and_then(|saved| {
            let specs = slots.specs();
            for (slot, spec) in specs.iter().enumerate() {
                let is_f64 = spec.dtype == Float::F64;
                let dtype = Column { slot, is_f64 }.dtype();
                saved.fits(slots.name(slot), dtype, slots.dims(slot))?;
            }
            saved.state_can_be_restored()?;
            for (slot, kept) in kept.iter().enumerate() {
                saved.is_of_such_an_optimizer(slot, slots, kept)?;
            }
            let mut untrained = Untrained {
                slots,
                path: Vec::new(),
                found: BTreeMap::new(),
            };
            module.visit(&mut untrained);
            for (name, data) in &untrained.found {
                if let Some(dtype) = dtype_of(data.dtype()) {
                    let path = name.trim_start_matches("model.");
                    saved.fits(path, dtype, data.shape())?;
                }
            }
            saved.has_nothing_else(slots, &untrained.found)?;
            Ok(saved)
        });
        agree(path, own, stream)
    }

    fn read(path: &Path) -> Result<Self, String> {
        let io = |error: io::Error| error.to_string();
        let mut file = File::open(path).map_err(io)?;
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(io)?;
        let (header, all) = (
            u64::from_le_bytes(length),
            file.metadata().map_err(io)?.len(),
        );
        let cut_off = || "it is no safetensors file, or cut off".to_owned();
        if header > all {
            return Err(cut_off());
        }
        let mut bytes = vec![0; header as usize];
        file.read_exact(&mut bytes).map_err(io)?;
        let metadata: Metadata = serde_json::from_slice(&bytes).map_err(|_| cut_off())?;
        let start = 8 + header;
        if start + metadata.data_len() as u64 != all {
            return Err(cut_off());
        }
        Ok(Self {
            file,
            metadata,
            start,
        })
    }

    fn fits(&self, path: &str, dtype: Dtype, dims: &[usize]) -> Result<(), String> {
        let found = self.metadata.info(&format!("model.{path}"));
        match found {
            None => Err(format!("there is no parameter {path} in it")),
            Some(info) if info.dtype == dtype && info.shape == dims => Ok(()),
            Some(info) => Err(format!(
                "parameter {path} is {:?} {:?} in it, and {dtype:?} {dims:?} in the module",
                info.dtype, info.shape
            )),
        }
    }

    /// Whether what was kept of a parameter, if anything, is what the optimizer here keeps of it.
    fn is_of_such_an_optimizer(
        &self,
        slot: usize,
        slots: &Slots,
        kept: &Kept,
    ) -> Result<(), String> {
        let path = slots.name(slot);
        let prefix = format!("optimizer.{path}.");
        let tensors = self.metadata.offset_keys();
        let numbers = self
            .metadata
            .metadata()
            .iter()
            .flatten()
            .map(|(name, _)| name);
        let names = tensors.iter().chain(numbers);
        let saved = names.filter_map(|name| name.strip_prefix(&prefix));
        let saved: BTreeSet<String> = saved.map(str::to_owned).collect();
        if saved.is_empty() || saved == kept.names {
            return self.state_is_whole(&prefix, slots.dims(slot));
        }
        let list = |names: &BTreeSet<String>| match names.is_empty() {
            true => "nothing".to_owned(),
            false => Vec::from_iter(names.iter().map(String::as_str)).join(", "),
        };
        Err(format!(
            "it is of another optimizer: of parameter {path} that one kept {}, and this one keeps {}",
            list(&saved),
            list(&kept.names)
        ))
    }

    /// Whether what lies under `prefix` is of the shape of its parameter. Burn panics at a number that
    /// says otherwise.
    fn state_is_whole(&self, prefix: &str, dims: &[usize]) -> Result<(), String> {
        for name in self
            .metadata
            .offset_keys()
            .iter()
            .filter(|name| name.starts_with(prefix))
        {
            if let Some(info) = self.metadata.info(name) {
                let is_real = matches!(info.dtype, Dtype::F32 | Dtype::F64);
                if !is_real || info.shape != dims {
                    let found = format!("{:?} {:?}", info.dtype, info.shape);
                    return Err(format!(
                        "{name} is {found}, and should be F32 or F64 {dims:?}"
                    ));
                }
            }
        }
        for (name, json) in self.metadata.metadata().iter().flatten() {
            if name.starts_with(prefix) {
                let number: Result<Scalar, _> = serde_json::from_str(json);
                let count = number.ok().and_then(|number| match number {
                    Scalar::Int(number) => u64::try_from(number).ok(),
                    Scalar::UInt(number) => Some(number),
                    Scalar::Float(_) | Scalar::Bool(_) => None,
                });
                let is_rank = name.ends_with("__rank");
                if count.is_none() || (is_rank && count != Some(dims.len() as u64)) {
                    return Err(format!("{name} is {json}, which no optimizer keeps"));
                }
            }
        }
        Ok(())
    }

    /// Whether all of the file has its place here.
    fn has_nothing_else(
        &self,
        slots: &Slots,
        untrained: &BTreeMap<String, TensorData>,
    ) -> Result<(), String> {
        let paths: BTreeSet<&str> = (0..slots.len()).map(|slot| slots.name(slot)).collect();
        let is_known = |name: &str| {
            let parameter = name.strip_prefix("model.").map(|path| paths.contains(path));
            let state = name.strip_prefix("optimizer.").map(|state| {
                let is_end = |(at, _): &(usize, _)| paths.contains(&state[..*at]);
                state.match_indices('.').any(|end| is_end(&end))
            });
            untrained.contains_key(name) || parameter == Some(true) || state == Some(true)
        };
        match self
            .metadata
            .offset_keys()
            .iter()
            .find(|name| !is_known(name))
        {
            None => Ok(()),
            Some(name) => Err(format!(
                "it has {name}, for which there is no place in the module"
            )),
        }
    }

    /// Burn 0.22.1 makes state anew in the device's default type, whatever it is saved in: moments of
    /// f64 would come back in f32, rounded, and the next step would panic.
    fn state_can_be_restored(&self) -> Result<(), String> {
        if DType::from(Device::default().settings().float_dtype) == DType::F64 {
            return Ok(());
        }
        let names = self.metadata.offset_keys();
        let is_f64 = |name: &&String| {
            let info = self.metadata.info(name);
            name.starts_with("optimizer.") && info.is_some_and(|info| info.dtype == Dtype::F64)
        };
        match names.iter().find(is_f64) {
            None => Ok(()),
            Some(name) => Err(format!(
                "{name} is F64, and Burn restores an optimizer's state in the default type of the \
                 device, F32; configure the device with F64 before it is used"
            )),
        }
    }

    /// Bytes of a tensor, all or some of them.
    fn bytes(&mut self, name: &str, part: Option<std::ops::Range<usize>>) -> io::Result<Vec<u8>> {
        let info = self.metadata.info(name).ok_or(io::ErrorKind::NotFound)?;
        let (start, end) = info.data_offsets;
        let part = part.unwrap_or(0..end - start);
        self.file
            .seek(SeekFrom::Start(self.start + (start + part.start) as u64))?;
        let mut bytes = vec![0; part.len()];
        self.file.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// This rank's piece of a slot's parameter.
    pub(crate) fn piece(
        &mut self,
        slot: usize,
        slots: &Slots,
        pieces: &Pieces,
    ) -> io::Result<Vec<u8>> {
        let size = slots.specs()[slot].dtype.bytes();
        let piece = pieces.of(slot).in_slot;
        let part = piece.start * size..piece.end * size;
        self.bytes(&format!("model.{}", slots.name(slot)), Some(part))
    }

    /// The optimizer with this rank's part of the saved state; `ids` are those of the slots here.
    pub(crate) fn optimizer(
        &mut self,
        optimizer: &ModuleOptimizer,
        slots: &Slots,
        pieces: &Pieces,
        ids: &[Option<u64>],
    ) -> Result<ModuleOptimizer, String> {
        let (mut tensors, mut scalars, mut paths) = (Vec::new(), Vec::new(), Vec::new());
        let names = self.metadata.offset_keys();
        let saved: HashMap<String, String> = self.metadata.metadata().clone().unwrap_or_default();
        for (slot, id) in ids.iter().enumerate() {
            let piece = pieces.of(slot);
            let Some(id) = id.filter(|_| piece.len() > 0) else {
                continue;
            };
            let prefix = format!("optimizer.{}.", slots.name(slot));
            for name in names.iter().filter(|name| name.starts_with(&prefix)) {
                let dtype = match self.metadata.info(name).map(|info| info.dtype) {
                    Some(Dtype::F64) => DType::F64,
                    _ => DType::F32,
                };
                let part = piece.in_slot.start * dtype.size()..piece.in_slot.end * dtype.size();
                let bytes = self
                    .bytes(name, Some(part))
                    .map_err(|error| error.to_string())?;
                let mut dims = vec![1; slots.dims(slot).len()];
                dims[0] = piece.len();
                let name = format!("{id}.{}", &name[prefix.len()..]);
                let bytes = Bytes::from_bytes_vec(bytes);
                tensors.push(burn_pack::Tensor::new(name, dtype, dims, Some(id), bytes));
            }
            for (name, json) in saved.iter().filter(|(name, _)| name.starts_with(&prefix)) {
                let scalar: Scalar =
                    serde_json::from_str(json).map_err(|error| error.to_string())?;
                scalars.push((format!("{id}.{}", &name[prefix.len()..]), scalar));
            }
            paths.push((id.to_string(), slots.name(slot)));
        }
        let mut writer = Writer::new(tensors);
        for (name, scalar) in scalars {
            writer = writer.with_scalar(&name, scalar);
        }
        for (id, path) in paths {
            writer = writer.with_metadata(&id, path);
        }
        let bytes = writer.into_bytes().map_err(|error| error.to_string())?;
        let loaded = optimizer.clone().from_bytes(bytes);
        loaded.map_err(|error| error.to_string())
    }

    /// Puts whole parameters into a module: those that are trained if `trained`, and all others.
    pub(crate) fn fill<M: Module>(
        &mut self,
        module: M,
        slots: &Slots,
        trained: bool,
    ) -> io::Result<M> {
        let mut fill = Overwrite {
            saved: self,
            slots,
            trained,
            path: Vec::new(),
            failed: None,
        };
        let module = module.map(&mut fill);
        match fill.failed {
            None => Ok(module),
            Some(error) => Err(error),
        }
    }
}

/// The other ranks learn of an error while a checkpoint is taken in.
pub(crate) fn all_read(path: &Path, own: Result<(), String>, stream: &CommStream) -> Result<()> {
    agree(path, own, stream)
}

/// Finds the parameters that are not trained.
struct Untrained<'a> {
    slots: &'a Slots,
    path: Vec<String>,
    found: BTreeMap<String, TensorData>,
}

impl Untrained<'_> {
    fn note(&mut self, data: TensorData) {
        self.found
            .insert(format!("model.{}", self.path.join(".")), data);
    }
}

impl ModuleVisitor for Untrained<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.slots.find(param.id).is_none() {
            self.note(param.base().into_data());
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.note(param.base().into_data());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.note(param.base().into_data());
    }
}

struct Overwrite<'a> {
    saved: &'a mut Saved,
    slots: &'a Slots,
    trained: bool,
    path: Vec<String>,
    failed: Option<io::Error>,
}

impl Overwrite<'_> {
    fn data(&mut self, name: &str, like: &TensorData) -> Option<TensorData> {
        dtype_of(like.dtype())?;
        match self.saved.bytes(&format!("model.{name}"), None) {
            Ok(bytes) => {
                let (shape, dtype) = (like.shape().clone(), like.dtype());
                Some(TensorData::from_bytes_vec(bytes, shape, dtype))
            }
            Err(error) => {
                self.failed.get_or_insert(error);
                None
            }
        }
    }
}

impl ModuleMapper for Overwrite<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let slot = self.slots.find(param.id);
        let name = match slot {
            Some(_) if !self.trained => return param,
            Some(slot) => self.slots.name(slot).to_owned(),
            None => self.path.join("."),
        };
        let like = TensorData::zeros::<f32, _>(param.dims()).convert_dtype(param.dtype());
        let Some(data) = self.data(&name, &like) else {
            return param;
        };
        param.map(|old| {
            let (device, dtype): (Device, _) = (old.device(), old.dtype());
            Tensor::from_data(data, (&device, dtype)).set_require_grad(old.is_require_grad())
        })
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        let name = self.path.join(".");
        let Some(data) = self.data(&name, &param.base().into_data()) else {
            return param;
        };
        param.map(|old| Tensor::from_data(data, (&old.device(), old.dtype())))
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        let name = self.path.join(".");
        let Some(data) = self.data(&name, &param.base().into_data()) else {
            return param;
        };
        param.map(|old| Tensor::from_data(data, (&old.device(), old.dtype())))
    }
}

/// The name of an element type in the file; quantized ones have none.
fn dtype_of(dtype: DType) -> Option<Dtype> {
    Some(match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::I16 => Dtype::I16,
        DType::I8 => Dtype::I8,
        DType::U64 => Dtype::U64,
        DType::U32 => Dtype::U32,
        DType::U16 => Dtype::U16,
        DType::U8 => Dtype::U8,
        DType::Bool(BoolStore::Native) => Dtype::BOOL,
        _ => return None,
    })
}
