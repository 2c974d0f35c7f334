"""Callbacks that save a run's checkpoints, best.ckpt and last.ckpt, and a checkpoint IO that writes them atomically."""

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

from kvt.run.checkpoint_files import read_checkpoint
from kvt.run.recorder import Recorder
from kvt.run.start import StartRun
from kvt.system.errors import UserError
from kvt.system.files import atomically
from kvt.system.quoting import shell_word
from kvt.tasks import Task


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoint IO that writes a temporary file beside the path, and renames it once it is complete on the disk.

    Lightning writes to the system's folder for temporary files first. If that folder is on another disk, a process that
    is killed leaves half a checkpoint in place of the last complete checkpoint.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with atomically(Path(path)) as part, part.open("wb") as file:
            torch.save(checkpoint, file)  # given a path, torch would hide the operating system's error

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return read_checkpoint(path)


class RunCheckpoint(ModelCheckpoint):
    """A `ModelCheckpoint` with a fixed file name, in the folder of the run that `claim`, a `StartRun`, has made."""

    def __init__(self, claim: StartRun, **settings: Any) -> None:
        self.claim = claim
        super().__init__(enable_version_counter=False, **settings)

    @cached_property
    def state_key(self) -> str:  # the Trainer asks for it six times a step
        return super().state_key

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.claim.folder:
            self.dirpath = str(self.claim.folder.checkpoints)
        super().setup(trainer, pl_module, stage)


class BestCheckpoint(RunCheckpoint):
    """Saves best.ckpt, the checkpoint with the best value of the task's `monitor`, the latest of several equal values.

    If a run's folder has moved and the run is resumed, this callback still knows the best checkpoint. Lightning's
    `ModelCheckpoint` forgets it.
    """

    def __init__(self, claim: StartRun, recorder: Recorder, task: Task) -> None:
        self.recorder = recorder
        mode = {"more": "max", "less": "min"}[str(task.monitored().better)]
        super().__init__(claim, monitor=task.monitor, mode=mode, filename="best", save_on_train_epoch_end=False)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best score, if best.ckpt is in the run's folder; paths in the state are ignored."""
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
        """Return whether no earlier checkpoint is better; of equal checkpoints, the last has trained for longest.

        A checkpoint whose metric is NaN is saved only if there is no other. A run that has diverged saves no further
        best checkpoint, even if its accuracy is a number.
        """
        better = super().check_monitor_top_k(trainer, current)
        equal = trainer.strategy.reduce_boolean_decision(bool(current == self.kth_value))
        return self.recorder.diverged is None and (better or equal)


class LastCheckpoint(RunCheckpoint):
    """Saves last.ckpt, from which a run resumes, after every validation and when the run is stopped.

    `save_last` of `ModelCheckpoint` would copy its best checkpoint, which may be epochs old.

    Args:
        validates: whether the run validates; a run without validation saves last.ckpt after every epoch.
    """

    def __init__(self, claim: StartRun, validates: bool) -> None:
        super().__init__(claim, filename="last", save_on_train_epoch_end=not validates, save_on_exception=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore nothing, because the path is always the same."""

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Save if a signal has stopped the run between two steps; other exceptions may leave a step incomplete."""
        if isinstance(exception, SIGTERMException):
            super().on_exception(trainer, pl_module, exception)
