#!/usr/bin/env bash
# safetensors.numpy.save_file writes the numbers of a transposed array in the wrong order, without an error.
#
# Expected: load_file returns the array that was saved, or save_file rejects an array that is not C-contiguous, as safetensors.torch
#   does.
# Real: the file has the shape of the array, but the numbers in the order of its memory. A Linear weight that was transposed for
#   another framework is scrambled when it is loaded. numpy.ascontiguousarray before saving avoids this.
#
# Python 3.11.7, safetensors 0.8.0, numpy 2.4.6, Linux x86-64. Seen on 2026-11-27:
#   saved  [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
#   loaded [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
#   with ascontiguousarray: equal
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet safetensors==0.8.0 numpy==2.4.6
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import numpy as np
from safetensors.numpy import load_file, save_file

weight = np.arange(6, dtype=np.float32).reshape(2, 3).T
save_file({"weight": weight}, "transposed.safetensors")
loaded = load_file("transposed.safetensors")["weight"]
print("saved ", weight.tolist())
print("loaded", loaded.tolist())

save_file({"weight": np.ascontiguousarray(weight)}, "contiguous.safetensors")
equal = np.array_equal(load_file("contiguous.safetensors")["weight"], weight)
print("with ascontiguousarray:", "equal" if equal else "not equal")

assert loaded.shape == weight.shape and equal
assert not np.array_equal(loaded, weight), "the array comes back as it was: this finding is out of date"
PYTHON
