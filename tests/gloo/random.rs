//! A round of random cases, from one seed.
use collectives::{Collective, DType, ReduceOp, bf16, f16};
use examples::{
    SplitMix64,
    bench::reference::{Case, Inputs, Outputs, unit},
};

/// Cases of all kinds in a round.
pub(super) const SMALL: usize = 300;

/// All-reduces of up to 20 MiB in a round.
pub(super) const LARGE: usize = 8;

/// Cases that gloo carries out, of all kinds.
pub(super) fn cases(seed: u64) -> Vec<Case> {
    let mut draws = SplitMix64::new(seed);
    let small: Vec<_> = (0..SMALL).map(|number| small(number, &mut draws)).collect();
    let large = (0..LARGE).map(|number| large(number, &mut draws));
    small.into_iter().chain(large).collect()
}

fn small(number: usize, draws: &mut SplitMix64) -> Case {
    use Collective::{
        AllGather, AllReduce, AllToAll, Broadcast, Gather, Reduce, ReduceScatter, Scatter, SendRecv,
    };
    use DType::{BF16, F16, F32, F64, I32, I64, U8};
    use ReduceOp::{And, Max, Mean, Min, Or, Product, Sum, Xor};
    let operations = [
        AllReduce,
        Reduce,
        ReduceScatter,
        Broadcast,
        AllGather,
        Gather,
        Scatter,
        AllToAll,
        SendRecv,
    ];
    let collective = pick(draws, &operations);
    let dtype = pick(draws, &[F32, F64, F16, BF16, I32, I64, U8]);
    let world = match collective {
        SendRecv => below(draws, 4) + 2,
        _ => below(draws, 5) + 1,
    };
    let len = match below(draws, 4) {
        0 => below(draws, 10),
        1 => below(draws, 300),
        2 => below(draws, 5000),
        _ => 1 << below(draws, 12),
    };
    let reduce = match collective {
        AllReduce | Reduce | ReduceScatter => Some(match dtype.is_float() {
            true => pick(draws, &[Sum, Mean, Product, Min, Max]),
            false => pick(draws, &[Sum, Product, Min, Max, And, Or, Xor]),
        }),
        _ => None,
    };
    let mut case = Case {
        root: match collective {
            Reduce | Broadcast | Gather | Scatter => below(draws, world),
            SendRecv => below(draws, world - 1) + 1,
            _ => 0,
        },
        len: match collective {
            ReduceScatter | Scatter | AllToAll => world * len,
            _ => len,
        },
        ..blank(format!("random-{number}"), collective, world, dtype, reduce)
    };
    let mut element = || element(dtype, reduce, draws.next_u64());
    let inputs = (0..world).map(|rank| {
        let len = case.given(rank)?;
        Some((0..len).flat_map(|_| element()).collect())
    });
    case.inputs = Inputs::Elements(inputs.collect());
    case
}

fn large(number: usize, draws: &mut SplitMix64) -> Case {
    let (dtype, world) = (pick(draws, &[DType::F32, DType::F64]), below(draws, 4) + 2);
    let reduce = Some(pick(draws, &[ReduceOp::Sum, ReduceOp::Mean]));
    let most = (20 << 20) / dtype.size();
    Case {
        len: below(draws, most) + 1,
        // JSON numbers beyond that are not whole everywhere.
        inputs: Inputs::Drawn(draws.next_u64() >> 11),
        ..blank(
            format!("large-{number}"),
            Collective::AllReduce,
            world,
            dtype,
            reduce,
        )
    }
}

/// A case that nobody has carried out, of no elements.
fn blank(
    name: String,
    collective: Collective,
    world: usize,
    dtype: DType,
    reduce: Option<ReduceOp>,
) -> Case {
    Case {
        name,
        collective,
        world,
        dtype,
        reduce,
        root: 0,
        len: 0,
        counts: None,
        refused: None,
        inputs: Inputs::Elements(vec![]),
        outputs: Outputs::Elements(vec![]),
    }
}

fn below(draws: &mut SplitMix64, count: usize) -> usize {
    (draws.next_u64() % count as u64) as usize
}

fn pick<T: Copy>(draws: &mut SplitMix64, from: &[T]) -> T {
    from[below(draws, from.len())]
}

/// An input from 64 random bits: many magnitudes, but nothing that overflows among
/// five ranks.
fn element(dtype: DType, reduce: Option<ReduceOp>, bits: u64) -> Vec<u8> {
    let product = reduce == Some(ReduceOp::Product);
    let float = match product {
        true => unit(bits) / 2.0 + 1.0,
        false => unit(bits) * f64::from(1u32 << (bits & 7)) / 16.0,
    };
    // The upper bits, and three less.
    let shift = 64 - 8 * dtype.size() + 3;
    let whole = match (product, dtype) {
        (true, DType::U8) => bits % 4,
        (true, _) => (bits % 19).wrapping_sub(9),
        (false, DType::U8) => bits >> shift,
        (false, _) => (bits as i64 >> shift) as u64,
    };
    match dtype {
        DType::F32 => (float as f32).to_le_bytes().to_vec(),
        DType::F64 => float.to_le_bytes().to_vec(),
        DType::F16 => f16::from_f64(float).to_le_bytes().to_vec(),
        DType::BF16 => bf16::from_f64(float).to_le_bytes().to_vec(),
        _ => whole.to_le_bytes()[..dtype.size()].to_vec(),
    }
}
