"""Paths that a user names, files that several processes may need at once, and downloads."""

import gzip
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock

from kvt.system import UserError, atomically, user_path

ELSEWHERE = "name another folder with --data_dir, in a study with KVT_DATA_DIR"  # a remedy in messages


class Remote(NamedTuple):
    """The https address of a published file, and the file's SHA-256 before any unpacking."""

    url: str
    sha256: str


def optional_path(text: str | None) -> Path | None:
    """Return `user_path(text)`, or None if `text` is None."""
    return None if text is None else user_path(text)


def require_file(path: str | Path, remedy: str) -> None:
    """Raise UserError, with path and remedy, unless `path` is a regular file."""
    if not os.path.isfile(path):
        raise UserError(f"{path} is {'not a file' if os.path.exists(path) else 'missing'}: {remedy}")


def state_of(path: str | Path) -> str:
    """Return a file's size, modification time and change time as text. A program cannot set the change time."""
    state = os.stat(path)
    return f"{state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}"


def once(data_dir: Path, is_done: Callable[[], bool], work: Callable[[], object]) -> None:
    """Unless `is_done()`, call `work()` under a lock in `data_dir/.cache`; UserError if kvt cannot write there."""
    if is_done():
        return
    folder = data_dir / ".cache"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "data.lock", mode=0o666, is_singleton=True).acquire()  # all users may lock; calls nest
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror}): {ELSEWHERE}") from error
    with lock:
        if not is_done():  # another process may have worked while this process waited
            work()


def download(remote: Remote, data_dir: Path, name: str) -> Path:
    """Return the path `data_dir/name`. Unless the file exists, download it first, and unpack it if it is a .gz file.

    An existing file is not checked, because it may be the user's own. Raises UserError if the download fails, or has a
    wrong SHA-256.
    """
    path, packed = data_dir / name, remote.url.endswith(".gz")

    def fetch() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomically(path) as part:
            torch.hub.download_url_to_file(remote.url, str(part), remote.sha256, progress=False)
            if packed:
                part.write_bytes(gzip.decompress(part.read_bytes()))

    with available(str(path), f"put {'the content of ' * packed}{remote.url} there, or {ELSEWHERE}"):
        once(data_dir, path.exists, fetch)
    return path


@contextmanager
def available(name: str, remedy: str) -> Iterator[None]:
    """Context manager that turns any error except UserError into a UserError with the name of the data and `remedy`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # libraries raise errors of many types for files that are missing or broken
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{name} cannot be read or downloaded ({reason:.300}): {remedy}") from error
