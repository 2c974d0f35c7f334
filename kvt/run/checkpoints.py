"""Callbacks that save best.ckpt and last.ckpt of a run, and a checkpoint IO that writes files atomically."""

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from kvt.run.lightning_internals import OutsideSteps
from kvt.run.load_checkpoint import read_checkpoint
from kvt.run.recorder import Recorder
from kvt.system.errors import UserError
from kvt.system.files import atomically
from kvt.system.quoting import shell_word
from kvt.tasks import Task


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoint IO that writes a temporary file beside the path, and renames the file when the disk has all of it.

    Lightning writes to the system's folder for temporary files first. If that folder is on another disk, a killed
    process leaves half a checkpoint at the path of the last complete checkpoint.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with atomically(Path(path)) as part, part.open("wb") as file:
            torch.save(checkpoint, file)  # torch.save(checkpoint, path) would hide errors of the disk

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return read_checkpoint(path)


class RunCheckpoint(OutsideSteps, ModelCheckpoint):
    """A `ModelCheckpoint` with a fixed file name."""

    @cached_property
    def state_key(self) -> str:  # cached, because the Trainer reads the key in every step
        return super().state_key


class BestCheckpoint(RunCheckpoint):
    """Saves best.ckpt, the checkpoint with the best value of the task's `monitor`; of equal values, the latest.

    If a user moves the folder of a run and resumes the run, this callback still knows the best checkpoint. Lightning's
    `ModelCheckpoint` would forget it.
    """

    def __init__(self, recorder: Recorder, task: Task) -> None:
        self.recorder = recorder
        mode = {"more": "max", "less": "min"}[str(task.monitored().better)]
        how: Any = {"save_on_train_epoch_end": False, "enable_version_counter": False}
        super().__init__(monitor=task.monitor, mode=mode, filename="best", **how)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best score if best.ckpt is in the run's folder. Paths in `state_dict` have no effect."""
        score = state_dict["best_model_score"]
        path = os.path.join(str(self.dirpath), f"best{self.FILE_EXTENSION}")
        if score is None:
            return
        if not os.path.isfile(path):
            if os.path.isfile(last := os.path.join(str(self.dirpath), f"last{self.FILE_EXTENSION}")):
                raise UserError(f"{path} is missing: start a new run from --ckpt_path {shell_word(last)}")
            return
        self.best_model_path = self.kth_best_model_path = path
        self.best_model_score = self.current_score = self.kth_value = score
        self.best_k_models = {path: score}

    def check_monitor_top_k(self, trainer: L.Trainer, current: Tensor | None = None) -> bool:
        """Return whether the metric is better than, or equal to, the metrics of all earlier checkpoints.

        A checkpoint with a metric of NaN is saved only if no checkpoint exists. A run that has diverged saves no more
        best checkpoints, even if the accuracy of the run is a number.
        """
        better = super().check_monitor_top_k(trainer, current)
        equal = trainer.strategy.reduce_boolean_decision(bool(current == self.kth_value))
        return self.recorder.diverged is None and (better or equal)


class LastCheckpoint(RunCheckpoint):
    """Saves last.ckpt, from which a run resumes, after every validation and when a signal stops the run.

    `ModelCheckpoint(save_last=…)` would copy the best checkpoint, which may be epochs old.

    Args:
        validates: whether the run validates. A run without validation saves last.ckpt after every epoch.
    """

    def __init__(self, validates: bool) -> None:
        how: Any = {"save_on_train_epoch_end": not validates, "enable_version_counter": False}
        super().__init__(filename="last", save_on_exception=True, **how)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore nothing, because last.ckpt has the same path in every run."""

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Save if a signal has stopped the run between two steps; other exceptions may leave a step incomplete."""
        if isinstance(exception, SIGTERMException):
            super().on_exception(trainer, pl_module, exception)
