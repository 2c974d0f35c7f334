"""Where a run lands: lightning_logs/<task>/<attn>/version_N."""

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
    """TensorBoard events in a folder of the run's own: two runs started in the same moment never share one.

    The folder is made, and held by this process, when it is first asked for.

    Args:
        folder: lightning_logs/<task>/<attn>.
        run: the name of the run's own folder therein; default: a new version_N.
        purge_step: events of this step and later ones, of a process that was killed, are not shown any more.
    """

    def __init__(self, folder: Path, run: str | None = None, purge_step: int | None = None) -> None:
        super().__init__(str(folder), name="", default_hp_metric=False, purge_step=purge_step)
        self._run = run
        self._claimed = False
        self._lock: FileLock | None = None

    @property
    def version(self) -> str:
        """The folder's name, claimed on the first call.

        Raises:
            UserError: the folder cannot be written, or another process is at this run.
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
        """The run's own; None until it is claimed."""
        return Path(self.root_dir) / self._run if self._run else None

    @rank_zero_only
    def save(self) -> None:
        """Writes events that still wait, and hparams.yaml where there is none."""
        self.experiment.flush()
        path = Path(self.log_dir) / self.NAME_HPARAMS_FILE
        if not path.exists():
            with atomically(path) as part:
                save_hparams_to_yaml(part, self.hparams)

    def release(self) -> None:
        """Lets other processes go on with the run."""
        if self._lock is not None:
            Path(self._lock.lock_file).unlink(missing_ok=True)
            self._lock.release(force=True)

    def discard(self) -> None:
        """Removes the folder that this process made, for a run that never came to train."""
        if self._claimed:
            with suppress(OSError):  # the disk may be what it failed of
                self.finalize("failed")  # nobody writes there any more
            self.release()
            shutil.rmtree(Path(self.root_dir) / str(self._run), ignore_errors=True)
            attn = Path(self.root_dir)
            with suppress(OSError):  # not empty: other runs are there
                for folder in (attn, attn.parent, attn.parent.parent):
                    folder.rmdir()


def hold(run: Path) -> FileLock:
    """Keeps other processes from this run, until this one ends.

    Raises:
        UserError: another one is at it, or its .lock is a link or a folder.
    """
    run.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run / ".lock", timeout=0, is_singleton=True)  # whoever asks twice in one process has it already
    try:
        lock.acquire()
        for folder in (run, run / "checkpoints"):
            if folder == run or not folder.is_symlink():  # where a link leads is not the run's
                for leftover in folder.glob("*.tmp"):  # what a killed process was writing
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
    """Where the first process writes; no other one has to ask too, as it must for `Trainer.log_dir`.

    One that ends while torch's threads are still busy with what it has just heard from the others is aborted.
    """
    logger = trainer.logger
    if isinstance(logger, TensorBoardLogger | CSVLogger):
        return logger.log_dir
    return None if logger is None else logger.save_dir


OUTPUTS = ("config.yaml", "history.csv", "result.json", "checkpoints/best.ckpt", "checkpoints/last.ckpt")
"""The files of a run that it cannot do without."""


def last_checkpoint(run: Path) -> Path:
    """Where a run goes on that was killed or stopped; there once it has validated, or was stopped."""
    return run / "checkpoints" / "last.ckpt"


def run_of_checkpoint(checkpoint: str | Path) -> Path | None:
    """The folder of the run whose checkpoint this is; None if it lies elsewhere."""
    run = Path(checkpoint).resolve().parent.parent
    return run if (run / "config.yaml").is_file() else None


def number_of_run(run: Path) -> int | None:
    """N of …/version_N; None for another name.

    >>> number_of_run(Path("lightning_logs/sort/kv/version_12"))
    12
    """
    prefix, _, number = run.name.partition("_")
    return int(number) if prefix == "version" and number.isdecimal() else None


def claim_version(folder: Path, claim: bool) -> int:
    """Makes the next free folder/version_N and returns N; without `claim`, the N that another process made last.

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
                number += 1  # another run took it in this very moment
    except OSError as error:
        raise UserError(
            f"cannot write runs under {folder} ({error.strerror}): mend that, or choose --trainer.default_root_dir"
        ) from error
