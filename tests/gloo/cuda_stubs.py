"""Lets `import torch` work without CUDA and without the nvidia-* packages.

The Linux x86-64 wheel of torch is linked against CUDA libraries that no CPU user calls. This
writes a stub for each into torch's own lib folder: the right soname, and each symbol that torch
asks of it, with its version, as a function that returns 100, CUDA's "no device".

usage: PYTHON cuda_stubs.py       for the torch of that PYTHON; gcc and readelf are needed
"""
import collections
import os
import pathlib
import re
import subprocess
import sysconfig
import tempfile

CUDA = re.compile(r"lib(cu|nv|nccl)")
# The driver's library: only one that is loaded on demand asks for it.
DRIVER = "libcuda.so.1"
# Where symbols without a version belong, by how their names begin.
PREFIXES = {
    "libcublas": "cublas", "libcublasLt": "cublasLt", "libcudart": "cuda", "libcudnn": "cudnn",
    "libcufft": "cufft", "libcufile": "cuFile", "libcupti": "cupti", "libcurand": "curand",
    "libcusolver": "cusolver", "libcusparse": "cusparse", "libcusparseLt": "cusparseLt",
    "libnccl": "nccl", "libnvrtc": "nvrtc", "libnvshmem_host": "nvshmem",
}


def main():
    folder = pathlib.Path(sysconfig.get_paths()["purelib"], "torch", "lib")
    libraries = [Library(path) for path in sorted(folder.glob("*.so*"))
                 if not CUDA.match(path.name)]
    defined = set().union(*(library.defined for library in libraries))
    needed = set().union(*(library.needed for library in libraries))
    sonames = sorted(name for name in needed if CUDA.match(name) and name != DRIVER)
    symbols = {soname: set() for soname in sonames}
    for library in libraries:
        for name, version in library.undefined:
            owner = library.owners.get(version) or by_prefix(name, sonames)
            if name not in defined and owner in symbols:
                symbols[owner].add((name, version))
    for soname in sonames:
        build(folder / soname, sorted(symbols[soname]))
        print(f"{soname}: {len(symbols[soname])} symbols")


class Library:
    """What the dynamic section of a shared library says."""

    def __init__(self, path):
        self.needed = re.findall(r"NEEDED.*\[([^\]]+)\]", readelf("-d", path))
        self.owners = {}              # of a symbol version: the library that has it
        file = None
        for line in readelf("-V", path).splitlines():
            if found := re.search(r"\bFile: (\S+)", line):
                file = found[1]
            elif file and (found := re.search(r"\bName: (\S+)\s+Flags", line)):
                self.owners.setdefault(found[1], file)
        self.defined, self.undefined = set(), set()
        for line in readelf("--dyn-syms", path).splitlines():
            fields = line.split()
            if len(fields) < 8 or not re.fullmatch(r"\d+:", fields[0]):
                continue
            binding, section, symbol = fields[4], fields[6], fields[7]
            name, _, version = symbol.partition("@")
            if section != "UND":
                self.defined.add(name)
            elif binding != "WEAK":
                self.undefined.add((name, version.lstrip("@")))


def readelf(option, path):
    return subprocess.run(["readelf", "-W", option, path], check=True, text=True,
                          capture_output=True, env={**os.environ, "LC_ALL": "C"}).stdout


def by_prefix(name, sonames):
    prefix = {soname: PREFIXES.get(soname.split(".so")[0]) for soname in sonames}
    fitting = [soname for soname in sonames if prefix[soname] and name.startswith(prefix[soname])]
    return max(fitting, key=lambda soname: len(prefix[soname]), default=None)


def build(path, symbols):
    versions = collections.defaultdict(list)
    for name, version in symbols:
        versions[version].append(name)
    versions.pop("", None)
    code = "".join(f"int {name}(void) {{ return 100; }}\n" for name, _ in symbols)
    script = "".join(f"{version} {{ global: {'; '.join(names)}; }};\n"
                     for version, names in versions.items())
    with tempfile.TemporaryDirectory() as folder:
        source, versions_file = pathlib.Path(folder, "stub.c"), pathlib.Path(folder, "versions")
        source.write_text(code)
        versions_file.write_text(script)
        command = ["gcc", "-shared", "-fPIC", "-w", "-O1", "-fno-builtin",
                   f"-Wl,-soname,{path.name}", "-o", path, source]
        if script:
            command.append(f"-Wl,--version-script,{versions_file}")
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
