"""Run folders: lightning_logs/<task>/<attn>/version_N."""

import shutil
from contextlib import suppress
from pathlib import Path

import lightning as L
from filelock import FileLock, Timeout
from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from kvt.system.errors import UserError, is_resource_limit
from kvt.system.files import atomically


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
        """The folder's name, claimed on first use.

        Raises:
            UserError: the folder cannot be written, or another process uses this run.
        """
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

    @rank_zero_only
    def save(self) -> None:
        """Write pending events, and hparams.yaml if there is none."""
        self.experiment.flush()
        path = Path(self.log_dir) / self.NAME_HPARAMS_FILE
        if not path.exists():
            with atomically(path) as part:
                save_hparams_to_yaml(part, self.hparams)

    def release(self) -> None:
        """Release the run folder's lock."""
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
    """Lock a run until this process ends, and remove temporary files that a killed process left.

    Raises:
        UserError: another process holds the lock, or .lock is a link or a folder.
    """
    run.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run / ".lock", timeout=0, is_singleton=True, thread_local=False)  # reentrant within a process
    try:
        lock.acquire()
        for folder in (run, run / "checkpoints"):
            if folder == run or not folder.is_symlink():  # the target of a link is not the run's
                for leftover in folder.glob("*.tmp"):  # of a killed process
                    leftover.unlink(missing_ok=True)
    except Timeout as error:
        raise UserError(f"{run}: another process is at this run: wait for it, or stop it") from error
    except NotImplementedError:
        pass  # a file system without locks
    except OSError as error:
        if is_resource_limit(error):
            raise
        raise UserError(f"{run}: its .lock is no file ({error.strerror}): remove it") from error
    return lock


def log_dir(trainer: L.Trainer) -> str | None:
    """Return the folder that the first process writes to, without the broadcast of `Trainer.log_dir`.

    A process that exits right after a broadcast may be aborted by torch's communication threads.
    """
    logger = trainer.logger
    if isinstance(logger, TensorBoardLogger | CSVLogger):
        return logger.log_dir
    return None if logger is None else logger.save_dir


OUTPUTS = ("config.yaml", "history.csv", "result.json", "checkpoints/best.ckpt", "checkpoints/last.ckpt")
"""The files that a run writes."""


def last_checkpoint(run: Path) -> Path:
    """Return the path of the checkpoint from which a run resumes; it exists after the first validation or stop."""
    return run / "checkpoints" / "last.ckpt"


def run_of_checkpoint(checkpoint: str | Path) -> Path | None:
    """Return the run folder that a checkpoint lies in, None if it lies elsewhere."""
    run = Path(checkpoint).resolve().parent.parent
    return run if (run / "config.yaml").is_file() else None


def number_of_run(run: Path) -> int | None:
    """Return N of …/version_N, None for another name.

    >>> number_of_run(Path("lightning_logs/sort/kv/version_12"))
    12
    """
    prefix, _, number = run.name.partition("_")
    return int(number) if prefix == "version" and number.isdecimal() else None


def claim_version(folder: Path, claim: bool) -> int:
    """Make the next free folder/version_N and return N; without `claim`, return the N that another process made last.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        taken = [number for path in folder.glob("version_*") if (number := number_of_run(path)) is not None]
        if not claim:
            return max(taken, default=0)
        number = max(taken, default=-1) + 1
        while True:
            try:
                (folder / f"version_{number}").mkdir(parents=True)
                return number
            except FileExistsError as error:
                if folder.exists() and not folder.is_dir():
                    raise UserError(f"{folder} is a file: runs need a folder there") from error
                number += 1  # another run has just taken it
    except OSError as error:
        raise UserError(
            f"cannot write runs under {folder} ({error.strerror}): mend that, or choose --trainer.default_root_dir"
        ) from error
