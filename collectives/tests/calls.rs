//! Every call as one row of a table, for the tests that do the same to all of them.
use collectives::{Communicator, Place, ReduceOp, Result, f16};

/// Makes one call with `len` elements a rank, and says whether its result is right.
pub(crate) type Trial = fn(&mut Communicator, usize) -> Result<bool>;

/// Every call there is. None needs more than two ranks; all work with any number.
pub(crate) const CALLS: [(&str, Trial); 25] = [
    ("all_reduce", all_reduce),
    ("all_reduce of f16", all_reduce_narrow),
    ("all_reduce_with", all_reduce_with),
    ("all_reduce_coalesced", all_reduce_coalesced),
    ("reduce", reduce),
    ("reduce of f16", reduce_narrow),
    ("broadcast", broadcast),
    ("all_gather", all_gather),
    ("all_gather_in_place", all_gather_in_place),
    ("all_gather_v", all_gather_v),
    ("reduce_scatter", reduce_scatter),
    ("reduce_scatter_v", reduce_scatter_v),
    ("gather", gather),
    ("gather_v", gather_v),
    ("scatter", scatter),
    ("scatter_v", scatter_v),
    ("all_to_all", all_to_all),
    ("all_to_all_v", all_to_all_v),
    ("sendrecv", sendrecv),
    ("send and recv", send_and_recv),
    ("broadcast_object", broadcast_object),
    ("all_gather_object", all_gather_object),
    ("new_group", new_group),
    ("split", split),
    ("barrier", barrier),
];

/// What rank `rank` puts in.
fn row(rank: usize, len: usize) -> Vec<i32> {
    (0..len).map(|index| (1000 * rank + index) as i32).collect()
}

/// The sum of what all ranks put in.
fn sums(world: usize, len: usize) -> Vec<i32> {
    (0..len)
        .map(|index| (world * index + 1000 * (world * (world - 1) / 2)) as i32)
        .collect()
}

/// Everything that ranks put in, one after the other.
fn rows(counts: &[usize]) -> Vec<i32> {
    let each = counts.iter().enumerate();
    each.flat_map(|(rank, &count)| row(rank, count)).collect()
}

/// Unlike counts, one of them 0: `len`, 0, 2 len, len, 0, 2 len, …
fn counts(world: usize, len: usize) -> Vec<usize> {
    (0..world).map(|rank| [len, 0, 2 * len][rank % 3]).collect()
}

/// The last rank: where it matters who is at the root, 0 proves too little.
fn root(it: &Communicator) -> usize {
    it.world_size() - 1
}

fn all_reduce(it: &mut Communicator, len: usize) -> Result<bool> {
    let mut buffer = row(it.rank(), len);
    it.all_reduce(&mut buffer, ReduceOp::Sum)?;
    Ok(buffer == sums(it.world_size(), len))
}

fn all_reduce_narrow(it: &mut Communicator, len: usize) -> Result<bool> {
    let mut buffer = vec![f16::from_f32(it.rank() as f32 + 1.0); len];
    it.all_reduce(&mut buffer, ReduceOp::Sum)?;
    let sum = it.world_size() * (it.world_size() + 1) / 2;
    Ok(buffer == vec![f16::from_f32(sum as f32); len])
}

fn all_reduce_with(it: &mut Communicator, len: usize) -> Result<bool> {
    let mut buffer = row(it.rank(), len);
    it.all_reduce_with(&mut buffer, |a, b| a.max(b))?;
    Ok(buffer == row(it.world_size() - 1, len))
}

fn all_reduce_coalesced(it: &mut Communicator, len: usize) -> Result<bool> {
    let mut buffers = [row(it.rank(), len), vec![], row(it.rank(), 2 * len)];
    let mut slices = buffers.each_mut().map(Vec::as_mut_slice);
    it.all_reduce_coalesced(&mut slices, ReduceOp::Sum)?;
    let due = |len| sums(it.world_size(), len);
    Ok(buffers == [due(len), vec![], due(2 * len)])
}

fn reduce(it: &mut Communicator, len: usize) -> Result<bool> {
    let (root, mut buffer) = (root(it), row(it.rank(), len));
    it.reduce(&mut buffer, ReduceOp::Sum, root)?;
    Ok(it.rank() != root || buffer == sums(it.world_size(), len))
}

fn reduce_narrow(it: &mut Communicator, len: usize) -> Result<bool> {
    let (root, mut buffer) = (root(it), vec![f16::ONE; len]);
    it.reduce(&mut buffer, ReduceOp::Sum, root)?;
    Ok(it.rank() != root || buffer == vec![f16::from_f32(it.world_size() as f32); len])
}

fn broadcast(it: &mut Communicator, len: usize) -> Result<bool> {
    let (root, mut buffer) = (root(it), row(it.rank(), len));
    it.broadcast(&mut buffer, root)?;
    Ok(buffer == row(root, len))
}

fn all_gather(it: &mut Communicator, len: usize) -> Result<bool> {
    let mut whole = vec![-1; len * it.world_size()];
    it.all_gather(&row(it.rank(), len), &mut whole)?;
    Ok(whole == rows(&vec![len; it.world_size()]))
}

fn all_gather_in_place(it: &mut Communicator, len: usize) -> Result<bool> {
    let due = rows(&vec![len; it.world_size()]);
    let own = it.part(due.len());
    let mut whole = vec![-1; due.len()];
    whole[own.clone()].copy_from_slice(&due[own]);
    it.all_gather_in_place(&mut whole)?;
    Ok(whole == due)
}

fn all_gather_v(it: &mut Communicator, len: usize) -> Result<bool> {
    let counts = counts(it.world_size(), len);
    let mut whole = vec![-1; counts.iter().sum()];
    it.all_gather_v(&row(it.rank(), counts[it.rank()]), &counts, &mut whole)?;
    Ok(whole == rows(&counts))
}

fn reduce_scatter(it: &mut Communicator, len: usize) -> Result<bool> {
    let mut buffer = row(it.rank(), len);
    let part = it.reduce_scatter(&mut buffer, ReduceOp::Sum)?.to_vec();
    Ok(part == sums(it.world_size(), len)[it.part(len)])
}

fn reduce_scatter_v(it: &mut Communicator, len: usize) -> Result<bool> {
    let counts = counts(it.world_size(), len);
    let mut buffer = row(it.rank(), counts.iter().sum());
    let due = sums(it.world_size(), buffer.len());
    let part = it.reduce_scatter_v(&mut buffer, &counts, ReduceOp::Sum)?;
    let start: usize = counts[..it.rank()].iter().sum();
    Ok(*part == due[start..start + counts[it.rank()]])
}

fn gather(it: &mut Communicator, len: usize) -> Result<bool> {
    gathered(it, &vec![len; it.world_size()], |it, part, whole, root| {
        it.gather(part, whole, root)
    })
}

fn gather_v(it: &mut Communicator, len: usize) -> Result<bool> {
    let counts = counts(it.world_size(), len);
    gathered(it, &counts, |it, part, whole, root| {
        it.gather_v(part, &counts, whole, root)
    })
}

fn gathered(
    it: &mut Communicator,
    counts: &[usize],
    call: impl FnOnce(&mut Communicator, &[i32], &mut [i32], usize) -> Result<()>,
) -> Result<bool> {
    let (root, part) = (root(it), row(it.rank(), counts[it.rank()]));
    let due = if it.rank() == root {
        rows(counts)
    } else {
        vec![]
    };
    let mut whole = vec![-1; due.len()];
    call(it, &part, &mut whole, root)?;
    Ok(whole == due)
}

fn scatter(it: &mut Communicator, len: usize) -> Result<bool> {
    scattered(it, &vec![len; it.world_size()], |it, whole, part, root| {
        it.scatter(whole, part, root)
    })
}

fn scatter_v(it: &mut Communicator, len: usize) -> Result<bool> {
    let counts = counts(it.world_size(), len);
    scattered(it, &counts, |it, whole, part, root| {
        it.scatter_v(whole, &counts, part, root)
    })
}

fn scattered(
    it: &mut Communicator,
    counts: &[usize],
    call: impl FnOnce(&mut Communicator, &[i32], &mut [i32], usize) -> Result<()>,
) -> Result<bool> {
    let root = root(it);
    let whole = if it.rank() == root {
        rows(counts)
    } else {
        vec![]
    };
    let mut part = vec![-1; counts[it.rank()]];
    call(it, &whole, &mut part, root)?;
    Ok(part == row(it.rank(), counts[it.rank()]))
}

/// What rank `from` gives rank `to`.
fn gift(from: usize, to: usize, len: usize) -> impl Iterator<Item = i32> {
    (0..len).map(move |index| (10_000 * from + 1000 * to + index) as i32)
}

fn all_to_all(it: &mut Communicator, len: usize) -> Result<bool> {
    let Place { rank, world } = it.place();
    let give: Vec<_> = (0..world).flat_map(|to| gift(rank, to, len)).collect();
    let mut take = vec![-1; give.len()];
    it.all_to_all(&give, &mut take)?;
    Ok(take
        .into_iter()
        .eq((0..world).flat_map(|from| gift(from, rank, len))))
}

fn all_to_all_v(it: &mut Communicator, len: usize) -> Result<bool> {
    let Place { rank, world } = it.place();
    // Not the same both ways, and nothing between some.
    let count = |from: usize, to: usize| [len, 0, 2 * len][(from + 2 * to) % 3];
    let gives: Vec<_> = (0..world).map(|to| count(rank, to)).collect();
    let takes: Vec<_> = (0..world).map(|from| count(from, rank)).collect();
    let give: Vec<_> = (0..world)
        .flat_map(|to| gift(rank, to, gives[to]))
        .collect();
    let mut take = vec![-1; takes.iter().sum()];
    it.all_to_all_v(&give, &gives, &mut take, &takes)?;
    Ok(take
        .into_iter()
        .eq((0..world).flat_map(|from| gift(from, rank, takes[from]))))
}

fn sendrecv(it: &mut Communicator, len: usize) -> Result<bool> {
    let place = it.place();
    let (up, down) = (place.up(1), place.down(1));
    let mut take = vec![-1; len];
    it.sendrecv(up, &row(place.rank, len), down, &mut take)?;
    Ok(take == row(down, len))
}

/// Down a line, so that it needs no room under way.
fn send_and_recv(it: &mut Communicator, len: usize) -> Result<bool> {
    let Place { rank, world } = it.place();
    let mut buffer = row(0, len);
    if rank > 0 {
        buffer.fill(-1);
        it.recv(rank - 1, &mut buffer)?;
    }
    if rank + 1 < world {
        it.send(rank + 1, &buffer)?;
    }
    Ok(buffer == row(0, len))
}

fn broadcast_object(it: &mut Communicator, len: usize) -> Result<bool> {
    let root = root(it);
    let mine = (it.rank() == root).then(|| ("from the root".to_owned(), row(root, len)));
    let got = it.broadcast_object(mine, root)?;
    Ok(got == ("from the root".to_owned(), row(root, len)))
}

fn all_gather_object(it: &mut Communicator, len: usize) -> Result<bool> {
    let object = |rank: usize| (rank, row(rank, len + rank));
    let got = it.all_gather_object(&object(it.rank()))?;
    Ok(got.into_iter().eq((0..it.world_size()).map(object)))
}

fn new_group(it: &mut Communicator, len: usize) -> Result<bool> {
    let Place { rank, world } = it.place();
    let members: Vec<_> = (0..world).rev().filter(|rank| rank % 2 == 0).collect();
    let index = members.iter().position(|&member| member == rank);
    match (it.new_group(&members)?, index) {
        (Some(mut group), Some(index)) => {
            Ok(group.place() == Place::new(index, members.len()) && all_reduce(&mut group, len)?)
        }
        (group, index) => Ok(group.is_none() && index.is_none()),
    }
}

fn split(it: &mut Communicator, len: usize) -> Result<bool> {
    let Place { rank, world } = it.place();
    let color = (rank % 3 < 2).then_some(rank as u32 % 3);
    let alike = (0..world).filter(|other| other % 3 == rank % 3).count();
    match (it.split(color, -(rank as i64))?, color) {
        (Some(mut group), Some(_)) => {
            let due = Place::new(alike - 1 - rank / 3, alike);
            Ok(group.place() == due && all_reduce(&mut group, len)?)
        }
        (group, color) => Ok(group.is_none() && color.is_none()),
    }
}

fn barrier(it: &mut Communicator, _: usize) -> Result<bool> {
    it.barrier().map(|()| true)
}
