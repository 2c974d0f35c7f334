"""Writes files atomically, checks paths that a user names, and reads YAML files."""

import csv
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from kvt.system.errors import UserError

CONFIGS = Path(__file__).parents[1] / "configs"  # one YAML file for each task
GRIDS = Path(__file__).parents[1] / "grids"  # one YAML file for each grid


def user_path(text: str | Path) -> Path:
    """Return the path with ~ expanded; raise UserError if it is empty."""
    if not str(text):
        raise UserError("empty path: name a file or a folder; is a variable unset?")
    return Path(text).expanduser()


def require_writable(path: Path) -> Path:
    """Return `path`, the value of --out; raise UserError if it is a folder, or its parent is missing or read-only."""
    if path.is_dir():
        raise UserError(f"--out {path} is a folder: name a file")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"--out {path}: cannot write to {path.parent}")
    return path


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_folder(path: Path, flag: str, write: bool = True) -> None:
    """Raise UserError unless `path`, the value of a flag, is a writable folder or can be created.

    With `write=False`, an existing folder need not be writable, but must be readable.
    """
    existing = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    if not (existing.is_dir() and os.access(existing, os.X_OK | (os.W_OK if write else os.R_OK))):
        kind = "writable" if write else "readable"
        raise UserError(f"{flag} {path}: {existing} is not a {kind} folder: choose another folder")


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """Context manager: yield the path of a temporary file beside `path`, flush it to disk, and rename it to `path`.

    After an error, the temporary file is removed and `path` is unchanged. A killed process leaves at most the temporary
    file, named `*.tmp`.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write bytes, or text as UTF-8, to a temporary file, and rename it to `path` (see `atomically`)."""
    with atomically(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if the file is missing or unreadable, or has no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def write_csv(path: Path, columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV atomically; missing values are empty cells. Characters that UTF-8 cannot encode become escapes."""
    with atomically(path) as part, part.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.DictWriter(file, [*columns])
        writer.writeheader()
        writer.writerows(rows)


def find_yaml(named: str, folder: Path) -> Path:
    """Return the path that the user names, or kvt's file with this name: cifar10 stands for configs/cifar10.yaml.

    The user's file takes precedence. If neither file exists, the path that the user named is returned.
    """
    path, packaged = user_path(named), folder / f"{named}.yaml"
    return path if os.path.isfile(path) or not os.path.isfile(packaged) else packaged


def yaml_names(folder: Path) -> list[str]:
    """Return the sorted names of the YAML files in a folder of kvt, such as cifar10 for configs/cifar10.yaml."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def read_yaml(path: Path, name: str) -> Any:
    """Return the content of a YAML file; see `parse_yaml`."""
    return parse_yaml(path.read_bytes(), name)


def parse_yaml(text: str | bytes, name: str) -> Any:
    """Return the content of a YAML document, in which dates stay strings.

    Raises a UserError that begins with `name` if the text is not YAML, or has tags of Python.
    """
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:  # a malformed number such as 0b_ raises ValueError
        raise UserError(f"{name}: not readable as YAML: {error}") from error


def parse_settings(words: Iterable[str], flag: str) -> dict[str, Any]:
    """Return a dict of settings from words such as kv_heads=1. For other words, raise a UserError that names `flag`."""
    settings = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"{flag} {word}: expected a name and its value, such as kv_heads=1")
        settings[name] = parse_yaml(value, f"{flag} {word}")
    return settings


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A SafeLoader that keeps dates as strings."""


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_yaml_str)
