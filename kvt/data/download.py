"""Published files: fetched once, checked, whole or not there."""

import gzip
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from torchvision.datasets.utils import download_url

from kvt.errors import UserError
from kvt.files import atomically

NETWORK_TIMEOUT = 10.0  # seconds without a byte, for each of a server's addresses
ELSEWHERE = "name another folder with --data_dir"
"""The remedy for a file that may lie elsewhere."""


def download(url: str, data_dir: Path, name: str, md5: str) -> Path:
    """The file `data_dir/name`, fetched from `url` unless it is there; harmless to repeat, to race and to kill.

    `md5` is that of what `url` serves; if that is a .gz, the file is its content. A file that is there is
    used as it is, for it may be the user's own.

    Raises:
        UserError: the file can be neither downloaded nor stored.
    """
    path = data_dir / name
    if os.path.exists(path):  # unlike Path.exists, no error where a folder on the way cannot be searched
        return path
    with only_process(data_dir):
        if not path.exists():  # else another process fetched it while this one waited
            _fetch(url, path, md5)
    return path


def _fetch(url: str, path: Path, md5: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob(f"{path.name}.*.tmp"):  # of a process that was killed
            leftover.unlink()
    except OSError as error:
        raise unwritable(path.parent, error) from error
    is_packed = url.endswith(".gz")
    put = f"put the content of {url} there" if is_packed else f"put {url} there"
    with network(f"{path} is missing", f"{put}, or {ELSEWHERE}"), atomically(path) as part:
        download_url(url, part.parent, part.name, md5)
        if is_packed:  # in memory: no file here is larger than a few megabytes
            part.write_bytes(gzip.decompress(part.read_bytes()))


@contextmanager
def network(missing: str, remedy: str) -> Iterator[None]:
    """A block that downloads: a silent server ends it, and whatever ends it is one UserError.

    Its message begins with what is `missing` and closes with the `remedy`.
    """
    # torchvision passes no timeout, and a firewall that drops packets would stall it for good.
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(NETWORK_TIMEOUT)
    try:
        yield
    except Exception as error:  # torchvision raises nearly anything, from asserts to zlib's errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise UserError(f"{missing} and cannot be downloaded ({reason}): {remedy}") from error
    finally:
        socket.setdefaulttimeout(before)


@contextmanager
def only_process(data_dir: Path) -> Iterator[None]:
    """Makes `data_dir/.cache` and waits until no other process is at work in it.

    Raises:
        UserError: the folder cannot be made or written.
    """
    folder = data_dir / ".cache"
    lock = FileLock(folder / "data.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        yield
    finally:
        lock.release()


def unwritable(folder: Path, error: Exception) -> UserError:
    """The error for a `folder` under the data folder where nothing can be stored."""
    reason = str(error).splitlines()[0]
    return UserError(f"cannot write in {folder} ({reason}): name a folder with room to write with --data_dir")
