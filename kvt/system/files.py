"""Files that appear whole or not at all."""

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvt.system.errors import UserError, exception_chain, is_resource_limit


def user_path(text: str | Path) -> Path:
    """A path as a user writes it, ~ for the home.

    Raises:
        UserError: it begins with ~ and a name that is no user's, or has a NUL.
    """
    if "\0" in str(text):
        raise UserError(f"{text}: no path has a NUL in it: write another")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(f"{text}: there is no such home: write the path in full") from error


def require_file(path: str | Path, remedy: str) -> os.stat_result:
    """Makes sure that a path leads to a file, which has an end: a pipe or a device may keep its reader for ever.

    Returns:
        What is known of the file.

    Raises:
        UserError: it does not; path and remedy are named.
    """
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{path} is missing: {remedy}") from error
    except (OSError, ValueError) as error:  # ValueError: it has a NUL
        raise UserError(f"{path} cannot be read ({getattr(error, 'strerror', error)}): {remedy}") from error
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe or a device"
        raise UserError(f"{path} is {kind}, not a file: {remedy}")
    return found


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


def require_folder(path: Path, flag: str, write: bool = True, files: Iterable[str] = ()) -> None:
    """Makes sure that what a flag names is a folder or can become one, before work goes into it.

    Args:
        path: of the folder.
        flag: that names it.
        write: whether something is to be written there.
        files: the names of files that are.

    Raises:
        UserError: a file has its name, or that of a folder above it; or it is closed; or a folder has a file's name.
    """
    there = next(folder for folder in (path, *path.absolute().parents) if os.path.exists(folder))
    if not there.is_dir():
        raise UserError(f"{flag} {path}: {there} is a file: name a folder")
    if not os.access(there, os.X_OK | (os.W_OK if write else os.R_OK)):
        raise UserError(f"{flag} {path}: {there} is closed to you: name another folder, or open it")
    try:
        os.stat(path)
    except FileNotFoundError:
        if os.path.islink(path):
            raise UserError(f"{flag} {path}: is a link that leads nowhere: name another folder") from None
    except OSError as error:  # too long a name, a link to itself
        raise UserError(f"{flag} {path}: cannot be a folder ({error.strerror}): name another") from error
    for name in files:
        if (path / name).is_dir():
            raise UserError(f"{flag} {path / name}: is a folder, where a file is to be written: move it away")


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """Yields a file beside `path` to write, which takes its place at the end; after an error there is none.

    What was under the name before stays there until all of the new file is on the disk: a machine that loses its power
    leaves the one or the other, whole. A killed process leaves at most that other file, named *.tmp.

    Raises:
        OSError: with the path as its `filename`, also where whoever writes does not know it.
    """
    part = _part(path)
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except Exception as error:
        for cause in exception_chain(error):
            if is_resource_limit(cause):
                cause.filename = str(path)
        raise
    finally:
        with suppress(OSError):  # where nothing can be written, nothing was
            part.unlink(missing_ok=True)
    _flush_names(path.parent)


def _flush_names(folder: Path) -> None:
    """Waits until the names in a folder are on the disk; where a disk cannot, a name may be lost, no file is half."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _part(path: Path) -> Path:
    """Where a file is written before it takes its place."""
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")
