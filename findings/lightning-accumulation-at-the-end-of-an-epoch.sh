#!/usr/bin/env bash
# Lightning's accumulate_grad_batches makes the gradient of the last step of an epoch too small.
#
# Expected: a training step with accumulate_grad_batches=2 follows the mean gradient of its batches.
# Real: the Trainer divides every loss by accumulate_grad_batches. If the number of batches is no multiple of it, the last
#   step of an epoch has fewer batches, and the gradient is divided by too much: here by 2 for one batch. Nothing warns.
#
# Python 3.11.7, lightning 2.6.6, torch 2.14.1. Seen on 2026-11-28:
#   gradient of every batch: 1.0
#   2 batches a step, 5 batches an epoch: [1.0, 1.0, 0.5]
#   2 batches a step, 4 batches an epoch: [1.0, 1.0]
#   4 batches a step, 5 batches an epoch: [1.0, 0.25]
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet lightning==2.6.6 torch==2.14.1 numpy
cd "$work"
"$work/venv/bin/python" - 2>/dev/null <<'PYTHON'
import lightning as L
import torch
from torch.utils.data import DataLoader


class Slope(L.LightningModule):
    """The loss is weight · mean(batch), so its gradient is the mean of the batch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.gradients = []

    def training_step(self, batch, index):
        return self.weight * batch.mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(self.weight.grad.item())


print("gradient of every batch: 1.0")
found = {}
for count, batches in ((2, 5), (2, 4), (4, 5)):
    model = Slope()
    trainer = L.Trainer(
        max_epochs=1,
        accumulate_grad_batches=count,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(torch.ones(3 * batches), batch_size=3))
    found[count, batches] = model.gradients
    print(f"{count} batches a step, {batches} batches an epoch: {model.gradients}")
assert found == {(2, 5): [1, 1, 0.5], (2, 4): [1, 1], (4, 5): [1, 0.25]}, "this finding is out of date"
PYTHON
