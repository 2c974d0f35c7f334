"""The data folder: who may write there, and tensors kept there because they are expensive to make."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch
from filelock import FileLock

from kvt.data.tensor_files import Splits
from kvt.system.errors import UserError, exception_chain
from kvt.system.files import atomically

ELSEWHERE = "name another folder with --data_dir"
"""The remedy in errors about the data folder."""
_reads_only = ContextVar("_reads_only", default=False)


@contextmanager
def read_only() -> Iterator[None]:
    """Context manager: data sets are read without a download, and without making a folder, lock or cache.

    A data set that lies ready is used as ever; images are decoded, and features computed, in memory where no cache of
    them is found. What would have to be downloaded is a UserError that says where to put it. The block must contain
    all that the data do, from their constructor to `setup`: it holds in this thread and this process.
    """
    token = _reads_only.set(True)
    try:
        yield
    finally:
        _reads_only.reset(token)


def is_read_only() -> bool:
    """Whether this runs within `read_only`."""
    return _reads_only.get()


def make_once(path: Path, data_dir: Path, make: Callable[[], Splits], read: Callable[[], Splits]) -> None:
    """Keeps in `path`, a .pt file in `data_dir/.cache`, what `make` returns, unless `read` can read it there.

    Harmless to repeat, to race and to kill. The folder may be deleted at any time. Within `read_only` nothing is done.

    Raises:
        UserError: nothing can be stored there.
    """
    if is_read_only() or if_kept(read):
        return
    with only_process(data_dir):
        if if_kept(read):
            return  # another process made it while this one waited
        try:
            for leftover in path.parent.glob("*.pt.*.tmp"):  # of a process that was killed
                leftover.unlink()
        except OSError as error:
            raise unwritable(path.parent, error) from error
        _save(make(), path)


def if_kept(read: Callable[[], Splits]) -> Splits | None:
    """The tensors that `read` finds in the cache; None if they are missing, damaged or of other data."""
    try:
        return read()
    except UserError:
        return None


def _save(tensors: Splits, path: Path) -> None:
    """All of `tensors` in `path`, or an error and nothing."""
    try:
        with atomically(path) as part, part.open("wb") as file:
            torch.save(tensors, file)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError when the disk is full
        raise unwritable(path.parent, error) from error


@contextmanager
def only_process(data_dir: Path) -> Iterator[None]:
    """Makes `data_dir/.cache` and waits until no other process, of any user, is at work in it.

    Raises:
        UserError: the folder cannot be made or written.
    """
    folder = data_dir / ".cache"
    path = folder / "data.lock"
    lock = FileLock(path, mode=0o666)  # whatever the umask: users may share the folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise unwritable(path if os.path.isdir(folder) else folder, error) from error
    try:
        yield
    finally:
        lock.release()


def unwritable(path: Path, error: Exception) -> UserError:
    """The UserError for a file or folder under the data folder that cannot be written."""
    reasons = (cause.strerror for cause in exception_chain(error) if isinstance(cause, OSError) and cause.strerror)
    reason = next(reasons, str(error).splitlines()[0])
    return UserError(f"cannot write in {path} ({reason}): {ELSEWHERE}")
