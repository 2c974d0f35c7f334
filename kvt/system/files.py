"""Atomic file writes, and checks of paths that a user names."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvt.system.errors import UserError, exception_chain, is_resource_limit


def user_path(text: str | Path) -> Path:
    """Return the path with ~ expanded; raise UserError if it names an unknown user's home or has a NUL byte."""
    if "\0" in str(text):
        raise UserError(f"{text}: a path has no NUL byte: write another")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(f"{text}: there is no such home: write the path in full") from error


def require_file(path: str | Path, remedy: str) -> os.stat_result:
    """Return the stat of a file; raise UserError, with path and remedy, if it is missing or not a regular file."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{path} is missing: {remedy}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {remedy}") from error
    if not os.path.isfile(path):
        raise UserError(f"{path} is {'a folder' if os.path.isdir(path) else 'a device'}, not a file: {remedy}")
    return found


def require_writable(path: Path) -> Path:
    """Return the file named by --out; raise UserError if it is a folder, or its folder is missing or not writable."""
    if os.path.isdir(path):
        raise UserError(f"--out {path}: that is a folder: name a file")
    try:
        _part(path).touch()
        _part(path).unlink()
    except OSError as error:
        raise UserError(f"--out {path}: cannot write into the folder {path.parent} ({error.strerror})") from error
    return path


def require_folder(path: Path, flag: str, write: bool = True, files: Iterable[str] = ()) -> None:
    """Raise UserError unless what a flag names is a folder, or can become one.

    Args:
        path: the folder.
        flag: the flag that names it, for the message.
        write: whether it must be writable, or only readable.
        files: names of files that will be written there; none of them may be a folder.
    """
    existing = next(folder for folder in (path, *path.absolute().parents) if os.path.exists(folder))
    if not existing.is_dir():
        raise UserError(f"{flag} {path}: {existing} is a file: name a folder")
    if not os.access(existing, os.X_OK | (os.W_OK if write else os.R_OK)):
        raise UserError(f"{flag} {path}: {existing} is closed to you: name another folder, or open it")
    try:
        os.stat(path)
    except FileNotFoundError:
        if os.path.islink(path):
            raise UserError(f"{flag} {path}: is a broken link: name another folder") from None
    except OSError as error:  # e.g. the name is too long
        raise UserError(f"{flag} {path}: cannot be a folder ({error.strerror}): name another") from error
    for name in files:
        if (path / name).is_dir():
            raise UserError(f"{flag} {path / name}: is a folder, where a file is to be written: move it away")


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside `path`, flush it to disk at the end and rename it to `path`.

    After an error the temporary file is removed and `path` is unchanged. A killed process leaves at most the
    temporary file, named *.tmp. Resource limits in the chain of a raised exception get `path` as their filename.
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
        with suppress(OSError):
            part.unlink(missing_ok=True)
    with suppress(OSError):  # some file systems cannot flush a folder; the rename may then be lost in a power failure
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")
