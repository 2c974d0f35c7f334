#!/usr/bin/env bash
# torch's fused SGD fails if a weight gets its first gradient later than other weights. Its other implementations do not fail.
#
# Expected: a weight without a gradient is skipped, and its momentum buffer is created at its first step, as without fused=True.
# Real: if one weight has a momentum buffer and another weight has none, step() of SGD(fused=True, momentum=0.9) raises TypeError. This
#   happens if a part of a model is used or unfrozen later than the rest, or if a layer is replaced in a restored optimiser.
#
# Python 3.11.7, torch 2.14.1. Seen on 2026-11-27:
#   {'fused': False, 'foreach': False}: buffers [1.9, 1.0]
#   {'foreach': True}: buffers [1.9, 1.0]
#   {'fused': True}: TypeError: expected Tensor as element 1 in argument 2, but got NoneType
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.14.1 numpy==2.4.6
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import torch


def two_steps(**how):
    early, late = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = torch.optim.SGD([early, late], lr=0.1, momentum=0.9, **how)
    early.grad = torch.ones(1)
    optimizer.step()
    late.grad = torch.ones(1)
    try:
        optimizer.step()
    except TypeError as error:
        return f"TypeError: {error}"
    return f"buffers {[round(optimizer.state[weight]['momentum_buffer'].item(), 4) for weight in (early, late)]}"


said = {str(how): two_steps(**how) for how in ({"fused": False, "foreach": False}, {"foreach": True}, {"fused": True})}
for how, result in said.items():
    print(f"{how}: {result}")

plain, foreach, fused = said.values()
assert plain == foreach == "buffers [1.9, 1.0]"
assert fused.startswith("TypeError: expected Tensor"), "this finding is out of date"
PYTHON
