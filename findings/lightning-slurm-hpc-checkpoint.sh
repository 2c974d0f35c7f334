#!/usr/bin/env bash
# In a SLURM job, Lightning loads another run's checkpoint: hpc_ckpt_N.ckpt in the working directory replaces ckpt_path=None.
#
# Expected: without ckpt_path, fit starts from the weights of the model that it is given, and validate measures these weights.
# Real: `sbatch --signal=USR1@90` makes the default SLURM environment write hpc_ckpt_1.ckpt into default_root_dir, which is the working
#   directory unless it is set. From then on, every fit, validate and test without ckpt_path in that directory loads this file, even
#   if another run wrote it, and even in jobs that are not requeued. `fit` of a new model starts at the other run's step.
#
# Python 3.11.7, lightning 2.6.6, torch 2.14.1. Seen on 2026-11-27:
#   files: ['hpc_ckpt_1.ckpt']
#   a new run with another seed begins at step 2 with the other run's weights: True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet lightning==2.6.6 torch==2.14.1 numpy==2.4.6
cd "$work"
mkdir place
cd place
export SLURM_JOB_ID=1 SLURM_JOB_NAME=x SLURM_NTASKS=1 SLURM_NTASKS_PER_NODE=1 SLURM_NNODES=1 SLURM_JOB_NUM_NODES=1
export SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NODELIST=localhost
# a command named scontrol, which requeues jobs, that does nothing
printf '#!/bin/sh\n' >"$work/venv/bin/scontrol"
chmod +x "$work/venv/bin/scontrol"
PATH="$work/venv/bin:$PATH" "$work/venv/bin/python" -W ignore - <<'PYTHON'
import logging
import os
import signal

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Signal(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)


class Begins(L.Callback):
    def on_train_start(self, trainer, module):
        self.step, self.weight = trainer.global_step, module.layer.weight.detach().clone()


def trainer(*callbacks):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return L.Trainer(max_steps=6, limit_val_batches=0, accelerator="cpu", devices=1, callbacks=[*callbacks], **quiet)


torch.manual_seed(0)
trainer(Signal()).fit(BoringModel())
files = sorted(name for name in os.listdir() if name.endswith(".ckpt"))
print("files:", files)

torch.manual_seed(1)
begins = Begins()
other = BoringModel()
trainer(begins).fit(other)
theirs = torch.load("hpc_ckpt_1.ckpt", weights_only=True)["state_dict"]["layer.weight"]
same = torch.equal(begins.weight, theirs)
print(f"a new run with another seed begins at step {begins.step} with the other run's weights: {same}")

assert files == ["hpc_ckpt_1.ckpt"]
assert begins.step == 2 and same, "this finding is out of date"
PYTHON
