"""Published files: fetched once, over https alone, compared with what is known of them before anything opens them."""

import gzip
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from http.client import HTTPException
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from filelock import FileLock
from tqdm import tqdm

from kvt.errors import UserError, behind
from kvt.files import atomically

SCHEME = "https"
NETWORK_TIMEOUT = 10.0  # seconds without a byte, for each of a server's addresses
SLOWEST = 1000.0  # bytes a second, from that time on
CHUNK = 2**16
OFFLINE = ContextVar("OFFLINE", default=False)
"""Whether nothing may be downloaded, decoded or computed that is not in the data folder yet."""
ELSEWHERE = "name another folder with --data_dir"
"""The remedy for a file that may lie elsewhere."""


class Remote(NamedTuple):
    """A file as its authors publish it.

    Attributes:
        url: where; https.
        sha256: of its content, or the first digits, where its authors tell no more.
        size: how many bytes it has at most.
    """

    url: str
    sha256: str
    size: int


def download(remote: Remote, data_dir: Path, name: str) -> Path:
    """The file `data_dir/name`, fetched unless it is there; harmless to repeat, to race and to kill.

    What is served as .gz is unpacked. A file that is there is used as it is, for it may be the user's own.

    Raises:
        UserError: the file can be neither downloaded nor stored.
    """
    path = data_dir / name
    if os.path.exists(path):  # unlike Path.exists, no error where a folder on the way cannot be searched
        return path
    with only_process(data_dir):
        if not path.exists():  # else another process fetched it while this one waited
            _download(remote, path)
    return path


def _download(remote: Remote, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path.parent, error) from error
    is_packed = remote.url.endswith(".gz")
    put = f"put the content of {remote.url} there" if is_packed else f"put {remote.url} there"
    with network(f"{path} is missing", f"{put}, or {ELSEWHERE}"):
        fetch(remote, path, unpack=is_packed)


def fetch(remote: Remote, path: Path, unpack: bool = False) -> None:
    """Makes the file; whatever else a server sends is refused, and nothing of it left.

    Args:
        remote: what to fetch.
        path: of the file.
        unpack: whether it is to hold the content of what is served, a .gz of a few megabytes.

    Raises:
        OSError: it cannot be had, or not stored.
    """
    for leftover in path.parent.glob(f"{path.name}.*.tmp"):  # of a process that was killed
        leftover.unlink()
    with atomically(path) as part:
        _copy(remote, part)
        if unpack:
            part.write_bytes(gzip.decompress(part.read_bytes()))


def is_sound(path: Path, remote: Remote) -> bool:
    """Whether what its authors publish is there."""
    if not path.is_file() or path.stat().st_size > remote.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest().startswith(remote.sha256)


def _copy(remote: Remote, path: Path) -> None:
    opener, request = build_opener(_Redirects), Request(_secure(remote.url), headers={"User-Agent": "kvt"})
    digest, received, started = hashlib.sha256(), 0, monotonic()
    name = urlsplit(remote.url).path.rpartition("/")[2]
    with (
        opener.open(request, timeout=NETWORK_TIMEOUT) as answer,
        path.open("wb") as file,
        tqdm(total=remote.size, desc=name, unit="B", unit_scale=True, disable=None) as bar,
    ):
        while chunk := answer.read1(CHUNK):
            received += len(chunk)
            if received > remote.size:
                raise OSError(f"{remote.url} sends more than the {remote.size} bytes that it has")
            if monotonic() - started > NETWORK_TIMEOUT + received / SLOWEST:
                raise OSError(f"{remote.url} timed out: {received} bytes in {monotonic() - started:.0f} s")
            digest.update(chunk)
            file.write(chunk)
            bar.update(len(chunk))
    if not digest.hexdigest().startswith(remote.sha256):
        raise OSError(f"{remote.url} sent {received} bytes that are not the published file: cut short or corrupted")


class _Redirects(HTTPRedirectHandler):
    """Follows no server away from https."""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Request | None:
        return super().redirect_request(req, fp, code, msg, headers, _secure(newurl))


def _secure(url: str) -> str:
    if urlsplit(url).scheme != SCHEME:
        raise URLError(f"{url} is no {SCHEME} address")
    return url


@contextmanager
def network(missing: str, remedy: str) -> Iterator[None]:
    """A block that downloads: what ends it is one UserError.

    Its message begins with what is `missing` and closes with the `remedy`.
    """
    try:
        yield
    except (OSError, HTTPException) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{missing} and cannot be downloaded ({reason:.300}): {remedy}") from error


@contextmanager
def only_process(data_dir: Path) -> Iterator[None]:
    """Makes `data_dir/.cache` and waits until no other process is at work in it.

    Raises:
        UserError: the folder cannot be made or written, or nothing may be made there now: `OFFLINE`.
    """
    if OFFLINE.get():
        raise UserError(f"not all data are in {data_dir} yet: the first run would download or prepare them")
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
    reasons = (led.strerror for led in behind(error) if isinstance(led, OSError) and led.strerror)
    reason = next(reasons, str(error).splitlines()[0])
    return UserError(f"cannot write in {folder} ({reason}): name a folder with room to write with --data_dir")
