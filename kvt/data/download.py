"""Download published files over https, and check their SHA-256 before they are opened."""

import gzip
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

from tqdm import tqdm

from kvt.data.tensor_files import ELSEWHERE, once
from kvt.system.errors import UserError
from kvt.system.files import atomically, sha256_of

TIMEOUT = 20.0  # seconds to wait for an answer of the server


class Remote(NamedTuple):
    """A published file: its https address and the SHA-256 of its content."""

    url: str
    sha256: str


def download(remote: Remote, data_dir: Path, name: str) -> Path:
    """Return the path `data_dir/name`, and download the file unless it exists; a .gz is unpacked.

    An existing file is not checked, since it may be the user's own. If several processes call this, one downloads.
    """
    path = data_dir / name
    packed = remote.url.endswith(".gz")
    with network(f"{path} is missing", f"put {'the content of ' * packed}{remote.url} there, or {ELSEWHERE}"):
        once(data_dir, lambda: os.path.exists(path), lambda: fetch(remote, path, unpack=packed))
    return path


def fetch(remote: Remote, path: Path, unpack: bool = False) -> None:
    """Download a published file unless it exists with the right SHA-256; a failed download leaves no partial file.

    Args:
        unpack: whether to decompress a .gz file.

    Raises:
        OSError, HTTPException: the download failed, or its SHA-256 differs from `remote.sha256`.
    """
    if path.is_file() and sha256_of(path) == remote.sha256:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with urlopen(remote.url, timeout=TIMEOUT) as answer, atomically(path) as part:
        progress = tqdm.wrapattr(answer, "read", total=answer.length, desc=path.name, disable=None)
        with progress as content, part.open("wb") as file:
            shutil.copyfileobj(content, file)
        if answer.length:  # bytes that the server has announced and not sent
            raise OSError(f"the connection closed {answer.length:,} bytes before the end; try again")
        if sha256_of(part) != remote.sha256:
            raise OSError("its SHA-256 is not that of the published file")
        if unpack:
            part.write_bytes(gzip.decompress(part.read_bytes()))


@contextmanager
def network(missing: str, remedy: str) -> Iterator[None]:
    """Context manager that turns errors of a download into a UserError with the missing file and a remedy."""
    try:
        yield
    except (OSError, HTTPException, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{missing} and cannot be downloaded ({reason:.300}): {remedy}") from error
