#!/usr/bin/env bash
# torch's FlopCounterMode counts 0 for scaled_dot_product_attention on a CPU, so a transformer seems cheaper than it is.
#
# Expected: attention of n queries and keys counts 4 · heads · n² · head_dim floating-point operations, forward.
# Real: on a CPU, the default kernel is _scaled_dot_product_flash_attention_for_cpu, for which the counter has no formula. It counts 0
#   for every length, without a warning. With SDPBackend.MATH the same call is counted in full. So a count depends on the kernel of
#   attention, and a count on a CPU differs from a count of the same model on a GPU.
#
# Python 3.11.7, torch 2.14.1. Seen on 2026-11-27:
#   default kernel: {64: 0, 512: 0}
#   SDPBackend.MATH: {64: 524288, 512: 33554432}
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.14.1 numpy==2.4.6
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

HEADS, WIDTH = 2, 16


def count(length):
    q = torch.randn(1, HEADS, length, WIDTH)
    with FlopCounterMode(display=False) as counter:
        F.scaled_dot_product_attention(q, q, q)
    return counter.get_total_flops()


default = {n: count(n) for n in (64, 512)}
with sdpa_kernel(SDPBackend.MATH):
    plain = {n: count(n) for n in (64, 512)}
print("default kernel:", default)
print("SDPBackend.MATH:", plain)

assert plain == {n: 4 * HEADS * n * n * WIDTH for n in (64, 512)}
assert default == {64: 0, 512: 0}, "the counter has a formula for the kernel: this finding is out of date"
PYTHON
