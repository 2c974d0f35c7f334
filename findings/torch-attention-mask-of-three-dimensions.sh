#!/usr/bin/env bash
# On a CPU, scaled_dot_product_attention takes no fused kernel if its mask has three dimensions; with two or four it does.
#
# Expected: attn_mask may have any shape that broadcasts to the scores, (batch, heads, queries, keys), and the shape decides nothing
#   else. A bias of each head, (heads, queries, keys), is as fast as the same tensor with a first dimension of 1.
# Real: with (heads, queries, keys) torch computes whole attention maps (the "math" kernel). mask[None] has the same values and
#   takes the fused kernel. Nothing warns.
#
# Python 3.11.7, torch 2.14.1. Seen on 2026-11-28, one thread:
#   2 dimensions: _scaled_dot_product_flash_attention_for_cpu
#   3 dimensions: _scaled_dot_product_attention_math
#   4 dimensions: _scaled_dot_product_flash_attention_for_cpu
#   largest difference of the results of 3 and 4 dimensions below 1e-5: True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.14.1 numpy
cd "$work"
OMP_NUM_THREADS=1 "$work/venv/bin/python" - 2>/dev/null <<'PYTHON'
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import profile

torch.manual_seed(0)
query, key, value = (torch.randn(2, 4, 64, 16) for _ in range(3))
of_heads = torch.randn(64, 64).expand(4, 64, 64).contiguous()
masks = {2: of_heads[0], 3: of_heads, 4: of_heads[None]}
kernels, results = {}, {}
for dimensions, mask in masks.items():
    with torch.no_grad(), profile() as profiled:
        results[dimensions] = scaled_dot_product_attention(query, key, value, mask)
    (kernels[dimensions],) = [
        event.key.removeprefix("aten::") for event in profiled.key_averages() if "::_scaled_dot_product" in event.key
    ]
    print(f"{dimensions} dimensions: {kernels[dimensions]}")
same = bool((results[3] - results[4]).abs().max() < 1e-5)
print(f"largest difference of the results of 3 and 4 dimensions below 1e-5: {same}")
fused = "_scaled_dot_product_flash_attention_for_cpu"
assert same
assert kernels == {2: fused, 3: "_scaled_dot_product_attention_math", 4: fused}, "this finding is out of date"
PYTHON
