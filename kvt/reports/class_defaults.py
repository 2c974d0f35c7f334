"""Reads the arguments of kvt's task and data classes from their source, so that `kvt show` need not import torch."""

import ast
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

NO_DEFAULT = object()
TASKS = Path(__file__).parents[1] / "tasks"


def defaults_of(name: str) -> dict[str, Any]:
    """Return a dict that maps each argument of the constructor of a class in kvt/tasks to its default.

    The value is `...` if the argument has no default, or if the default is not a Python literal.

    >>> defaults_of("HumanNumbers")
    {'length': 16, 'val_size': 0.2, 'batch_size': 64, 'seed': 0, 'data_dir': None}
    """
    return dict(_arguments(_classes(), name, {}))


@cache
def _classes() -> Mapping[str, ast.ClassDef]:
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in sorted(TASKS.glob("*.py"))]
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def _arguments(
    classes: Mapping[str, ast.ClassDef], name: str, usual: Mapping[str, Any], made: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a class's constructor, then those of base classes that get its **kwargs.

    As in `kvt.tasks.options`, keywords of a class statement replace defaults. `usual` has the keywords found so far.
    Parameters of `make_model` with a default are arguments of the constructor. If `made` is true, a subclass has
    overridden `make_model`, and the parameters of the overridden method are skipped.
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
