//! What the flags may say: lists of types, operations, algorithms and ranks.
use std::str::FromStr;

use collectives::{Algorithm, Choice, DType, ReduceOp};

use super::BenchError;

/// A word that a flag does not know.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no {what} \"{got}\"; there are {allowed}")]
pub struct NotAllowed {
    what: &'static str,
    got: String,
    allowed: String,
}

/// Element types: `f32,f64`, or `all`. nccl-tests' names are understood too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DTypes(pub Vec<DType>);

impl FromStr for DTypes {
    type Err = NotAllowed;

    fn from_str(text: &str) -> Result<Self, NotAllowed> {
        list(
            "element type",
            text,
            DType::ALL,
            |dtype| dtype.name(),
            nccl_dtype,
        )
        .map(Self)
    }
}

/// Operations: `sum,mean`, or `all`, which are those that suit the element type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReduceOps(pub Vec<ReduceOp>);

impl FromStr for ReduceOps {
    type Err = NotAllowed;

    fn from_str(text: &str) -> Result<Self, NotAllowed> {
        let nccl = |name: &str| match name {
            "avg" => "mean".to_owned(),
            "prod" => "product".to_owned(),
            other => other.to_owned(),
        };
        list("operation", text, &ReduceOp::ALL, |op| op.name(), nccl).map(Self)
    }
}

/// Algorithms: `ring,tree,auto`, or `all`, which are those that have a name.
#[derive(Clone, Debug, PartialEq)]
pub struct Choices(pub Vec<Choice>);

impl FromStr for Choices {
    type Err = NotAllowed;

    fn from_str(text: &str) -> Result<Self, NotAllowed> {
        let mut known: Vec<_> = Algorithm::ALL
            .iter()
            .map(|&algorithm| algorithm.into())
            .collect();
        if text != "all" {
            known.push(Choice::Auto);
        }
        list("algorithm", text, &known, choice_name, str::to_owned).map(Self)
    }
}

/// World sizes: `2,4,8`; `8..1024` doubles from the one to the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankCounts(pub Vec<usize>);

/// The most ranks of any world: plans in virtual time.
pub const MOST_RANKS: usize = 4096;

/// The most ranks that run as threads.
pub const MOST_THREADS: usize = 128;

impl RankCounts {
    /// Refuses more ranks than run as threads.
    pub(super) fn as_threads(&self) -> Result<(), BenchError> {
        match self.0.iter().find(|&&ranks| ranks > MOST_THREADS) {
            None => Ok(()),
            Some(ranks) => Err(BenchError::usage(format!(
                "--ranks {ranks}: 1 to {MOST_THREADS} run as threads; `simulate` takes more"
            ))),
        }
    }
}

impl FromStr for RankCounts {
    type Err = NotAllowed;

    fn from_str(text: &str) -> Result<Self, NotAllowed> {
        let counts = text.split(',').map(|word| {
            let (first, last) = word.split_once("..").unwrap_or((word, word));
            let count = |digits: &str| {
                digits
                    .parse()
                    .ok()
                    .filter(|count| (1..=MOST_RANKS).contains(count))
            };
            match (count(first), count(last)) {
                (Some(first), Some(last)) if first <= last => {
                    Ok(std::iter::successors(Some(first), |count| Some(2 * count))
                        .take_while(move |&count| count <= last))
                }
                _ => Err(NotAllowed {
                    what: "number of ranks",
                    got: word.to_owned(),
                    allowed: format!(
                        "1 to {MOST_RANKS}, lists such as 2,4,8, and doublings such as 8..1024"
                    ),
                }),
            }
        });
        let counts: Result<Vec<_>, _> = counts.collect();
        Ok(Self(counts?.into_iter().flatten().collect()))
    }
}

fn choice_name(choice: &Choice) -> &'static str {
    match choice {
        Choice::Fixed(algorithm) => algorithm.name(),
        _ => "auto",
    }
}

/// The words of `text`, each one of `known` or, by another name, `known_as`.
fn list<T: Clone>(
    what: &'static str,
    text: &str,
    known: &[T],
    name: impl Fn(&T) -> &'static str,
    known_as: impl Fn(&str) -> String,
) -> Result<Vec<T>, NotAllowed> {
    if text == "all" {
        return Ok(known.to_vec());
    }
    let one = |word: &str| {
        let wanted = known_as(word);
        let found = known.iter().find(|item| name(item) == wanted);
        found.cloned().ok_or_else(|| {
            let names: Vec<_> = known.iter().map(&name).collect();
            NotAllowed {
                what,
                got: word.to_owned(),
                allowed: format!("{}, and all", names.join(", ")),
            }
        })
    };
    text.split(',').map(one).collect()
}

fn nccl_dtype(name: &str) -> String {
    let ours = match name {
        "half" => "f16",
        "float" => "f32",
        "double" => "f64",
        "bfloat16" => "bf16",
        "int32" => "i32",
        "int64" => "i64",
        "uint8" => "u8",
        "uint32" => "u32",
        "uint64" => "u64",
        other => other,
    };
    ours.to_owned()
}
