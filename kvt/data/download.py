"""Download published files over https, and check the SHA-256 of each file before the file is opened."""

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

TIMEOUT = 20.0  # maximum number of seconds to wait for an answer of the server


class Remote(NamedTuple):
    """The https address of a published file, and the SHA-256 of the file's content."""

    url: str
    sha256: str


def download(remote: Remote, data_dir: Path, name: str) -> Path:
    """Return the path `data_dir/name`, after downloading the file unless it exists. A .gz file is unpacked.

    The SHA-256 of an existing file is not checked, because users may replace the file by a file of their own. If
    several processes call `download`, one process downloads the file.
    """
    path = data_dir / name
    packed = remote.url.endswith(".gz")
    with network(f"{path} is missing", f"put {'the content of ' * packed}{remote.url} there, or {ELSEWHERE}"):
        once(data_dir, lambda: os.path.exists(path), lambda: fetch(remote, path, unpack=packed))
    return path


def fetch(remote: Remote, path: Path, unpack: bool = False) -> None:
    """Download a file to `path`, unless it is already there with the right SHA-256; failures leave no partial file.

    Args:
        unpack: whether to decompress a .gz file.

    Raises:
        OSError, HTTPException: the download failed, or the SHA-256 of its content differs from `remote.sha256`.
    """
    if path.is_file() and sha256_of(path) == remote.sha256:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with urlopen(remote.url, timeout=TIMEOUT) as answer, atomically(path) as part:
        progress = tqdm.wrapattr(answer, "read", total=answer.length, desc=path.name, disable=None)
        with progress as content, part.open("wb") as file:
            shutil.copyfileobj(content, file)
        if answer.length:  # number of bytes that the server announced but did not send
            raise OSError(f"the connection closed {answer.length:,} bytes before the end; try again")
        if sha256_of(part) != remote.sha256:
            raise OSError("the SHA-256 of the download is not the SHA-256 of the published file")
        if unpack:
            part.write_bytes(gzip.decompress(part.read_bytes()))


@contextmanager
def network(missing: str, remedy: str) -> Iterator[None]:
    """Context manager that turns an error of a download into a UserError with the texts `missing` and `remedy`."""
    try:
        yield
    except (OSError, HTTPException, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{missing} and cannot be downloaded ({reason:.300}): {remedy}") from error
