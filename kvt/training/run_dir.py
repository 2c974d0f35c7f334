"""A run's folder, lightning_logs/<task>/<attn>/version_N: its lock, its logger, its config.yaml and checkpoints."""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from filelock import FileLock, Timeout
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from kvt.system.errors import UserError
from kvt.system.files import atomically
from kvt.training.callbacks import has_diverged
from kvt.training.load_checkpoint import read_checkpoint


class RunLogger(TensorBoardLogger):
    """A TensorBoard logger with a folder for one run only, even if two runs start at the same moment.

    The folder is made and locked when its name is first needed.

    Args:
        folder: lightning_logs/<task>/<attn>.
        run: the name of the run's folder; default: a new version_N.
        purge_step: events from this step on, of a process that was killed, are hidden.
    """

    def __init__(self, folder: Path, run: str | None = None, purge_step: int | None = None) -> None:
        super().__init__(str(folder), name="", default_hp_metric=False, purge_step=purge_step)
        self._run = run
        self._claimed = False
        self._lock: FileLock | None = None

    @property
    def version(self) -> str:
        """The folder's name, claimed on first use; a UserError if another process uses it."""
        first = rank_zero_only.rank == 0  # type: ignore[attr-defined]
        if self._run is None:
            self._claimed = first
            self._run = f"version_{claim_version(Path(self.root_dir), first)}"
        if self._lock is None and first:
            self._lock = hold(Path(self.root_dir) / self._run)
        return self._run

    @property
    def folder(self) -> Path | None:
        """The run's folder, None until it is claimed."""
        return Path(self.root_dir) / self._run if self._run else None

    def release(self) -> None:
        if self._lock is not None:
            Path(self._lock.lock_file).unlink(missing_ok=True)
            self._lock.release(force=True)

    def discard(self) -> None:
        """Remove the folder that this process made, of a run that never trained."""
        if self._claimed:
            with suppress(OSError):  # the disk may be full
                self.finalize("failed")  # closes the writer
            self.release()
            shutil.rmtree(Path(self.root_dir) / str(self._run), ignore_errors=True)
            attn = Path(self.root_dir)
            with suppress(OSError):  # not empty: other runs are there
                for folder in (attn, attn.parent, attn.parent.parent):
                    folder.rmdir()


def hold(run: Path) -> FileLock:
    """Lock a run until this process ends, and remove temporary files that a killed process left."""
    run.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run / ".lock", timeout=0, is_singleton=True, thread_local=False)  # reentrant within a process
    try:
        lock.acquire()
    except Timeout as error:
        raise UserError(f"{run}: run is locked by another process: wait for it, or stop it") from error
    except NotImplementedError:
        pass  # a file system without locks
    for folder in (run, run / "checkpoints"):
        if folder == run or not folder.is_symlink():  # the target of a link is not the run's
            for leftover in folder.glob("*.tmp"):
                leftover.unlink(missing_ok=True)
    return lock


def log_dir(trainer: L.Trainer) -> str | None:
    """Return the folder that the first process writes to, without the broadcast of `Trainer.log_dir`.

    A process that exits right after a broadcast may be aborted by torch's communication threads.
    """
    logger = trainer.logger
    if isinstance(logger, TensorBoardLogger | CSVLogger):
        return logger.log_dir
    return None if logger is None else logger.save_dir


def last_checkpoint(run: Path) -> Path:
    """Return the path of the checkpoint from which a run resumes; it exists after the first validation or stop."""
    return run / "checkpoints" / "last.ckpt"


def run_of_checkpoint(checkpoint: str | Path) -> Path | None:
    """Return the run folder that a checkpoint lies in, None if it lies elsewhere."""
    run = Path(checkpoint).resolve().parent.parent
    return run if (run / "config.yaml").is_file() else None


def claim_version(folder: Path, claim: bool) -> int:
    """Make the next free folder/version_N and return N; without `claim`, return the last N made."""
    taken = [int(path.name[8:]) for path in folder.glob("version_*") if path.name[8:].isdecimal()]
    if not claim:
        return max(taken, default=0)
    number = max(taken, default=-1) + 1
    try:
        while True:
            with suppress(FileExistsError):  # another run may have just taken it
                (folder / f"version_{number}").mkdir(parents=True)
                return number
            number += 1
    except OSError as error:
        raise UserError(
            f"cannot write runs under {folder} ({error.strerror}): fix the permissions, or choose --default_root_dir"
        ) from error


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


class BestCheckpoint(ModelCheckpoint):
    """Keeps the best checkpoint by a metric: best.ckpt.

    ModelCheckpoint forgets the best one if its folder has moved, or has another path on this machine.
    """

    def __init__(self, monitor: str, mode: str) -> None:
        super().__init__(
            monitor=monitor, mode=mode, filename="best", enable_version_counter=False, save_on_train_epoch_end=False
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best score, if best.ckpt is in the run's folder; paths in the state are ignored."""
        score = state_dict["best_model_score"]
        path = os.path.join(str(self.dirpath), f"best{self.FILE_EXTENSION}")
        if score is None:
            return
        if not os.path.isfile(path):
            if os.path.isfile(last := os.path.join(str(self.dirpath), f"last{self.FILE_EXTENSION}")):
                raise UserError(f"{path} is missing: start a new run from --ckpt_path {last}")
            return
        self.best_model_path = self.kth_best_model_path = path
        self.best_model_score = self.current_score = self.kth_value = score
        self.best_k_models = {path: score}

    def check_monitor_top_k(self, trainer: L.Trainer, current: Tensor | None = None) -> bool:
        """Return whether this is the best so far, which a run that has diverged never is: NaN has an accuracy, too."""
        return not has_diverged(trainer) and super().check_monitor_top_k(trainer, current)


class LastCheckpoint(ModelCheckpoint):
    """Saves last.ckpt, from which a run resumes, after every validation and when the run is stopped.

    ModelCheckpoint's own `save_last` follows its best checkpoint, which may be epochs old.

    Args:
        validates: whether the run validates; else it is saved after every epoch.
    """

    def __init__(self, validates: bool) -> None:
        super().__init__(
            filename="last", enable_version_counter=False, save_on_train_epoch_end=not validates, save_on_exception=True
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore nothing: the path is always the same."""

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Save if the run is stopped between two steps; other exceptions may leave half a step."""
        if isinstance(exception, SIGTERMException):
            super().on_exception(trainer, pl_module, exception)


class SaveConfig(L.Callback):
    """Writes the run's config.yaml, and adds the settings named in `TRAINER` to its checkpoints."""

    def __init__(self, settings: Mapping[str, Any], trainer: Mapping[str, Any]) -> None:
        self.settings, self.trainer = settings, dict(trainer)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit" or not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if (folder := log_dir(trainer)) is None:
            return
        path = Path(folder) / "config.yaml"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomically(path) as part:
                part.write_text(yaml.safe_dump(self.settings, sort_keys=False), encoding="utf-8")

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["trainer"] = self.trainer
