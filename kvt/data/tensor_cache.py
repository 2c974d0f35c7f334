"""The data folder: its lock between processes, read-only use of it, and its cache of tensors."""

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
_read_only = ContextVar("_read_only", default=False)


@contextmanager
def read_only() -> Iterator[None]:
    """Context manager: read data sets without downloading or writing anything into the data folder.

    Data sets and caches that exist are used; images are decoded, and features computed, in memory where there is no
    cache. A data set that would have to be downloaded is a UserError. The block must contain everything from the
    data module's constructor to `setup`, in one thread.
    """
    token = _read_only.set(True)
    try:
        yield
    finally:
        _read_only.reset(token)


def is_read_only() -> bool:
    """Whether the caller is within `read_only`."""
    return _read_only.get()


def make_once(path: Path, data_dir: Path, make: Callable[[], Splits], read: Callable[[], Splits]) -> None:
    """Save what `make` returns in `path`, a .pt file in `data_dir/.cache`, unless `read` succeeds.

    Of several processes one makes it and the others wait. Within `read_only` nothing happens. Raises UserError if the
    folder cannot be written.
    """
    if is_read_only() or if_cached(read):
        return
    with data_lock(data_dir):
        if if_cached(read):  # another process made it while this one waited
            return
        try:
            for leftover in path.parent.glob("*.pt.*.tmp"):  # of a killed process
                leftover.unlink()
        except OSError as error:
            raise unwritable(path.parent, error) from error
        tensors = make()
        try:
            with atomically(path) as part, part.open("wb") as file:
                torch.save(tensors, file)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError if the disk is full
            raise unwritable(path.parent, error) from error


def if_cached(read: Callable[[], Splits]) -> Splits | None:
    """Return what `read` finds in the cache; None if that raises UserError: it is missing, damaged or of other data."""
    try:
        return read()
    except UserError:
        return None


@contextmanager
def data_lock(data_dir: Path) -> Iterator[None]:
    """Context manager: hold the lock of the data folder, which all processes of all users share.

    Raises UserError if `data_dir/.cache` cannot be created or written.
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
    """Return the UserError for a file or folder under the data folder that cannot be written."""
    reasons = (cause.strerror for cause in exception_chain(error) if isinstance(cause, OSError) and cause.strerror)
    reason = next(reasons, str(error).splitlines()[0])
    return UserError(f"cannot write in {path} ({reason}): {ELSEWHERE}")
