#!/usr/bin/env bash
# Copies of a CPU model's gradients, made by weight.grad.cpu(), change with the model when it moves to another device or type.
#
# Expected: {name: weight.grad.cpu() for name, weight in model.named_parameters()} keeps CPU tensors, to be compared with those of a GPU.
# Real: on a CPU, .cpu() returns the tensor itself. model.to(...) moves gradients in place, by assigning to weight.grad.data, so the kept
#   tensors get the new device and type. Weights behave differently: weight.detach().cpu() does not change. A clone() is needed.
#
# Python 3.11.7, torch 2.14.1, numpy 2.4.6. Seen on 2026-11-27:
#   kept gradient: torch.float64, clone of the gradient: torch.float32, kept weight: torch.float32
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.14.1 numpy==2.4.6
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import torch

model = torch.nn.Linear(2, 2)
model(torch.ones(1, 2)).sum().backward()
kept, clone, weight = model.weight.grad.cpu(), model.weight.grad.clone(), model.weight.detach().cpu()
model.to(torch.float64)  # a type in place of a GPU
print(f"kept gradient: {kept.dtype}, clone of the gradient: {clone.dtype}, kept weight: {weight.dtype}")

assert (clone.dtype, weight.dtype) == (torch.float32, torch.float32)
assert kept.dtype == torch.float64, "this finding is out of date"
PYTHON
