"""Published files: fetched once, over https alone, compared with what is known of them before anything opens them."""

import gzip
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from ssl import SSLContext, SSLSocket, create_default_context
from time import monotonic
from typing import Any, NamedTuple
from urllib import request
from urllib.parse import urlsplit

from tqdm import tqdm

from kvt.data.tensor_cache import ELSEWHERE, is_read_only, only_process, unwritable
from kvt.system.errors import UserError
from kvt.system.files import atomically

SILENCE = 10.0  # seconds without a byte
START = 30.0  # seconds until the first byte, redirects included
SLOWEST = 10_000  # bytes a second, from that time on
HEADERS = 2**20  # bytes of headers, redirects and whatever else is not the file
CHUNK = 2**16


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
    is_packed = remote.url.endswith(".gz")
    put = f"put the content of {remote.url} there" if is_packed else f"put {remote.url} there"
    with network(f"{path} is missing", f"{put}, or {ELSEWHERE}"), only_process(data_dir):
        if not path.exists():  # else another process fetched it while this one waited
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise unwritable(path.parent, error) from error
            fetch(remote, path, unpack=is_packed)
    return path


def fetch(remote: Remote, path: Path, unpack: bool = False) -> None:
    """Makes the file; whatever else a server sends is refused, and nothing of it left.

    A server has `START` seconds, and one more for every `SLOWEST` bytes it has sent, to send no more than the file and
    `HEADERS`: a slow line gets there, and the time and the bytes that any server can take are bounded.

    Args:
        remote: what to fetch.
        path: of the file.
        unpack: whether it is to hold the content of what is served, a .gz of a few megabytes.

    Raises:
        OSError: it cannot be had, or not stored.
        HTTPException: what answers is no web server.
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
    digest, received, allowance = hashlib.sha256(), 0, _Allowance()
    name = urlsplit(remote.url).path.rpartition("/")[2]
    with (
        allowance.open(remote.url) as answer,
        path.open("wb") as file,
        tqdm(total=remote.size, desc=name, unit="B", unit_scale=True, disable=None) as bar,
    ):
        allowance.bytes += 2 * remote.size  # as much again for how it is cut into chunks
        while chunk := answer.read1(CHUNK):
            received += len(chunk)
            if received > remote.size:
                raise OSError(f"{remote.url} sends more than the {remote.size} bytes that it has")
            digest.update(chunk)
            file.write(chunk)
            bar.update(len(chunk))
    if not digest.hexdigest().startswith(remote.sha256):
        raise OSError(f"{remote.url} sent {received} bytes that are not the published file: cut short or corrupted")


class _Allowance:
    """The time and the bytes that a download may still take, whatever they are for.

    http.client bounds a line, but not how many lines, nor for how long: headers, `100 Continue`, chunks, trailers and
    what a redirect carries. All of them come through a socket's `recv_into`, which is where they are counted.
    """

    def __init__(self) -> None:
        self.bytes, self.end = HEADERS, monotonic() + START

    def open(self, url: str) -> Any:
        """The answer to a request. The handlers know no scheme but https, in a redirect neither."""
        opener, proxies = request.OpenerDirector(), request.getproxies()
        for handler in (
            request.ProxyHandler({"https": proxies["https"]} if "https" in proxies else {}),
            request.HTTPSHandler(context=self._context()),
            request.HTTPRedirectHandler(),
            request.HTTPErrorProcessor(),
            request.HTTPDefaultErrorHandler(),
            request.UnknownHandler(),
        ):
            opener.add_handler(handler)
        try:
            return opener.open(request.Request(url, headers={"User-Agent": "kvt"}), timeout=SILENCE)
        except ValueError as error:  # what a redirect names is no address
            raise OSError(f"{url} leads nowhere: {error}") from error

    def _context(self) -> SSLContext:
        """The system's certificates, for sockets that keep to what is allowed."""
        allowance = self

        class Bounded(SSLSocket):
            def recv_into(self, *buffer: Any) -> int:
                if (left := allowance.end - monotonic()) <= 0:
                    raise TimeoutError("timed out: the server is too slow")
                self.settimeout(min(left, SILENCE))
                count = super().recv_into(*buffer)
                allowance.bytes -= count
                allowance.end += count / SLOWEST
                if allowance.bytes < 0:
                    raise OSError("the server sends more than belongs to the file")
                return count

        context = create_default_context()
        context.sslsocket_class = Bounded
        return context


@contextmanager
def network(missing: str, remedy: str) -> Iterator[None]:
    """A block that downloads: what ends it is one UserError.

    Its message begins with what is `missing` and closes with the `remedy`. Within `read_only` nothing begins.
    """
    if is_read_only():
        raise UserError(f"{missing}, and may not be downloaded to where a data set is only read: {remedy}")
    try:
        yield
    except (OSError, HTTPException) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{missing} and cannot be downloaded ({reason:.300}): {remedy}") from error
