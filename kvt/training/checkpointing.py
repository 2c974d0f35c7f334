"""What a run saves while it trains: its configuration, the best checkpoint and the last, each whole or not at all."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from kvt.system.errors import UserError
from kvt.system.files import atomically
from kvt.training.callbacks import has_diverged
from kvt.training.load_checkpoint import read_checkpoint
from kvt.training.run_dir import log_dir


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place, and moves it there when all of it is on the disk.

    Lightning's own way goes through the folder for temporary files. Where that lies on another disk, a process that is
    killed leaves half a checkpoint in place of the last good one.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Writes the file; one in the cloud as Lightning does."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with atomically(Path(path)) as part, part.open("wb") as file:
            torch.save(checkpoint, file)  # given a path, it does not say what went wrong

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads a file as any that a user hands in: whole, and without running code in it."""
        return read_checkpoint(path)


class BestCheckpoint(ModelCheckpoint):
    """What was best by a metric so far: best.ckpt.

    ModelCheckpoint forgets it where its folder has moved, or has another path on this machine.

    Args:
        monitor: the metric.
        mode: "max" or "min".
    """

    def __init__(self, monitor: str, mode: str) -> None:
        super().__init__(
            monitor=monitor, mode=mode, filename="best", enable_version_counter=False, save_on_train_epoch_end=False
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over how good the best was, if it is here, but no path: ModelCheckpoint deletes what it names.

        Raises:
            UserError: the run goes on in its own folder, where the best is no more.
        """
        score = state_dict["best_model_score"]
        path = os.path.join(str(self.dirpath), f"best{self.FILE_EXTENSION}")
        if score is None:
            return
        if not os.path.isfile(path):
            if os.path.isfile(last := os.path.join(str(self.dirpath), f"last{self.FILE_EXTENSION}")):
                raise UserError(f"{path} is gone, which the run is judged by: {last} goes on elsewhere, by --ckpt_path")
            return
        self.best_model_path = self.kth_best_model_path = path
        self.best_model_score = self.current_score = self.kth_value = score
        self.best_k_models = {path: score}

    def check_monitor_top_k(self, trainer: L.Trainer, current: Tensor | None = None) -> bool:
        """Whether this is the best so far, which nothing is that has diverged: a model of NaN has an accuracy, too."""
        return not has_diverged(trainer) and super().check_monitor_top_k(trainer, current)


class LastCheckpoint(ModelCheckpoint):
    """Where a run goes on that was killed or stopped: last.ckpt, after every validation and where a run is stopped.

    ModelCheckpoint's own `save_last` follows its best checkpoint, which may be epochs old.

    Args:
        validates: whether the run does; else it is saved after every epoch.
    """

    def __init__(self, validates: bool) -> None:
        super().__init__(
            filename="last", enable_version_counter=False, save_on_train_epoch_end=not validates, save_on_exception=True
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes nothing over: the file is always the same."""

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Saves where the run was asked to stop, between two batches; other exceptions leave half a step behind."""
        if isinstance(exception, SIGTERMException):
            super().on_exception(trainer, pl_module, exception)


class SaveConfig(L.Callback):
    """Writes the run's config.yaml, and puts settings of the Trainer into its checkpoints.

    Args:
        config: the YAML.
        trainer: the settings, those of `kvt.training.load_checkpoint.TRAINER`.
    """

    def __init__(self, config: str, trainer: Mapping[str, Any]) -> None:
        self.config, self.trainer = config, dict(trainer)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Writes the file, unless a run goes on that has its own."""
        if stage != "fit" or not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if (folder := log_dir(trainer)) is None:
            return
        path = Path(folder) / "config.yaml"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomically(path) as part:
                part.write_text(self.config, encoding="utf-8")

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the settings."""
        checkpoint["trainer"] = self.trainer
