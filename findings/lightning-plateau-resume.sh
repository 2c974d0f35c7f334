#!/usr/bin/env bash
# A resumed run with ReduceLROnPlateau has another learning rate than an uninterrupted run.
#
# Expected: the checkpoint that ModelCheckpoint writes at the end of epoch 3 has the scheduler's state after epoch 3. Then a run of 3 epochs,
#   resumed to 6, equals a run of 6 epochs.
# Real: the checkpoint is written at the end of the validation, before Lightning steps the scheduler for that epoch. The resumed run begins
#   with epoch 4 and never does this step. If the validation loss does not improve, its learning rate is twice as large from then on.
#
# Python 3.11.7, lightning 2.6.6, torch 2.14.1. Seen on 2026-11-27:
#   6 epochs: [1.0, 1.0, 0.5, 0.25, 0.125, 0.0625]
#   3 epochs, resumed: [1.0, 1.0, 0.5] [0.5, 0.25, 0.125]
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet lightning==2.6.6 torch==2.14.1 numpy==2.4.6
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import logging

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.rates = []

    def validation_step(self, batch, number):
        self.log("val_loss", torch.tensor(1.0))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    def on_train_epoch_start(self):
        self.rates.append(self.optimizers().param_groups[0]["lr"])


def fit(epochs, resume=None):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    checkpoint = ModelCheckpoint("checkpoints", filename="{epoch}", save_top_k=-1)
    trainer = L.Trainer(max_epochs=epochs, limit_train_batches=4, limit_val_batches=2, callbacks=[checkpoint], **quiet)
    trainer.fit(model := Model(), ckpt_path=resume)
    return model.rates


first = fit(3)
resumed = fit(6, "checkpoints/epoch=2.ckpt")
whole = fit(6)
print("6 epochs:", whole)
print("3 epochs, resumed:", first, resumed)

assert whole == [1.0, 1.0, 0.5, 0.25, 0.125, 0.0625]
assert first + resumed == [1.0, 1.0, 0.5, 0.5, 0.25, 0.125], "this finding is out of date"
PYTHON
