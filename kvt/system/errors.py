"""Defines `UserError` for mistakes of a user, checks that raise UserError, and messages for machine limits."""

import errno
import os
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from math import inf
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

LIMITS = {  # remedies for errors of the operating system that limits of the machine cause, not bugs
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "your disk quota is used up: free disk space",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EROFS: "choose a writable path",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EACCES: "choose a path you may read and write",
    errno.EPERM: "choose a path you may read and write",
    errno.EISDIR: "a file is written there: rename the folder",
    errno.ELOOP: "remove the link",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EAGAIN: "raise the limit of processes and threads (ulimit -u)",
}
Choice = TypeVar("Choice")
OUT_OF_MEMORY = "allocate memory|out of memory|could not create a primitive"  # RuntimeErrors of torch and oneDNN


class UserError(ValueError):
    """An exception for a mistake in a flag, file or folder. `kvt` prints the message in one line and exits with 2."""


def mistake_in(error: BaseException) -> UserError | OSError | None:
    """Return the error itself or its cause, if it is a UserError or an OSError. jsonargparse wraps some UserErrors."""
    return next((one for one in (error, error.__cause__) if isinstance(one, UserError | OSError)), None)


def exception_chain(error: BaseException) -> list[BaseException]:
    """Return an exception, its cause, the cause's cause and so on, without repetitions."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return chain


def is_resource_limit(error: BaseException) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and error.errno in LIMITS


def resource_limit_message(error: BaseException, default_path: str | Path = "") -> str | None:
    """Return path, reason and remedy of the first resource limit in an exception's chain; None without a limit.

    `default_path` replaces the path of an error without a path.
    """
    for cause in exception_chain(error):
        if is_resource_limit(cause):
            path = os.fsdecode(cause.filename2 or cause.filename or default_path)
            return f"{path}{': ' * bool(path)}{cause.strerror}: {LIMITS[cause.errno or 0]}"
        if "can't start new thread" in str(cause):
            return f"{cause}: {LIMITS[errno.EAGAIN]}"
    return None


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or re.search(OUT_OF_MEMORY, str(error)) is not None


def unknown(kind: str, name: object, known: Iterable[str]) -> UserError:
    """Return the error for a `name` that is not in `known`. The message suggests the most similar known name."""
    names = list(known)
    nearest = get_close_matches(str(name), names, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return UserError(f"unknown {kind} {name!r}: {hint}choose from {', '.join(names)}")


def choose(kind: str, name: str, known: Mapping[str, Choice]) -> Choice:
    """Return `known[name]`; raise UserError if `known` has no such name."""
    if name not in known:
        raise unknown(kind, name, known)
    return known[name]


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


def require_finite(**values: object) -> None:
    """Raise UserError unless all numbers, also in lists, are finite, and all integers fit in 64 bits."""
    for name, value in values.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and not (abs(number) < (2**63 if isinstance(number, int) else inf)):
                raise UserError(f"{name}={number} must be finite, and an integer must fit in 64 bits")


def require_seed(seed: int) -> None:
    """Raise UserError unless `seed` is an integer from 0 to 2³² − 1, which every random generator in kvt accepts."""
    if isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise UserError(f"--seed {seed}: expected int from 0 to {2**32 - 1}")


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
    """Import an object and return it; None if its module has no such name. `import_class` has the same arguments."""
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
def argument_names(cls: type) -> frozenset[str]:
    """Return the names of a constructor's arguments, including arguments of base classes that **kwargs passes on.

    An argument that the class itself passes to its base is left out, such as `lr` in `super().__init__(spec, lr=0.25,
    **kwargs)`.
    """
    from jsonargparse import ArgumentParser  # finds the arguments behind **kwargs

    added = ArgumentParser(exit_on_error=False).add_class_arguments(cls, fail_untyped=False)
    return frozenset(name.partition(".")[0] for name in added)


def first_mistake(error: Any) -> str:
    """Return the location and the message of an error in a pydantic ValidationError: the first, or a misspelt key's."""
    plain = {"missing": "this key is missing", "extra_forbidden": "there is no such key"}
    mistakes = error.errors(include_url=False)
    first = min(mistakes, key=lambda mistake: mistake["type"] == "missing")  # a misspelt key also gives "missing"
    return ": ".join([*map(str, first["loc"]), plain.get(first["type"], first["msg"])])
