"""UserError, the exception for a user's mistakes, and checks that raise it."""

import errno
import os
import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from math import inf, isfinite
from pathlib import Path
from typing import TypeGuard

LIMITS = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there, your share is used up",
    errno.EFBIG: "raise your limit for the size of a file (ulimit -f)",
    errno.EROFS: "name a folder that can be written",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EACCES: "open it to yourself, or name another",
    errno.EPERM: "open it to yourself, or name another",
    errno.EIO: "the disk is failing, name a folder on another",
    errno.ESTALE: "the network's disk was away, try again",
    errno.EMFILE: "raise your limit for open files (ulimit -n)",
    errno.ENFILE: "the machine has too many open files, close some",
    errno.EAGAIN: "raise your limit for processes and threads (ulimit -u)",
}
"""Remedies for operating system errors that are limits of the machine, not bugs."""
OUT_OF_MEMORY = "allocate memory|out of memory|Overflow when unpacking|size calculation overflowed|bad_alloc"
"""In the messages of torch, which raises RuntimeError when CPU memory runs out."""


class UserError(ValueError):
    """A mistake in a flag, file or folder: the message is one line that names it and the remedy.

    The command line prints the message and exits with code 2; any other exception is a bug and keeps its traceback.
    """


def exception_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its cause, the cause's cause and so on, each once."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def is_resource_limit(error: BaseException) -> TypeGuard[OSError]:
    """Whether an exception is an OSError of `LIMITS`."""
    return isinstance(error, OSError) and error.errno in LIMITS


def resource_limit_message(error: BaseException, default_path: str | Path = "") -> str | None:
    """Return path, reason and remedy of the first resource limit in an exception's chain; None if there is none.

    `default_path` is used if the exception names no file.
    """
    for cause in exception_chain(error):
        if is_resource_limit(cause):
            path = os.fsdecode(cause.filename or default_path)
            return f"{path}{': ' * bool(path)}{cause.strerror}: {LIMITS[cause.errno or 0]}"
        if "can't start new thread" in str(cause):
            return f"{cause}: {LIMITS[errno.EAGAIN]}"
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out."""
    return isinstance(error, MemoryError) or re.search(OUT_OF_MEMORY, str(error)) is not None


def unknown(kind: str, name: object, known: Iterable[str]) -> UserError:
    """Return the error for a `name` that is not among the `known` ones; it suggests the nearest."""
    names = list(known)
    nearest = get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return UserError(f"unknown {kind} {name!r}: {hint}choose from {', '.join(names)}")


def require_positive(**numbers: float) -> None:
    """Raise UserError unless each is a finite number above zero."""
    for name, number in numbers.items():
        if not _is_number(number) or not 0 < number < inf:
            raise UserError(f"{name}={number} must be a number greater than 0")


def require_finite(**values: object) -> None:
    """Raise UserError unless all numbers, also those in lists, are finite and integers fit into 64 bits."""
    for name, value in values.items():
        for number in value if isinstance(value, list) else [value]:
            if _is_number(number) and not (isfinite(number) if isinstance(number, float) else abs(number) < 2**63):
                raise UserError(f"{name}={number} must be a finite number, an integer of at most 63 bits")


def require_seed(seed: int) -> None:
    """Raise UserError unless it is an integer from 0 to 2³² − 1, which every random generator takes."""
    if isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise UserError(f"--seed {seed}: expected int from 0 to {2**32 - 1}")


def require_probability(**numbers: float) -> None:
    """Raise UserError unless each is a number in [0, 1)."""
    for name, number in numbers.items():
        if not _is_number(number) or not 0 <= number < 1:
            raise UserError(f"{name}={number} must be a number, at least 0 and below 1")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
