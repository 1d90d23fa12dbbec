#!/usr/bin/env bash
# Makes a Python that has PyTorch with gloo, and prints the interpreter's path as its last line:
#
#     LOCKSTEP_TORCH="$(tests/gloo/torch_env.sh | tail -n 1)" cargo test -p lockstep-tests live
#
# It goes to LOCKSTEP_TORCH_ENV, or below the user's cache folder: outside the clone, so that it is
# made once (one to three minutes, 0.5 GB to fetch, 1.4 GB on disk). Nothing is installed elsewhere.
# What is half made has another name, so a run that is cut short is simply started again.
#
# Exit codes: 3 where PyTorch cannot be had here (the reason is on standard error), 2 if the folder
# that is asked for holds something else.
set -euo pipefail

readonly TORCH=2.13.0
readonly NEEDS=(
    numpy typing-extensions filelock sympy mpmath networkx jinja2 markupsafe fsspec setuptools
)

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}
folder=$(realpath -m "${LOCKSTEP_TORCH_ENV:-$cache/lockstep/torch-$TORCH}")
making=$folder.making
log=$folder.log

say() { printf 'torch_env: %s\n' "$*" >&2; }
cannot() {
    say "PyTorch cannot be had here: $*"
    say "Where it is installed already, set LOCKSTEP_TORCH to its interpreter."
    exit 3
}

# Whether the folder has been finished, for a base Python that is still there.
ready() {
    "$folder/bin/python" -c '
import importlib.util, sys
sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null
}

# Runs a step with its output in the log, of which the end is shown if it fails.
step() {
    local what=$1 start=$SECONDS
    shift
    "$@" >>"$log" 2>&1 || {
        tail -n 5 "$log" >&2
        rm -rf "$making"
        cannot "$what failed (all of it: $log)"
    }
    say "$what: $((SECONDS - start)) s"
}

finish() {
    printf '%s\n' "$folder/bin/python"
    exit 0
}

ready && finish

[ "$(uname -sm)" = "Linux x86_64" ] || cannot "the wheel is for Linux x86_64, this is $(uname -sm)"
for tool in python3 gcc readelf flock; do
    command -v "$tool" >/dev/null || cannot "there is no $tool"
done
python3 -c 'import venv, ensurepip' 2>/dev/null ||
    cannot "python3 makes no environments (Debian: apt-get install python3-venv)"
[ ! -e "$folder" ] || [ -f "$folder/pyvenv.cfg" ] || {
    say "$folder holds something else: move it, or set LOCKSTEP_TORCH_ENV"
    exit 2
}
mkdir -p "$(dirname "$folder")" && : >>"$folder.lock" || cannot "$folder cannot be made"

# One at a time; the lock goes with the process, however that ends.
exec 9>"$folder.lock"
flock 9
ready && finish
[ ! -e "$folder" ] || say "$folder has lost its Python: it is made again"
rm -rf "$folder" "$making"
: >"$log"

say "PyTorch $TORCH goes to $folder"
pip=("$making/bin/python" -m pip install --quiet --no-cache-dir --no-deps --only-binary :all:)
step "the environment" python3 -m venv "$making"
step "what PyTorch needs" "${pip[@]}" "${NEEDS[@]}"
# Alone: the CUDA packages that it asks for have no use here.
step "PyTorch" "${pip[@]}" "torch==$TORCH"
step "stubs for the CUDA libraries" "$making/bin/python" "$here/cuda_stubs.py"
step "a first import" "$making/bin/python" -c "
import torch, torch.distributed
assert torch.__version__.startswith('$TORCH'), torch.__version__
assert torch.distributed.is_gloo_available()"
# Only bin/python is used, which finds its packages wherever the folder stands.
mv -T "$making" "$folder"
finish
