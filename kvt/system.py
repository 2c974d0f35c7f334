"""Functions for all of kvt: `UserError` and checks, text for a terminal, files, and `run`, which runs a command."""

import csv
import hashlib
import logging
import os
import re
import signal
import sys
import threading
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from math import inf
from pathlib import Path
from typing import Any, NoReturn

import yaml

CONFIGS = Path(__file__).parent / "configs"  # one YAML file for each task
GRIDS = Path(__file__).parent / "grids"  # one YAML file for each grid
MAX_LINE_CHARS = 800  # longer error messages, which may quote a large file, lose their middle
NEWLINES = "\n\t"  # control characters that `say` and `tell` print unchanged
IGNORED_WARNINGS = (
    "LeafSpec",  # deprecated in torch
    "smaller than the logging interval",  # the end of an epoch is logged too
    "requested to overfit",  # with --overfit_batches, kvt's loaders do not shuffle
    "callbacks used to create the checkpoint",  # a test runs without the callbacks of fit
    "exists and is not empty",  # a resumed run continues in its own folder
    "missing from font",  # the picture shows a box in place of the character
    "sync_dist=True",  # the means are synchronised before they are logged
)


class UserError(ValueError):
    """An error that the user can correct, such as a wrong flag or file. `kvt` prints one line and exits with 2."""


def mistake_in(error: BaseException) -> UserError | OSError | None:
    """Return `error` if it is a UserError or OSError, else its cause if the cause is one of these; None otherwise.

    jsonargparse raises a ValueError from some UserErrors. torch.save raises a RuntimeError while it handles an OSError,
    which is then the `__context__`, not the `__cause__`, of the RuntimeError.
    """
    hidden = error.__context__ if type(error) is RuntimeError else error.__cause__
    return next((one for one in (error, hidden) if isinstance(one, UserError | OSError)), None)


def unknown(kind: str, name: object, known: Iterable[str]) -> UserError:
    """Return the error for a `name` that is not in `known`. The message suggests a similar known name, if any."""
    names = list(known)
    nearest = get_close_matches(str(name), names, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return UserError(f"unknown {kind} {name!r}: {hint}choose from {', '.join(names)}")


def require_choice(kind: str, name: str, known: Collection[str]) -> None:
    """Raise UserError if `name` is not in `known`."""
    if name not in known:
        raise unknown(kind, name, known)


def require_positive(**numbers: float) -> None:
    """Raise UserError unless every value is a finite number above zero."""
    for name, number in numbers.items():
        if not isinstance(number, int | float) or not 0 < number < inf:
            raise UserError(f"{name}={number} must be a number greater than 0")


def require_probability(**numbers: float) -> None:
    """Raise UserError unless every value is a number in [0, 1)."""
    for name, number in numbers.items():
        if not isinstance(number, int | float) or not 0 <= number < 1:
            raise UserError(f"{name}={number} must be a number, at least 0 and below 1")


def import_class(path: str, flag: str, base: type[Any], known: Iterable[str]) -> type[Any]:
    """Import a class and return it.

    Args:
        path: the import path, such as my_attention.NearKV.
        flag: the flag to which the user passed the path, for messages.
        base: the class that the imported class must be derived from.
        known: names that the flag accepts besides import paths, for messages.

    Raises:
        UserError: the path does not lead to a subclass of `base`.
    """
    cls = import_object(path, flag, known)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        module_name, _, name = path.rpartition(".")
        raise UserError(f"{flag} {path!r}: {module_name} has no {base.__name__} called {name!r}")
    return cls


def import_object(path: str, flag: str, known: Iterable[str]) -> Any:
    """Return an imported object, or None if its module lacks it; raise UserError if `path` names no existing module."""
    if not isinstance(path, str) or path.startswith(".") or "." not in path:
        raise unknown(flag, path, known)
    module_name, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the user's module exists, but imports a missing module
        raise UserError(f"{flag} {path!r}: no module {error.name!r} in this folder or the environment") from error


@cache
def arguments(cls: Any) -> dict[str, Any]:
    """Return a dict that maps each argument of a constructor to its default, or to None if it has no default.

    The dict includes arguments that **kwargs passes on to base classes. It lacks an argument that a class sets for its
    base, such as `lr` in `super().__init__(spec, lr=0.25, **kwargs)`, unless the class itself takes it, too.
    """
    from jsonargparse import ArgumentParser  # finds the arguments behind **kwargs

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, fail_untyped=False)
    return parser.get_defaults().as_dict()


# ---- text ----


def printable(text: object, keep: str = "") -> str:
    r"""Return a text in which escapes replace all unprintable characters except the characters in `keep`.

    >>> printable("a\n\x1b[2J")
    'a\\n\\x1b[2J'
    """
    return "".join(char if char.isprintable() or char in keep else repr(char)[1:-1] for char in str(text))


def one_line(message: str) -> str:
    r"""Return a message as one printable line. An ellipsis replaces the middle of a long message.

    >>> one_line("no\n such\tfile: \x1b[2J")
    'no such file: \\x1b[2J'
    """
    line, half = printable(" ".join(message.split())), MAX_LINE_CHARS // 2
    return line if len(line) <= MAX_LINE_CHARS else f"{line[:half]} … {line[-half:]}"


# ---- files ----


def user_path(text: str | Path) -> Path:
    """Return the path with ~ expanded; raise UserError if it is empty."""
    if not str(text):
        raise UserError("empty path: name a file or a folder; is a variable unset?")
    return Path(text).expanduser()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_folder(path: Path, flag: str, write: bool = True) -> None:
    """Raise UserError unless `path`, the value of a flag, is a writable folder or can be created.

    With `write=False`, the folder, or its nearest existing parent, need only be readable.
    """
    existing = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    if not (existing.is_dir() and os.access(existing, os.X_OK | (os.W_OK if write else os.R_OK))):
        kind = "writable" if write else "readable"
        raise UserError(f"{flag} {path}: {existing} is not a {kind} folder: choose another folder")


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """Context manager: yield the path of a temporary file beside `path`; at the end, flush it and rename it to `path`.

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
    """Write bytes, or text as UTF-8, to `path`, with `atomically`."""
    with atomically(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


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
    path, packaged = Path(named).expanduser(), folder / f"{named}.yaml"
    return path if os.path.isfile(path) or not os.path.isfile(packaged) else packaged


def yaml_names(folder: Path) -> list[str]:
    """Return the sorted names of the YAML files in a folder of kvt, such as cifar10 for configs/cifar10.yaml."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def parse_yaml(text: str | bytes, name: str) -> Any:
    """Return the content of a YAML document, in which dates stay strings.

    Raises a UserError that begins with `name` if the text is not YAML, or has tags such as !!python/name.
    """
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:  # a malformed number such as 0b_ raises ValueError
        raise UserError(f"{name}: not readable as YAML: {error}") from error


def parse_settings(words: Iterable[str], flag: str) -> dict[str, Any]:
    """Return a dict from words such as kv_heads=1, whose values are YAML; raise UserError for any other word."""
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


# ---- commands ----


@contextmanager
def signals_handled(handler: Any, numbers: Sequence[int]) -> Iterator[None]:
    """Context manager: set `handler` for the signals in `numbers`; at the end, restore the old handlers.

    Ignored signals stay ignored. In any thread but the main thread, the handlers do not change, because Python forbids
    it. With SIG_IGN as `handler`, processes that start inside the context ignore the signals, too.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    heard = [number for number in numbers if in_main_thread and signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def say(text: str) -> None:
    """Write text to stderr in each machine's first process, unbuffered, so that signal handlers may call `say`."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(OSError):
            os.write(2, f"{printable(text, keep=NEWLINES)}\n".encode())


def tell(text: object, end: str = "\n") -> None:
    """Print the output of a command. Escapes replace unprintable characters except newlines and tabs."""
    print(printable(text, keep=NEWLINES), end=end, flush=True)


def table(summary: Mapping[str, Any]) -> str:
    """Return names and values in two columns.

    >>> print(table({"test/acc": 0.98765, "parameters": 12345}))
    test/acc    0.9877
    parameters  12,345
    >>> table({})
    ''
    """
    rows = {printable(name): printable(_readable(value)) for name, value in summary.items()}
    width = max(map(len, rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _readable(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 100 else f"{value:,.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_readable(part)}" for name, part in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def run(command: Callable[[], object]) -> None:
    """Run a command. Print a mistake (see `mistake_in`) in one line, and exit with 2; after Ctrl-C, exit with 130."""
    sys.path.append(os.getcwd())  # lets Python find a user's classes in the working directory
    silence_libraries()
    os.environ["MPLBACKEND"] = "agg"  # kvt writes pictures to files, and other backends may not be installed
    try:
        command()
    except KeyboardInterrupt:
        say("stopped")
        sys.exit(130)
    except Exception as error:
        if (mistake := mistake_in(error)) is None:
            raise
        print(f"error: {one_line(str(mistake))}", file=sys.stderr)
        sys.exit(2)


def silence_libraries() -> None:
    """Hide `IGNORED_WARNINGS` and Lightning's messages below WARNING, except messages that a flag requests."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("callbacks.model_summary", "profilers.profiler"):  # the user requests this output by a flag
        logging.getLogger(f"lightning.pytorch.{name}").setLevel(logging.INFO)
    for message in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=f".*{message}")
    if "tqdm" in sys.modules:  # since Python 3.14, its own lock starts a process, which warns if kvt is killed
        sys.modules["tqdm"].tqdm.set_lock(threading.RLock())


class OneLineParser(ArgumentParser):
    """An argument parser whose errors are UserErrors of one line. For an unknown flag, it suggests a similar flag."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        message = " ".join(message.split())
        if flag := re.search(r"[Uu]nrecognized arguments: --([\w.]+)", message):
            near = get_close_matches(flag[1], [name.lstrip("-") for name in self._option_string_actions], n=1)
            message += f": did you mean --{near[0]}?" if near else ": see --help"
        raise UserError(message) from ex
