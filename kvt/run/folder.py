"""The folder of a run, lightning_logs/<task>/<attn>/version_N, with a lock, config.yaml and checkpoints."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from filelock import FileLock, Timeout

from kvt.system.errors import UserError
from kvt.system.files import user_path, write_atomically

if TYPE_CHECKING:
    from kvt.run.config import RunConfig

LOCK = ".lock"
IN_USE = "run is locked by another process: wait for it, or stop it"


class RunFolder:
    """The folder of a run, which only one process at a time may use.

    Args:
        path: path of the folder. If the folder does not exist, it is created.
        made: the folders that this process has created for the run. Default: the run's folder and its parent folders,
            as far as they do not exist yet.

    Raises:
        UserError: another process uses the folder.
    """

    def __init__(self, path: Path, made: Sequence[Path] | None = None) -> None:
        self.path = path
        self._made = _missing(path) if made is None else made  # the innermost folder is first
        path.mkdir(parents=True, exist_ok=True)
        self._before = {*path.iterdir()}
        self._held = ExitStack()
        try:
            self._held.enter_context(locked(path))
        except Timeout as error:
            raise UserError(f"{path}: {IN_USE}") from error
        except NotImplementedError:
            pass  # a file system without locks
        for leftover in (*path.glob("*.tmp"), *self.checkpoints.glob("*.ckpt.*.tmp")):  # files of a killed process
            leftover.unlink(missing_ok=True)

    @classmethod
    def new(cls, parent: Path) -> "RunFolder":
        """Make the folder parent/version_N with the next free N. Two runs that start at once get different folders."""
        missing = _missing(parent)
        path = parent / f"version_{claim_version(parent)}"
        return cls(path, [path, *missing])

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def write_config(self, config: "RunConfig") -> None:
        """Write config.yaml, unless the folder has one."""
        path = self.path / "config.yaml"
        if not path.exists():
            write_atomically(path, yaml.safe_dump(config.as_dict(), sort_keys=False))

    def release(self) -> None:
        self._held.close()

    def discard(self) -> None:
        """Remove files that are newer than this object from the folder, and empty folders that this process made."""
        with suppress(OSError):  # the disk fails, or a folder contains other runs
            _remove({*self.path.iterdir()} - self._before)
            for folder in self._made:
                folder.rmdir()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context manager: create a run's folder if it does not exist, and lock it.

    A process may lock a folder several times. Raises `Timeout` while another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=0, is_singleton=True, thread_local=False)
    with lock:
        try:
            yield
        finally:
            if lock.lock_counter == 1:
                Path(lock.lock_file).unlink(missing_ok=True)


def empty(folder: Path) -> None:
    """Delete all files in a run's folder except the lock."""
    _remove(path for path in folder.iterdir() if path.name != LOCK)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _missing(path: Path) -> list[Path]:
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def is_in_use(folder: Path) -> bool:
    """Return whether a process uses a run's folder."""
    path = folder / LOCK
    try:
        with FileLock(path, timeout=0) if path.exists() else nullcontext():
            return False
    except Timeout:
        return True
    except (OSError, NotImplementedError):  # a read-only folder, or a file system without locks
        return False


def last_checkpoint(folder: Path) -> Path:
    """Return the path of the checkpoint for resuming a run. The file exists after the first validation or stop."""
    return folder / "checkpoints" / "last.ckpt"


def best_checkpoint(folder: Path) -> Path:
    """Return the path of the best checkpoint by validation. The file exists after the first validation."""
    return folder / "checkpoints" / "best.ckpt"


def run_folder(named: str, flag: str = "") -> Path:
    """Return the path of a run's folder that a user names.

    Raises a UserError that begins with `flag` if the folder has no config.yaml.
    """
    path = user_path(named)
    if not (path / "config.yaml").is_file():
        raise UserError(f"{flag}{named}: not the folder of a run, such as lightning_logs/reverse/kv/version_0")
    return path


def run_of_checkpoint(checkpoint: str | Path) -> Path | None:
    """Return the folder of the run that contains a checkpoint. None if no run contains the checkpoint."""
    folder = Path(checkpoint).resolve().parent.parent
    return folder if (folder / "config.yaml").is_file() else None


def claim_version(parent: Path) -> int:
    """Make the folder parent/version_N with the next free N, and return N."""
    taken = [int(path.name[8:]) for path in parent.glob("version_*") if path.name[8:].isdecimal()]
    number = max(taken, default=-1) + 1
    while True:
        with suppress(FileExistsError):  # another run may have just made this folder
            (parent / f"version_{number}").mkdir(parents=True)
            return number
        number += 1
