"""Files that appear whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvt.errors import UserError


def user_path(text: str | Path) -> Path:
    """A path as a user writes it, ~ for the home.

    Raises:
        UserError: it begins with ~ and a name that is no user's.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(f"{text}: there is no such home: write the path in full") from error


def require_writable(path: Path) -> Path:
    """The file named by --out, made sure that it can be written before work goes into it.

    Raises:
        UserError: its folder is missing or closed, or a folder has its name.
    """
    if os.path.isdir(path):
        raise UserError(f"--out {path}: that is a folder: name a file")
    try:
        _part(path).touch()
        _part(path).unlink()
    except OSError as error:
        raise UserError(f"--out {path}: cannot write into the folder {path.parent} ({error.strerror})") from error
    return path


def require_folder(path: Path, flag: str, write: bool = True) -> None:
    """Makes sure that what a flag names is a folder or can become one, before work goes into it.

    Args:
        path: of the folder.
        flag: that names it.
        write: whether something is to be written there.

    Raises:
        UserError: a file has its name, or that of a folder above it; or it is closed.
    """
    there = next(folder for folder in (path, *path.absolute().parents) if os.path.exists(folder))
    if not there.is_dir():
        raise UserError(f"{flag} {path}: {there} is a file: name a folder")
    if not os.access(there, os.X_OK | (os.W_OK if write else os.R_OK)):
        raise UserError(f"{flag} {path}: {there} is closed to you: name another folder, or open it")


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """Yields a file beside `path` to write, which takes its place at the end; after an error there is none.

    A killed process leaves at most that other file, named *.tmp.
    """
    part = _part(path)
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _part(path: Path) -> Path:
    """Where a file is written before it takes its place."""
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")
