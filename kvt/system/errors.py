"""The one exception for mistakes that are the user's to mend, and how others are told."""

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
    errno.EACCES: "open it to yourself, or name another",
    errno.EPERM: "open it to yourself, or name another",
    errno.EIO: "the disk is failing, name a folder on another",
    errno.ESTALE: "the network's disk was away, try again",
    errno.EMFILE: "raise your limit for open files (ulimit -n)",
    errno.ENFILE: "the machine has too many open files, close some",
    errno.EAGAIN: "raise your limit for processes and threads (ulimit -u)",
}
"""What a machine may refuse at any moment, which is no mistake in the code, and the remedy."""


class UserError(ValueError):
    """A mistake in a flag, a file or a folder: its message is one line that names it and the remedy.

    The command line prints the message and exits with code 2; every other exception is a bug of ours
    and keeps its traceback.
    """


def exception_chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and those that led to it, the last first, each once: one that is raised again may lead to itself."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def is_resource_limit(error: BaseException) -> TypeGuard[OSError]:
    """Whether an exception is one of `LIMITS` itself."""
    return isinstance(error, OSError) and error.errno in LIMITS


def resource_limit_message(error: BaseException, somewhere: str | Path = "") -> str | None:
    """Which of `LIMITS` is behind an exception, and where; None if none is.

    Args:
        error: the exception.
        somewhere: where it must have been, if the exception does not say.
    """
    for cause in exception_chain(error):
        if is_resource_limit(cause):
            where = os.fsdecode(cause.filename or somewhere)
            return f"{where}{': ' * bool(where)}{cause.strerror}: {LIMITS[cause.errno or 0]}"
        if "can't start new thread" in str(cause):
            return f"{cause}: {LIMITS[errno.EAGAIN]}"
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says so; on a CPU torch has no class of its own for it."""
    words = "allocate memory|out of memory|Overflow when unpacking|size calculation overflowed|bad_alloc"
    return isinstance(error, MemoryError) or re.search(words, str(error)) is not None


def unknown(kind: str, name: object, known: Iterable[str]) -> UserError:
    """The error for a `name` that is none of the `known` ones, with the nearest of them first."""
    names = list(known)
    nearest = get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return UserError(f"unknown {kind} {name!r}: {hint}choose from {', '.join(names)}")


def require_positive(**numbers: float) -> None:
    """Makes sure that each is a finite number above zero.

    Raises:
        UserError: one is not; it is named.
    """
    for name, number in numbers.items():
        if not _is_number(number) or not 0 < number < inf:
            raise UserError(f"{name}={number} must be a number greater than 0")


def require_finite(**values: object) -> None:
    """Makes sure that numbers, and those in lists, are finite, and whole ones no greater than a machine counts with.

    Raises:
        UserError: one is not; it is named.
    """
    for name, value in values.items():
        for number in value if isinstance(value, list) else [value]:
            if _is_number(number) and not (isfinite(number) if isinstance(number, float) else abs(number) < 2**63):
                raise UserError(f"{name}={number} must be a finite number, a whole one of at most 63 bits")


def require_seed(seed: int) -> None:
    """Makes sure that it is one that every random generator takes.

    Raises:
        UserError: it is not an integer from 0 to 2³² − 1.
    """
    if isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise UserError(f"--seed {seed}: expected int from 0 to {2**32 - 1}")


def require_probability(**numbers: float) -> None:
    """Makes sure that each is a number from zero to below one.

    Raises:
        UserError: one is not; it is named.
    """
    for name, number in numbers.items():
        if not _is_number(number) or not 0 <= number < 1:
            raise UserError(f"{name}={number} must be a number, at least 0 and below 1")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
