"""How a run saves its checkpoints: whole files only, the best by a metric, and the last to resume from."""

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
    """Writes a checkpoint to a temporary file beside its path, and renames it once all of it is on the disk.

    Lightning goes through the system's folder for temporary files. If that is on another disk, a process that is killed
    leaves half a checkpoint in place of the last good one.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with atomically(Path(path)) as part, part.open("wb") as file:
            torch.save(checkpoint, file)  # with a path, torch hides the system's error

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return read_checkpoint(path)


class RunCheckpoint(ModelCheckpoint):
    """Saves a checkpoint of a fixed name in the folder of its run, which is claimed before it is set up."""

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
    """Keeps the best checkpoint by the task's `monitor`, the last of equally good ones: best.ckpt.

    ModelCheckpoint forgets the best one if its folder has moved, or has another path on this machine.
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
        """Return whether no earlier one is better: of equal ones, the last has learned for longest.

        One whose metric is NaN is better than none, and never than another. None is of a run that has diverged, which
        may still have an accuracy.
        """
        better = super().check_monitor_top_k(trainer, current)
        equal = trainer.strategy.reduce_boolean_decision(bool(current == self.kth_value))
        return self.recorder.diverged is None and (better or equal)


class LastCheckpoint(RunCheckpoint):
    """Saves last.ckpt, from which a run resumes, after every validation and when the run is stopped.

    ModelCheckpoint's own `save_last` follows its best checkpoint, which may be epochs old.

    Args:
        validates: whether the run validates; else it is saved after every epoch.
    """

    def __init__(self, claim: StartRun, validates: bool) -> None:
        super().__init__(claim, filename="last", save_on_train_epoch_end=not validates, save_on_exception=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore nothing: the path is always the same."""

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Save if the run is stopped between two steps; other exceptions may leave half a step."""
        if isinstance(exception, SIGTERMException):
            super().on_exception(trainer, pl_module, exception)
