#!/usr/bin/env bash
# torchmetrics' MetricCollection reports one metric's number for another, if their states are equal after the first batch.
#
# Expected: a collection computes what its metrics compute alone.
# Real: after the first update, a collection puts metrics of equal states into one group, and updates only the first metric
#   of a group from then on. It compares values, not settings. Here one accuracy ignores padding and the other does not.
#   The first batch has no padding, so their states are equal, and the collection never ignores padding. Nothing warns.
#   With compute_groups=False, or with padding in the first batch, both are right.
#
# Python 3.11.7, torchmetrics 1.9.0, torch 2.14.1. Seen on 2026-11-28:
#   alone: {'all tokens': 0.75, 'words': 1.0}
#   collection: {'all tokens': 0.75, 'words': 0.75}
#   compute_groups=False: {'all tokens': 0.75, 'words': 1.0}
#   batches the other way round: {'all tokens': 0.75, 'words': 1.0}
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torchmetrics==1.9.0 torch==2.14.1 numpy
cd "$work"
"$work/venv/bin/python" - 2>/dev/null <<'PYTHON'
import torch
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

PAD = 0
batches = [  # predictions and targets; the second batch has two padded places
    (torch.tensor([1, 2, 1, 2]), torch.tensor([1, 2, 1, 2])),
    (torch.tensor([1, 1, 1, 2]), torch.tensor([PAD, PAD, 1, 2])),
]


def metrics():
    return {
        "all tokens": MulticlassAccuracy(3, average="micro"),
        "words": MulticlassAccuracy(3, average="micro", ignore_index=PAD),
    }


def computed(collection, batches):
    for predictions, targets in batches:
        collection.update(predictions, targets)
    return {name: value.item() for name, value in collection.compute().items()}


alone = {}
for name, metric in metrics().items():
    for predictions, targets in batches:
        metric.update(predictions, targets)
    alone[name] = metric.compute().item()
found = {
    "alone": alone,
    "collection": computed(MetricCollection(metrics()), batches),
    "compute_groups=False": computed(MetricCollection(metrics(), compute_groups=False), batches),
    "batches the other way round": computed(MetricCollection(metrics()), batches[::-1]),
}
for name, values in found.items():
    print(f"{name}: {values}")
assert alone == {"all tokens": 0.75, "words": 1.0}
assert found["collection"] == {"all tokens": 0.75, "words": 0.75}, "this finding is out of date"
assert found["compute_groups=False"] == found["batches the other way round"] == alone
PYTHON
