//! The recording: the safetensors layout, with the cases as JSON in its metadata.
//!
//! `__metadata__.cases` is a list of objects with the keys of [`Entry`]. Tensors are
//! `NAME/in/RANK` and `NAME/out/RANK`; none where a rank gives or gets nothing. A case
//! that gloo refused has an `error` and no outputs. A case with a `seed` has no tensors:
//! its inputs are [drawn anew](super::inputs), and of each output there is a hash.
use std::collections::HashMap;

use collectives::{Collective, DType, ReduceOp};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde::{Deserialize, Serialize};

use super::{Case, Inputs, Outputs, inputs};

/// The file in this repository. The only place that says where it is.
pub const RECORDED: &[u8] = include_bytes!("../../../../tests/gloo/reference.safetensors");

/// What is wrong with a recording.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReferenceError {
    /// It is not in the layout.
    #[error("the gloo reference is no safetensors file: {0}")]
    Layout(#[from] safetensors::SafeTensorError),
    /// Its list of cases cannot be read.
    #[error("the gloo reference has no list of cases that can be read: {0}")]
    Cases(#[from] serde_json::Error),
    /// A case cannot be.
    #[error("case {case} of the gloo reference: {what}")]
    Case {
        /// Its name.
        case: String,
        /// What is wrong.
        what: String,
    },
}

/// What gloo gave, once.
#[derive(Clone, Debug, PartialEq)]
pub struct Recording {
    /// Who was asked.
    pub backend: String,
    /// The version of PyTorch that it came with.
    pub torch: String,
    /// The cases, in the order of the file.
    pub cases: Vec<Case>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    op: String,
    world: usize,
    dtype: Dtype,
    reduce: Option<String>,
    root: Option<usize>,
    shape: Vec<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    counts: Option<Vec<usize>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    #[serde(default, skip_serializing)]
    error: Option<String>,
    #[serde(default, skip_serializing)]
    hash: Option<Vec<String>>,
}

impl Recording {
    /// The one in this repository.
    ///
    /// # Panics
    ///
    /// Panics if it cannot be read, which the tests rule out.
    pub fn committed() -> Self {
        Self::parse(RECORDED).expect("the tests have read the recording")
    }

    /// Reads a file's bytes.
    ///
    /// # Errors
    ///
    /// Says which case cannot be, and why.
    pub fn parse(bytes: &[u8]) -> Result<Self, ReferenceError> {
        let (_, header) = SafeTensors::read_metadata(bytes)?;
        let tensors = SafeTensors::deserialize(bytes)?;
        let text = |key: &str| header.metadata().as_ref().and_then(|texts| texts.get(key));
        let entries: Vec<Entry> = serde_json::from_str(text("cases").map_or("", String::as_str))?;
        let cases = entries.into_iter().map(|entry| entry.case(&tensors));
        Ok(Self {
            backend: text("backend").cloned().unwrap_or_default(),
            torch: text("torch").cloned().unwrap_or_default(),
            cases: cases.collect::<Result<_, _>>()?,
        })
    }
}

/// A file of cases for `reference.py` to carry out: inputs, and no answers.
///
/// # Errors
///
/// If the inputs of a case are not what it says.
pub fn draft(cases: &[Case]) -> Result<Vec<u8>, ReferenceError> {
    let entries: Vec<_> = cases.iter().map(Entry::of).collect();
    let metadata = HashMap::from([("cases".to_owned(), serde_json::to_string(&entries)?)]);
    let mut tensors = vec![];
    for case in cases {
        let Inputs::Elements(inputs) = &case.inputs else {
            continue;
        };
        for (rank, bytes) in inputs.iter().enumerate() {
            if let (Some(bytes), Some(len)) = (bytes, case.given(rank)) {
                let tensor = TensorView::new(tag(case.dtype), vec![len], bytes)?;
                tensors.push((format!("{}/in/{rank}", case.name), tensor));
            }
        }
    }
    Ok(safetensors::serialize(tensors, Some(metadata))?)
}

impl Entry {
    fn of(case: &Case) -> Self {
        Self {
            name: case.name.clone(),
            op: operation_name(case.collective).to_owned(),
            world: case.world,
            dtype: tag(case.dtype),
            reduce: case.reduce.map(|op| reduction_name(op).to_owned()),
            root: Some(case.root),
            shape: vec![case.len],
            counts: case.counts.clone(),
            seed: match case.inputs {
                Inputs::Drawn(seed) => Some(seed),
                Inputs::Elements(_) => None,
            },
            error: None,
            hash: None,
        }
    }

    fn case(self, tensors: &SafeTensors<'_>) -> Result<Case, ReferenceError> {
        let fault = |what| ReferenceError::Case {
            case: self.name.clone(),
            what,
        };
        let collective = OPERATIONS
            .into_iter()
            .find(|&known| operation_name(known) == self.op)
            .ok_or_else(|| fault(format!("no operation \"{}\"", self.op)))?;
        let dtype = DType::ALL
            .iter()
            .copied()
            .find(|&known| tag(known) == self.dtype)
            .ok_or_else(|| fault(format!("no element type {:?}", self.dtype)))?;
        let reduction = |name: &String| {
            ReduceOp::ALL
                .into_iter()
                .find(|&known| reduction_name(known) == name)
                .ok_or_else(|| fault(format!("no reduction \"{name}\"")))
        };
        let reduce = self.reduce.as_ref().map(reduction).transpose()?;
        let side = |side: &str| {
            let elements = |rank| {
                let name = format!("{}/{side}/{rank}", self.name);
                match tensors.tensor(&name) {
                    Ok(tensor) if tensor.dtype() != self.dtype => {
                        Err(fault(format!("{name} is of {:?}", tensor.dtype())))
                    }
                    Ok(tensor) => Ok(Some(tensor.data().to_vec())),
                    Err(_) => Ok(None),
                }
            };
            (0..self.world).map(elements).collect::<Result<Vec<_>, _>>()
        };
        let case = Case {
            name: self.name.clone(),
            collective,
            world: self.world,
            dtype,
            reduce,
            root: self.root.unwrap_or(0),
            len: self.shape.iter().product(),
            counts: self.counts.clone(),
            refused: self.error.clone(),
            inputs: match self.seed {
                Some(seed) => Inputs::Drawn(seed),
                None => Inputs::Elements(side("in")?),
            },
            outputs: match &self.hash {
                Some(hashes) => Outputs::Hashes(hashes.clone()),
                None => Outputs::Elements(side("out")?),
            },
        };
        for rank in 0..case.world {
            let due = case.given(rank).map(|len| len * dtype.size());
            let found = match &case.inputs {
                Inputs::Elements(inputs) => inputs[rank].as_ref().map(Vec::len),
                Inputs::Drawn(_) => inputs(0, 0, dtype, 0).and(due),
            };
            if found != due {
                return Err(fault(format!(
                    "rank {rank} gives {found:?} bytes where {due:?} are due"
                )));
            }
        }
        Ok(case)
    }
}

const OPERATIONS: [Collective; 9] = [
    Collective::AllReduce,
    Collective::Reduce,
    Collective::ReduceScatter,
    Collective::Broadcast,
    Collective::AllGather,
    Collective::Gather,
    Collective::Scatter,
    Collective::AllToAll,
    Collective::SendRecv,
];

fn operation_name(collective: Collective) -> &'static str {
    match collective {
        Collective::SendRecv => "send_recv",
        other => other.name(),
    }
}

/// PyTorch's name.
fn reduction_name(op: ReduceOp) -> &'static str {
    match op {
        ReduceOp::Mean => "avg",
        ReduceOp::And => "band",
        ReduceOp::Or => "bor",
        ReduceOp::Xor => "bxor",
        other => other.name(),
    }
}

fn tag(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I32 => Dtype::I32,
        DType::I64 => Dtype::I64,
        DType::U8 => Dtype::U8,
        DType::U32 => Dtype::U32,
        _ => Dtype::U64,
    }
}
