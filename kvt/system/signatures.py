"""The arguments of a class and their defaults, read from its source: importing torch and Lightning takes seconds."""

import ast
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def defaults_of(package: str, place: str, name: str) -> dict[str, Any]:
    """Return the constructor's arguments of a class with their defaults; those that are no literal are `...`.

    Args:
        package: of the class; nothing of it is imported.
        place: the file in it, or the folder of files, where the class is, and those of its bases that are looked at.
        name: of the class.

    >>> defaults_of("kvt", "tasks", "HumanNumbers")
    {'length': 16, 'val_size': 0.2, 'batch_size': 64, 'seed': 0, 'data_dir': None}
    """
    return dict(_arguments(_classes(package, place), name))


@cache
def _classes(package: str, place: str) -> Mapping[str, ast.ClassDef]:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin
    path = Path(spec.origin).parent / place
    files = sorted(path.glob("*.py")) if path.is_dir() else [path]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def _arguments(classes: Mapping[str, ast.ClassDef], name: str) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a class, then those that it passes on to its bases by **kwargs."""
    if name not in classes:
        return
    made = [one for one in classes[name].body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    for init in made:
        positional = init.args.args[1:]
        given: list[ast.expr | None] = [None] * (len(positional) - len(init.args.defaults)) + [*init.args.defaults]
        both = [*zip(positional, given, strict=True), *zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True)]
        for argument, default in both:
            yield argument.arg, _value(default)
    if not made or made[0].args.kwarg:
        for base in classes[name].bases:
            if isinstance(base, ast.Name):
                yield from _arguments(classes, base.id)


def _value(default: ast.expr | None) -> Any:
    with suppress(ValueError):
        return ... if default is None else ast.literal_eval(default)
    return ...
