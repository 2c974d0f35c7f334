#!/usr/bin/env bash
# torchmetrics' MeanMetric ignores the weights of its values if nan_strategy="disable".
#
# Expected: nan_strategy decides what happens to NaN. For values without NaN, the mean is the same with every strategy.
# Real: with "disable", which avoids a check that makes the CPU wait for the GPU, update(value, weight) gives every value
#   the weight 1. The mean loss over batches of different sizes is then the unweighted mean of the batches. Nothing warns.
#
# Python 3.11.7, torchmetrics 1.9.0, torch 2.14.1. Seen on 2026-11-28:
#   weighted mean: 2.0
#   warn: 2.0
#   ignore: 2.0
#   disable: 3.0
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torchmetrics==1.9.0 torch==2.14.1 numpy
cd "$work"
"$work/venv/bin/python" - 2>/dev/null <<'PYTHON'
import torch
from torchmetrics.aggregation import MeanMetric

losses, rows = torch.tensor([1.0, 5.0]), torch.tensor([3.0, 1.0])  # two batches, of 3 rows and of 1 row
print("weighted mean:", (losses * rows).sum().item() / rows.sum().item())
means = {}
for strategy in ("warn", "ignore", "disable"):
    mean = MeanMetric(nan_strategy=strategy)
    for loss, size in zip(losses, rows):
        mean.update(loss, size)
    means[strategy] = mean.compute().item()
    print(f"{strategy}: {means[strategy]}")
assert means == {"warn": 2.0, "ignore": 2.0, "disable": 3.0}, "this finding is out of date"
PYTHON
