"""The arguments of a class and their defaults, read from its source: importing torch and Lightning takes seconds."""

import ast
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NO_DEFAULT = object()


def defaults_of(package: str, place: str, name: str) -> dict[str, Any]:
    """Return the constructor's arguments of a class with their defaults; a default that is no literal is `...`.

    Args:
        package: name of the package of the class, which is not imported.
        place: path in the package of a file, or of a folder of files, with the class and those of its bases whose
            arguments are wanted.
        name: name of the class.

    >>> defaults_of("kvt", "tasks", "HumanNumbers")
    {'length': 16, 'val_size': 0.2, 'batch_size': 64, 'seed': 0, 'data_dir': None}
    """
    return dict(_arguments(_classes(package, place), name, {}))


@cache
def _classes(package: str, place: str) -> Mapping[str, ast.ClassDef]:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin
    path = Path(spec.origin).parent / place
    files = sorted(path.glob("*.py")) if path.is_dir() else [path]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def _arguments(
    classes: Mapping[str, ast.ClassDef], name: str, usual: Mapping[str, Any], made: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a class's constructor, then the arguments that it passes on to its bases by **kwargs.

    As in `kvt.tasks.options`, keywords of a class statement, `usual`, replace defaults. Parameters of `make_model` with
    a default are arguments of the constructor, unless a subclass has overridden `make_model`, which is `made`.
    """
    if name not in classes:
        return
    node = classes[name]
    usual = {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg} | dict(usual)
    functions = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
    init, make_model = functions.get("__init__"), functions.get("make_model")
    if make_model and not made:
        own = {argument: value for argument, value in _parameters(make_model) if value is not NO_DEFAULT}
        yield from own.items()
        usual |= own
    for argument, value in _parameters(init) if init else ():
        yield argument, usual.get(argument, ... if value is NO_DEFAULT else value)
    if not init or init.args.kwarg:
        for base in node.bases:
            if isinstance(base, ast.Name):
                yield from _arguments(classes, base.id, usual, made or make_model is not None)


def _parameters(function: ast.FunctionDef) -> Iterator[tuple[str, Any]]:
    arguments = function.args
    positional = arguments.args[1:]
    given: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    for argument, default in [*zip(positional, given, strict=True), *keywords]:
        yield argument.arg, NO_DEFAULT if default is None else _value(default)


def _value(default: ast.expr) -> Any:
    with suppress(ValueError):
        return ast.literal_eval(default)
    return ...
