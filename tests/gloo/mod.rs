//! Our collectives against recorded outputs of PyTorch's gloo: see README.md.
use std::collections::BTreeMap;

use collectives::{
    Algorithm, Communicator, CommunicatorConfig, DType, Element, Error, ReduceOp, launch,
};
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

static REFERENCE: &[u8] = include_bytes!("reference.safetensors");

/// One call that was recorded on every rank of a world.
#[derive(Debug, Deserialize)]
struct Case {
    name: String,
    op: String,
    world: usize,
    dtype: String,
    reduce: Option<String>,
    root: Option<usize>,
}

struct Recording {
    tensors: SafeTensors<'static>,
    cases: Vec<Case>,
}

impl Recording {
    fn load() -> Self {
        let (_, header) = SafeTensors::read_metadata(REFERENCE).unwrap();
        let metadata = header.metadata().as_ref().unwrap();
        assert!(metadata["torch"].starts_with("2.13.0"), "{metadata:?}");
        assert_eq!(metadata["backend"], "gloo");
        Self {
            tensors: SafeTensors::deserialize(REFERENCE).unwrap(),
            cases: serde_json::from_str(&metadata["cases"]).unwrap(),
        }
    }

    /// What a rank gave (`in`) or got (`out`), unless it gave or got nothing.
    fn side<T: Number>(&self, case: &Case, side: &str, rank: usize) -> Option<Vec<T>> {
        let name = format!("{}/{side}/{rank}", case.name);
        let tensor = self.tensors.tensor(&name).ok()?;
        assert_eq!(tensor.dtype(), T::TAG, "{name}");
        let words = tensor.data().chunks_exact(size_of::<T>());
        Some(words.map(T::read).collect())
    }
}

#[test]
fn every_recorded_case_is_equal_or_within_its_bound() {
    let recording = Recording::load();
    let (mut ran, mut skipped) = (BTreeMap::new(), BTreeMap::new());
    for case in &recording.cases {
        let why = match (case.dtype.as_str(), case.op.as_str()) {
            ("F16" | "BF16", _) => Some("16-bit floats"),
            (_, "gather" | "scatter" | "all_to_all") => Some("gather, scatter, all_to_all"),
            _ => None,
        };
        if let Some(why) = why {
            *skipped.entry(why).or_insert(0) += 1;
            continue;
        }
        for &algorithm in Algorithm::ALL {
            match case.dtype.as_str() {
                "F32" => compare::<f32>(&recording, case, algorithm),
                "F64" => compare::<f64>(&recording, case, algorithm),
                "I32" => compare::<i32>(&recording, case, algorithm),
                "I64" => compare::<i64>(&recording, case, algorithm),
                other => panic!("{}: what is {other}?", case.name),
            }
        }
        *ran.entry(case.op.as_str()).or_insert(0) += 1;
    }
    println!("compared: {ran:?}; skipped, not offered yet: {skipped:?}");
    // A comparison that runs on nothing proves nothing.
    assert_eq!(recording.cases.len(), 487);
    let expected = [
        ("all_gather", 16),
        ("all_reduce", 100),
        ("broadcast", 16),
        ("reduce", 72),
        ("reduce_scatter", 72),
        ("send_recv", 3),
    ];
    assert_eq!(ran, BTreeMap::from(expected));
    let expected = [("16-bit floats", 160), ("gather, scatter, all_to_all", 48)];
    assert_eq!(skipped, BTreeMap::from(expected));
}

#[test]
fn a_ring_all_reduce_has_gloos_bits() {
    let recording = Recording::load();
    let mut compared = 0;
    for case in &recording.cases {
        let sums = matches!(case.reduce.as_deref(), Some("sum" | "avg"));
        if case.op != "all_reduce" || !sums {
            continue;
        }
        compared += 1;
        match case.dtype.as_str() {
            "F32" => same_bits::<f32>(&recording, case),
            "F64" => same_bits::<f64>(&recording, case),
            _ => compared -= 1,
        }
    }
    // 1 to 4 ranks: f32 sum of 8 shapes, f32 avg, f64 sum and avg.
    assert_eq!(compared, 4 * (8 + 1 + 1 + 1));
}

fn same_bits<T: Number>(recording: &Recording, case: &Case) {
    let ours = ours::<T>(recording, case, Algorithm::Ring);
    for (rank, ours) in ours.into_iter().enumerate() {
        let theirs = recording.side::<T>(case, "out", rank).unwrap();
        hold(case, Algorithm::Ring, rank, &ours.unwrap(), &theirs, |_| {
            0.0
        });
    }
}

/// Runs `case` by `algorithm` and holds every rank's result against gloo's.
fn compare<T: Number>(recording: &Recording, case: &Case, algorithm: Algorithm) {
    let inputs: Vec<Vec<T>> = (0..case.world)
        .filter_map(|rank| recording.side(case, "in", rank))
        .collect();
    let ours = ours(recording, case, algorithm);
    for (rank, ours) in ours.into_iter().enumerate() {
        let theirs = recording.side::<T>(case, "out", rank);
        let (Some(ours), Some(theirs)) = (&ours, &theirs) else {
            assert_eq!(
                ours.is_some(),
                theirs.is_some(),
                "{} on rank {rank}",
                case.name
            );
            continue;
        };
        // Where this rank's result begins in the whole buffer.
        let start = if case.op == "reduce_scatter" {
            rank * theirs.len()
        } else {
            0
        };
        hold(case, algorithm, rank, ours, theirs, |index| {
            bound(case, &inputs, start + index)
        });
    }
}

/// How far apart the two sides may be at one element; 0 asks for the same bits.
///
/// A sum of N addends in any order is off by at most (N - 1) eps/2 · Σ|x|, to first
/// order, and both sides may be: N eps Σ|x| covers that, and of a mean, N times
/// smaller, also the rounding of the division. A product is off by (N - 1) eps/2
/// of itself.
fn bound<T: Number>(case: &Case, inputs: &[Vec<T>], index: usize) -> f64 {
    let addends = || inputs.iter().map(|input| input[index].magnitude());
    let ranks = case.world as f64;
    match case.reduce.as_deref() {
        // Of two addends there is one sum.
        _ if case.world <= 2 => 0.0,
        Some("sum") => ranks * T::EPSILON * addends().sum::<f64>(),
        Some("avg") => T::EPSILON * addends().sum::<f64>(),
        Some("product") => ranks * T::EPSILON * addends().product::<f64>(),
        _ => 0.0,
    }
}

fn hold<T: Number>(
    case: &Case,
    algorithm: Algorithm,
    rank: usize,
    ours: &[T],
    theirs: &[T],
    bound: impl Fn(usize) -> f64,
) {
    let what = format!("{} by {algorithm}, rank {rank}", case.name);
    assert_eq!(ours.len(), theirs.len(), "{what}: lengths");
    for (index, (&ours, &theirs)) in ours.iter().zip(theirs).enumerate() {
        let bound = bound(index);
        let near = bound > 0.0 && ours.distance(theirs) <= bound;
        assert!(
            near || ours.bits() == theirs.bits(),
            "{what}: first differs at {index}: {ours:?} here, {theirs:?} by gloo, allowed {bound:e}"
        );
    }
}

/// What each rank ends with, by us; none where gloo's rank gets none.
fn ours<T: Number>(
    recording: &Recording,
    case: &Case,
    algorithm: Algorithm,
) -> Vec<Option<Vec<T>>> {
    let config = CommunicatorConfig::new().with_algorithm(algorithm);
    launch::spawn(case.world, &config, |mut communicator| {
        let mine = recording.side(case, "in", communicator.rank());
        run(&mut communicator, case, mine)
    })
    .unwrap_or_else(|error| panic!("{}: {error}", case.name))
}

fn run<T: Number>(
    communicator: &mut Communicator,
    case: &Case,
    mine: Option<Vec<T>>,
) -> Result<Option<Vec<T>>, Error> {
    let rank = communicator.rank();
    let op = || match case.reduce.as_deref() {
        Some("sum") => ReduceOp::Sum,
        Some("avg") => ReduceOp::Mean,
        Some("product") => ReduceOp::Product,
        Some("min") => ReduceOp::Min,
        Some("max") => ReduceOp::Max,
        other => panic!("{}: what is {other:?}?", case.name),
    };
    let root = case.root.unwrap_or_default();
    let given = mine.is_some();
    let mut mine = mine.unwrap_or_default();
    match case.op.as_str() {
        "all_reduce" => communicator.all_reduce(&mut mine, op())?,
        "broadcast" => communicator.broadcast(&mut mine, root)?,
        "reduce" => {
            communicator.reduce(&mut mine, op(), root)?;
            return Ok((rank == root).then_some(mine));
        }
        "reduce_scatter" => mine = communicator.reduce_scatter(&mut mine, op())?.to_vec(),
        "all_gather" => {
            let mut whole = vec![T::default(); mine.len() * case.world];
            communicator.all_gather(&mine, &mut whole)?;
            mine = whole;
        }
        "send_recv" => {
            if given {
                communicator.send(root, &mine)?;
                return Ok(None);
            }
            if rank != root {
                return Ok(None);
            }
            mine = vec![T::default(); 9];
            communicator.recv(0, &mut mine)?;
        }
        other => panic!("{}: what is {other}?", case.name),
    }
    Ok(Some(mine))
}

/// Element types that are in the file.
trait Number: Element + Default {
    const TAG: Dtype;
    /// The distance from 1 to the next float.
    const EPSILON: f64;
    fn read(bytes: &[u8]) -> Self;
    fn bits(self) -> u64;
    fn magnitude(self) -> f64;
    fn distance(self, other: Self) -> f64;
}

macro_rules! numbers {
    ($($t:ident $tag:ident $epsilon:expr;)*) => {$(
        impl Number for $t {
            const TAG: Dtype = Dtype::$tag;
            const EPSILON: f64 = $epsilon;
            fn read(bytes: &[u8]) -> Self { Self::from_le_bytes(bytes.try_into().unwrap()) }
            fn bits(self) -> u64 {
                let mut word = [0; 8];
                word[..size_of::<Self>()].copy_from_slice(&self.to_le_bytes());
                u64::from_le_bytes(word)
            }
            fn magnitude(self) -> f64 { (self as f64).abs() }
            fn distance(self, other: Self) -> f64 { (self as f64 - other as f64).abs() }
        }
    )*};
}

numbers! {
    f32 F32 f32::EPSILON as f64;
    f64 F64 f64::EPSILON;
    // Integers are equal or wrong.
    i32 I32 0.0;
    i64 I64 0.0;
}

#[test]
fn the_file_s_types_are_ours() {
    let ours = [DType::F32, DType::F64, DType::I32, DType::I64];
    let tags = [f32::TAG, f64::TAG, i32::TAG, i64::TAG];
    for (ours, tag) in ours.into_iter().zip(tags) {
        assert_eq!(format!("{tag:?}"), ours.name().to_uppercase());
        assert_eq!(ours.size() * 8, tag.bitsize());
    }
}
