//! What an optimizer keeps, by parameter: read from the record that Burn makes of it.
use std::collections::BTreeMap;

use burn::optim::ModuleOptimizer;
use burn_pack::{Bytes, DType, Reader, Scalar};

use crate::{Error, Result};

/// The state of one parameter, or of a piece of it.
#[derive(Debug, Default)]
pub(crate) struct State {
    /// Tensors by their name in the optimizer's state, `momentum.moment_1` say.
    pub(crate) tensors: BTreeMap<String, (DType, Bytes)>,
    /// Numbers by their name.
    pub(crate) scalars: BTreeMap<String, Scalar>,
}

impl State {
    pub(crate) fn bytes(&self) -> usize {
        self.tensors.values().map(|(_, bytes)| bytes.len()).sum()
    }
}

/// The state of every parameter that has any, by its id. It is copied.
pub(crate) fn of(optimizer: &ModuleOptimizer) -> Result<BTreeMap<u64, State>> {
    let unreadable = |error: &dyn std::fmt::Display| Error::Record(error.to_string());
    let bytes = optimizer.into_bytes().map_err(|error| unreadable(&error))?;
    let reader = Reader::from_bytes(bytes).map_err(|error| unreadable(&error))?;
    let mut states: BTreeMap<u64, State> = BTreeMap::new();
    // Names are `{id}.{field}`.
    let split = |name: &str| -> Option<(u64, String)> {
        let (id, field) = name.split_once('.')?;
        Some((id.parse().ok()?, field.to_owned()))
    };
    for (name, &scalar) in reader.scalars() {
        if let Some((id, field)) = split(name) {
            let state = states.entry(id).or_default();
            state.scalars.insert(field, scalar);
        }
    }
    let tensors = reader.into_tensors().map_err(|error| unreadable(&error))?;
    for tensor in tensors {
        if let Some((id, field)) = split(&tensor.name) {
            let (_, dtype, _, _, bytes) =
                tensor.into_parts().map_err(|error| unreadable(&error))?;
            let state = states.entry(id).or_default();
            state.tensors.insert(field, (dtype, bytes));
        }
    }
    Ok(states)
}
