#!/usr/bin/env bash
# Lightning's CSVLogger deletes the metrics of a run that is resumed in the folder of its version.
#
# Expected: CSVLogger(DIR, name, version) with the version of an earlier run appends to its metrics.csv, as TensorBoardLogger appends events.
# Real: the new process deletes metrics.csv when it first logs. A warning "Experiment logs directory ... exists and is not empty" says that
#   files may be overwritten, even if training continues from ckpt_path. The metrics of the first part are lost.
#
# Python 3.11.7, lightning 2.6.6, torch 2.14.1. Seen on 2026-11-27:
#   steps of the first part: [1, 3, 5, 7]
#   steps after resuming: [9, 11, 13, 15]
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet lightning==2.6.6 torch==2.14.1 numpy==2.4.6
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import csv
import logging

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Logs(BoringModel):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        self.log("loss", output["loss"])
        return output


def train(epochs, ckpt_path=None):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "accelerator": "cpu"}
    logger = CSVLogger(".", "run", version=0)
    trainer = L.Trainer(max_epochs=epochs, limit_train_batches=8, limit_val_batches=0, log_every_n_steps=2, logger=logger, **quiet)
    trainer.fit(Logs(), ckpt_path=ckpt_path)
    trainer.save_checkpoint("last.ckpt")
    with open("run/version_0/metrics.csv") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


first, resumed = train(1), train(2, "last.ckpt")
print("steps of the first part:", first)
print("steps after resuming:", resumed)

assert first == [1, 3, 5, 7]
assert resumed == [9, 11, 13, 15], "this finding is out of date"
PYTHON
