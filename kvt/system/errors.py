"""Defines `UserError` for mistakes of a user, and checks that raise UserError."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from inspect import signature
from math import inf
from typing import Any, TypeVar

Choice = TypeVar("Choice")


class UserError(ValueError):
    """An exception for a mistake in a flag, file or folder. `kvt` prints the message in one line and exits with 2."""


def mistake_in(error: BaseException) -> UserError | OSError | None:
    """Return the UserError or OSError that an exception is, or that it hides; None for all other exceptions.

    jsonargparse raises a ValueError from some UserErrors. After an OSError, torch.save raises a RuntimeError.
    """
    hidden = error.__context__ if type(error) is RuntimeError else error.__cause__
    return next((one for one in (error, hidden) if isinstance(one, UserError | OSError)), None)


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


def argument_defaults(cls: Any) -> dict[str, Any]:
    """Return a dict from each argument of a class's constructor, or of its base classes' constructors, to its default.

    The default of an argument without a default is `inspect.Parameter.empty`.
    """
    makers = [vars(base).get("__init__") for base in reversed(cls.__mro__)]
    return {p.name: p.default for make in makers if make for p in signature(make).parameters.values()}
