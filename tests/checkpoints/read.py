"""Reads a checkpoint by Python's standard library alone, and by the package safetensors too where it
is installed; prints what is in it as JSON.

    python3 read.py FILE
"""

import json
import struct
import sys
from pathlib import Path

FORMATS = {"F64": ("d", 8), "F32": ("f", 4), "I64": ("q", 8), "BOOL": ("?", 1)}


def read(path):
    """Every tensor as (type, shape, numbers), and the metadata."""
    data = Path(path).read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        letter, size = FORMATS[entry["dtype"]]
        start, end = entry["data_offsets"]
        numbers = struct.unpack_from(f"<{(end - start) // size}{letter}", data, 8 + length + start)
        tensors[name] = (entry["dtype"], entry["shape"], list(numbers))
    return tensors, metadata


def read_with_package(path, tensors):
    """Compares with what the package makes of it; says whether there was one."""
    try:
        from safetensors.numpy import load_file
    except ImportError:
        try:
            from safetensors.torch import load_file
        except ImportError:
            return False
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys(), (loaded.keys(), tensors.keys())
    for name, (_, shape, numbers) in tensors.items():
        assert list(loaded[name].shape) == shape, name
        assert loaded[name].flatten().tolist() == numbers, name
    return True


def main():
    path = sys.argv[1]
    tensors, metadata = read(path)
    package = read_with_package(path, tensors)
    numbers = {name: json.loads(text) for name, text in metadata.items()}
    json.dump({"tensors": tensors, "numbers": numbers, "package": package}, sys.stdout)


main()
