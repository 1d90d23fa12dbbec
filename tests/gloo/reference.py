"""What PyTorch's gloo gives: runs collectives, and writes inputs and outputs to one file.

usage: reference.py OUT           the built-in cases
       reference.py OUT CASES     the cases of a file, made by a test

Both files are safetensors: a header's length in 8 bytes, a JSON header, raw little-endian data.
`__metadata__.cases` is a JSON list, one object a case:
  name     as the tensors begin
  op       all_reduce reduce reduce_scatter broadcast all_gather gather scatter all_to_all
           send_recv (from rank 0 to the root)
  world    how many ranks
  dtype    F32 F64 F16 BF16 I32 I64 U8 U32 U64
  reduce   sum avg product min max band bor bxor, or null
  root     a rank, or null
  shape    of the buffer that is cut by rank, if one is (reduce_scatter, scatter, all_to_all: the
           input, `world` equal parts along its first dimension); else of one rank's input
  counts   optional: elements by rank, where ranks give unequal parts
  seed     optional: inputs are drawn, see `drawn`, and not in the file
and, as answers,
  error    what gloo said, if it refused; then there is no output
  hash     if there is a seed: SHA-256 of the bytes of each rank's output, instead of the tensors
Tensors: NAME/in/RANK is what a rank gave, NAME/out/RANK what it got; none where it gave or got
nothing.
"""
import ctypes
import datetime
import hashlib
import json
import math
import os
import re
import struct
import sys
import tempfile
import time
import warnings

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

DTYPES = {"F32": torch.float32, "F64": torch.float64, "F16": torch.float16,
          "BF16": torch.bfloat16, "I32": torch.int32, "I64": torch.int64,
          "U8": torch.uint8, "U32": torch.uint32, "U64": torch.uint64}
FLOATS, INTEGERS = ("F32", "F64", "F16", "BF16"), ("I32", "I64", "U8")
REDUCE = {name: getattr(dist.ReduceOp, name.upper())
          for name in ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")}
CUT = ("reduce_scatter", "scatter", "all_to_all")
REDUCES = ("all_reduce", "reduce", "reduce_scatter")
WORLDS = range(1, 6)
MIB = 1 << 20
# All cases take about 20 seconds on two busy cores.
MINUTES = 10


# --- numbers that any language can make again

GAMMA = 0x9E3779B97F4A7C15


def draws(seed, rank, count):
    """The first numbers of the SplitMix64 stream that starts at seed + rank."""
    index = numpy.arange(1, count + 1, dtype=numpy.uint64)
    z = index * numpy.uint64(GAMMA) + numpy.uint64((seed + rank) % 2 ** 64)
    z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return z ^ (z >> numpy.uint64(31))


def drawn(seed, rank, count, dtype):
    """Floats in [-1, 1): the upper 24 or 53 bits of a draw, halved 0 to 7 times by the lower 3.

    Every step is exact. Without the halving most sums would be exact too, in any order.
    """
    z = draws(seed, rank, count)
    halvings = -(z & numpy.uint64(7)).astype(numpy.int32)
    if dtype == "F32":
        unit = (z >> numpy.uint64(40)).astype(numpy.float32) * numpy.float32(2 ** -23)
        unit -= numpy.float32(1)
    else:
        unit = (z >> numpy.uint64(11)).astype(numpy.float64) * 2.0 ** -52 - 1
    return torch.from_numpy(numpy.ldexp(unit, halvings))


def value(dtype, reduce, z):
    """Inputs of the built-in cases: many magnitudes, but nothing that overflows."""
    unit = (z >> numpy.uint64(11)).astype(numpy.float64) * 2.0 ** -52 - 1
    if dtype in FLOATS:
        x = unit / 2 + 1 if reduce == "product" else \
            numpy.ldexp(unit, (z & numpy.uint64(7)).astype(int) - 4)
        return torch.from_numpy(x).to(DTYPES[dtype])
    bits = torch.iinfo(DTYPES[dtype]).bits
    signed = dtype[0] == "I"
    if reduce == "product":
        x = z % numpy.uint64(19 if signed else 4)
        x = x.astype(numpy.int64) - (9 if signed else 0)
    else:
        # Five of them add up below the limit.
        x = z.astype(numpy.int64) if signed else z
        x = x >> x.dtype.type(64 - bits + 3)
    kind = {"U64": numpy.uint64, "U32": numpy.uint32, "U8": numpy.uint8}.get(dtype, numpy.int64)
    return torch.from_numpy(x.astype(kind)).to(DTYPES[dtype])


# --- the built-in cases

class Cases:
    def __init__(self):
        self.list, self.tensors = [], {}

    def add(self, op, world, dtype, shape, reduce=None, root=None, **more):
        size = "uneven" if "counts" in more else "x".join(map(str, shape))
        name = "-".join([op, f"w{world}", dtype.lower(), size]
                        + ([reduce] if reduce else []) + ([f"r{root}"] if root is not None else []))
        case = {"name": name, "op": op, "world": world, "dtype": dtype, "reduce": reduce,
                "root": root, "shape": shape, **more}
        number = len(self.list)
        self.list.append(case)
        if "seed" in more:
            return
        for rank in range(world):
            if not gives(case, rank):
                continue
            own = [more["counts"][rank]] if "counts" in more else shape
            x = value(dtype, reduce, draws(number << 8, rank, math.prod(own)))
            self.tensors[f"{name}/in/{rank}"] = x.reshape(own)


def gives(case, rank):
    if case["op"] == "scatter":
        return rank == case["root"]
    return case["op"] != "send_recv" or rank == 0


def built_in():
    cases = Cases()
    for world in WORLDS:
        reductions(cases, world)
        movement(cases, world)
        refused(cases, world)
        if world > 1:
            large(cases, world)
    return cases


def reductions(cases, world):
    for dtype in FLOATS + INTEGERS:
        kinds = ["sum", "product", "min", "max"]
        kinds += ["avg"] if dtype in FLOATS else ["band", "bor", "bxor"]
        for reduce in kinds:
            for length in lengths(dtype, reduce):
                cases.add("all_reduce", world, dtype, [length], reduce)
                if length in (1, 17, 65):
                    cases.add("reduce", world, dtype, [length], reduce, length % world)
                    cases.add("reduce_scatter", world, dtype, [world * length], reduce)
    cases.add("all_reduce", world, "F32", [3, 5, 7], "sum")


def lengths(dtype, reduce):
    """The order of additions is what gloo may change with the length."""
    if reduce not in ("sum", "avg"):
        return [17]
    if dtype in ("F32", "F64"):
        more = [1023, 2053] if (dtype, reduce) == ("F32", "sum") else []
        return [0, 1, 2, 3, 5, 17, 65, 257] + more
    return [1, 17, 65]


def movement(cases, world):
    for dtype in FLOATS + INTEGERS:
        for length in (0, 1, 17, 131) if dtype == "F32" else (17,):
            for root in sorted({0, world - 1}):
                cases.add("broadcast", world, dtype, [length], root=root)
                cases.add("gather", world, dtype, [length], root=root)
                cases.add("scatter", world, dtype, [world * length], root=root)
            cases.add("all_gather", world, dtype, [length])
            cases.add("all_to_all", world, dtype, [world * length])
            if world > 1:
                cases.add("send_recv", world, dtype, [length], root=world - 1)


def refused(cases, world):
    """Calls that gloo does not carry out: the file says so, and a test holds us to an answer."""
    for op in REDUCES:
        root = 0 if op == "reduce" else None
        for dtype in INTEGERS:
            cases.add(op, world, dtype, [world * 2], "avg", root)
        for dtype in FLOATS:
            cases.add(op, world, dtype, [world * 2], "bxor", root)
        for dtype in ("U32", "U64"):
            cases.add(op, world, dtype, [world * 2], "sum", root)
    for dtype in ("U32", "U64"):
        cases.add("broadcast", world, dtype, [7], root=0)
        cases.add("all_gather", world, dtype, [7])
        cases.add("all_to_all", world, dtype, [world * 7])
    for op in ("broadcast", "gather"):
        cases.add(op, world, "F32", [6], root=world)
    cases.add("reduce", world, "F32", [6], "sum", world)
    cases.add("send_recv", world, "F32", [6], root=0)
    if world > 1:
        counts = [2 + 3 * (rank % 2) for rank in range(world)]
        cases.add("all_gather", world, "F32", [sum(counts)], counts=counts)
        cases.add("reduce_scatter", world, "F32", [2 * world + 1], "sum")
        # Of wider types it compares only bytes, and cuts through an element.
        cases.add("all_to_all", world, "U8", [2 * world + 1])


def large(cases, world):
    """Gloo cuts about 1 MiB to a segment, but at least two segments a rank.

    So from 2 * world MiB on there are more: the lengths are the last without and the first with
    them, and some of which the last segment is one element long, where another number of
    segments puts a rank's block elsewhere.
    """
    def short(mib):
        segments = world * -(-mib // world)
        return segments * ((mib * MIB // size - 1) // segments // 4 * 4) + 1

    for dtype in ("F32", "F64"):
        size = DTYPES[dtype].itemsize
        edge = 2 * world * MIB // size
        sums = [edge, edge + 1, short(2 * world + 1), short(20)]
        means = [5 * MIB // size + 7, short(20)]
        for length, reduce in [(n, "sum") for n in sums] + [(n, "avg") for n in means]:
            cases.add("all_reduce", world, dtype, [length], reduce, seed=length)


# --- running them

def run(case, x, rank, group):
    """The result of this rank, or None if it gets none."""
    world, op, root, dtype = case["world"], case["op"], case["root"], DTYPES[case["dtype"]]
    reduce = REDUCE[case["reduce"]] if case["reduce"] else None
    head, *rest = case["shape"]
    y = torch.empty(case["shape"], dtype=dtype) if x is None else x.clone()
    if op == "all_reduce":
        dist.all_reduce(y, reduce, group=group)
    elif op == "reduce":
        dist.reduce(y, root, reduce, group=group)
        return y if rank == root else None
    elif op == "broadcast":
        dist.broadcast(y, root, group=group)
    elif op == "all_gather" and "counts" in case:
        parts = [torch.empty([count], dtype=dtype) for count in case["counts"]]
        dist.all_gather(parts, y, group=group)
        return torch.cat(parts)
    elif op == "all_gather":
        whole = torch.empty([world * head, *rest], dtype=dtype)
        dist.all_gather_into_tensor(whole, y, group=group)
        return whole
    elif op == "gather":
        parts = [torch.empty_like(y) for _ in range(world)] if rank == root else None
        dist.gather(y, parts, root, group=group)
        return torch.cat(parts) if parts else None
    elif op == "scatter":
        part = torch.empty([head // world, *rest], dtype=dtype)
        parts = None
        if rank == root:
            parts = [x.clone() for x in y.reshape([world, head // world, *rest])]
        dist.scatter(part, parts, root, group=group)
        return part
    elif op == "reduce_scatter":
        part = torch.empty([head // world, *rest], dtype=dtype)
        dist.reduce_scatter_tensor(part, y, reduce, group=group)
        return part
    elif op == "all_to_all":
        whole = torch.empty_like(y)
        dist.all_to_all_single(whole, y, group=group)
        return whole
    elif op == "send_recv":
        if rank == 0:
            dist.send(y, root, group=group)
        elif rank == root:
            dist.recv(y, 0, group=group)
            return y
        return None
    else:
        raise SystemExit(f"{case['name']}: what is {op}?")
    return y


def rank_main(rank, size, folder, cases, tensors):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                            world_size=size, timeout=datetime.timedelta(seconds=120))
    # A smaller world is a group of the first ranks.
    groups = {world: dist.new_group(list(range(world))) for world in range(1, size + 1)}
    results, hashes, errors = {}, {}, {}
    for case in cases:
        name = case["name"]
        if rank >= case["world"]:
            continue
        try:
            if "seed" in case:
                x = drawn(case["seed"], rank, math.prod(case["shape"]), case["dtype"])
                x = x.reshape(case["shape"])
                y = run(case, x, rank, groups[case["world"]])
                hashes[name] = hashlib.sha256(raw(y)).hexdigest()
                continue
            y = run(case, tensors.get(f"{name}/in/{rank}"), rank, groups[case["world"]])
            if y is not None:
                results[f"{name}/out/{rank}"] = y
        except (RuntimeError, ValueError, TypeError) as error:
            errors[name] = f"{type(error).__name__}: {said(error)}"
    save(f"{folder}/{rank}", results, {"errors": json.dumps(errors), "hash": json.dumps(hashes)})
    dist.barrier()
    dist.destroy_process_group()


def said(error):
    """The first line, without what differs from run to run."""
    first, *_ = str(error).splitlines() or [""]
    return re.sub(r"^\[rank.*?\] | at 0x[0-9a-f]+", "", first).strip()


def record(cases, tensors):
    """Adds what gloo gives to `tensors`, and the answers to `cases`."""
    size = max(case["world"] for case in cases)
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        # Forked after the import: ranks start at once, and share the inputs.
        ranks = [multiprocessing.get_context("fork").Process(
            target=rank_main, args=(rank, size, folder, cases, tensors)) for rank in range(size)]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + MINUTES * 60
        for process in ranks:
            process.join(max(0, deadline - time.monotonic()))
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
        if any(code != 0 for code in codes):
            sys.exit(f"ranks failed, or were not done in {MINUTES} minutes; exit codes {codes}")
        for rank in range(size):
            outputs, meta = load(f"{folder}/{rank}")
            tensors |= outputs
            answers.append({key: json.loads(text) for key, text in meta.items()})
    for case in cases:
        name, own = case["name"], answers[:case["world"]]
        errors = [answer["errors"][name] for answer in own if name in answer["errors"]]
        if errors:
            case["error"] = errors[0]
            for rank in range(size):
                tensors.pop(f"{name}/out/{rank}", None)
        elif "seed" in case:
            case["hash"] = [answer["hash"][name] for answer in own]


# --- the file

def raw(tensor):
    tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def save(path, tensors, meta):
    header, blobs, at = {"__metadata__": meta}, [], 0
    tags = {dtype: tag for tag, dtype in DTYPES.items()}
    for name, tensor in sorted(tensors.items()):
        blob = raw(tensor)
        header[name] = {"dtype": tags[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def load(path):
    with open(path, "rb") as file:
        content = file.read()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:start])
    meta = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        dtype = DTYPES[entry["dtype"]]
        flat = torch.empty([(last - first) // dtype.itemsize], dtype=dtype)
        ctypes.memmove(flat.data_ptr(), content[start + first:start + last], last - first)
        tensors[name] = flat.reshape(entry["shape"])
    return tensors, meta


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if len(sys.argv) == 3:
        tensors, meta = load(sys.argv[2])
        cases = json.loads(meta["cases"])
    else:
        made = built_in()
        tensors, cases = made.tensors, made.list
    names = [case["name"] for case in cases]
    assert len(names) == len(set(names)), sorted(n for n in names if names.count(n) > 1)
    record(cases, tensors)
    save(sys.argv[1], tensors, {"torch": torch.__version__, "backend": "gloo",
                                "cases": json.dumps(cases, separators=(",", ":"))})
    refusals = [case for case in cases if "error" in case]
    print(f"torch {torch.__version__}: {len(cases)} cases, {len(refusals)} of them refused, "
          f"{os.path.getsize(sys.argv[1])} bytes")


if __name__ == "__main__":
    main()
