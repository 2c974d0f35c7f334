"""Writes files atomically, checks paths that a user names, and reads YAML files."""

import csv
import errno
import hashlib
import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from kvt.system.errors import UserError

CONFIGS = Path(__file__).parents[1] / "configs"  # one YAML file for each task
MAX_NODES = 100_000  # largest number of values in a YAML file; by aliases, a few lines can expand to millions
GRIDS = Path(__file__).parents[1] / "grids"  # one YAML file for each grid


def user_path(text: str | Path) -> Path:
    """Return the path with ~ expanded; raise UserError if it is empty, not UTF-8, or names an unknown ~user."""
    if not isinstance(text, str | os.PathLike):
        raise UserError(f"{text!r:.60}: expected a path")
    if not str(text):
        raise UserError("empty path: name a file or a folder; is a variable unset?")
    try:
        str(text).encode()
        return Path(text).expanduser()
    except UnicodeEncodeError as error:
        raise UserError(f"{text}: this name is not UTF-8: rename it, or pass a link to it") from error
    except RuntimeError as error:
        raise UserError(f"{text}: unknown user in ~user: write the full path") from error


def optional_path(text: str | None) -> Path | None:
    """Return `user_path(text)`, or None if `text` is None."""
    return None if text is None else user_path(text)


def require_file(path: str | Path, remedy: str) -> None:
    """Raise UserError, with path and remedy, if a file is missing or not a regular file."""
    if not os.path.isfile(path):
        is_what = "is a folder, not a file" if os.path.isdir(path) else "is not a regular file"
        is_what = is_what if os.path.exists(path) else "is missing"
        raise UserError(f"{path} {is_what}: {remedy}")


def regular(path: Path) -> Path:
    """Return `path`; raise OSError unless it is a regular file. Reading a FIFO or a device might never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return path


def require_writable(path: Path) -> Path:
    """Return `path`, the value of --out; raise UserError if it is a folder, or its parent is missing or read-only."""
    if os.path.isdir(path):
        raise UserError(f"--out {path} is a folder: name a file")
    try:
        _part(path).touch()
        _part(path).unlink()
    except OSError as error:
        raise UserError(f"--out {path}: cannot write to {path.parent} ({error.strerror})") from error
    return path


def list_files(folder: Path, pattern: str = "*", without: Collection[str] = ()) -> list[Path]:
    """Return the files of a folder and its subfolders that match a pattern, sorted by folder, then by file name.

    Subfolders with a name in `without` are left out. Files and folders for which `is_hidden` is true are left out, too.
    Links to folders are followed. Each folder is listed once, because links may form a cycle. A folder inside `folder`
    is listed by its own path, not by the path of a link.
    """
    files: list[Path] = []
    seen: set[tuple[int, int]] = set()
    root = os.fspath(folder)
    starts = [root]
    for start in starts:  # the loop appends links to folders, so that links are followed last
        for path, folders, names in os.walk(start):
            folders[:] = sorted(name for name in folders if not is_hidden(name))
            found = os.stat(path)
            if (device_and_inode := (found.st_dev, found.st_ino)) in seen:
                folders.clear()
                continue
            seen.add(device_and_inode)
            starts += filter(os.path.islink, (os.path.join(path, name) for name in folders))
            if not {*without}.intersection(path.removeprefix(root).split(os.sep)):
                matching = (name for name in names if fnmatchcase(name, pattern) and not is_hidden(name))
                files += (Path(path, name) for name in matching)
    return sorted(files, key=lambda file: (str(file.parent), file.name))


def is_hidden(name: str) -> bool:
    """Return whether the name is one of files that operating systems and editors create, such as .DS_Store."""
    return name.startswith(".") or name in ("__MACOSX", "@eaDir")  # macOS and Synology create these


def state_of(path: str | Path) -> str:
    """Return size, modification time and inode change time of a file. The text changes whenever the file changes.

    The modification time is not enough: cp -p and rsync copy it from another file. No program can set the inode change
    time.
    """
    state = regular(Path(path)).stat()
    return f"{state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}"


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_folder(path: Path, flag: str, write: bool = True) -> None:
    """Raise UserError unless `path`, the value of a flag, is a writable folder or can be created.

    With `write=False`, an existing folder need not be writable, but must be readable.
    """
    existing = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    if not existing.is_dir():
        raise UserError(f"{flag} {path}: {existing} is not a folder: choose another folder")
    if not os.access(existing, os.X_OK | (os.W_OK if write else os.R_OK)):
        missing = "writable" if write else "readable"
        raise UserError(f"{flag} {path}: {existing} is not {missing}: choose another folder, or fix the permissions")


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """Context manager: yield the path of a temporary file beside `path`, flush it to disk, and rename it to `path`.

    After an error, the temporary file is removed and `path` is unchanged. A killed process leaves at most the temporary
    file, named `*.tmp`.
    """
    part = _part(path)
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
        content = json.loads(regular(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def write_csv(path: Path, columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV atomically; missing values are empty cells. Characters that UTF-8 cannot encode become escapes."""
    with atomically(path) as part, part.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.DictWriter(file, [*columns])
        writer.writeheader()
        writer.writerows(rows)


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


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
    """Return the content of a YAML file; see `parse_yaml`. Raises FileNotFoundError if the file does not exist."""
    try:
        return parse_yaml(regular(path).read_text(encoding="utf-8-sig"), name)
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name}: cannot be read: {error}") from error


def parse_yaml(text: str, name: str) -> Any:
    """Return the content of a YAML document; keys of mappings must be unique strings. Dates stay strings.

    Raises a UserError that begins with `name` if the text is not a YAML document with such keys.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UserError(f"{name}: not readable as YAML: {line}{error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a malformed number such as 0b_ raises ValueError
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
    """A SafeLoader that rejects more than `MAX_NODES` values, keys that are not strings, and duplicate keys."""

    def construct_document(self, node: yaml.Node) -> Any:
        nodes = [node]
        for one in nodes:  # the loop appends the parts of each node, and again for each alias of the node
            if len(nodes) > MAX_NODES:
                raise yaml.YAMLError(f"it has more than {MAX_NODES:,} values, aliases written out")
            if isinstance(one, yaml.CollectionNode):
                nodes += chain.from_iterable(one.value) if isinstance(one, yaml.MappingNode) else one.value
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen or not key.tag.endswith((":str", ":merge")):
                problem = f"the key {key.value!r} is repeated, or not a string: keep one, in quotes"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_yaml_str)
