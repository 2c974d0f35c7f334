"""YAML as a user hands it in: plain data of a sensible size, every key once."""

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import yaml
from yaml.parser import ParserError
from yaml.reader import ReaderError
from yaml.scanner import ScannerError

from kvt.system.errors import UserError, resource_limit_message

LARGEST = 2**20
"""Bytes of a document."""
DEEPEST = 32
"""Levels of nesting: what reads a document calls itself at each."""
MOST = 100_000
"""Values in it, each counted as often as aliases repeat it."""
DIGITS = 100
"""Of a number: Python does not print one of many thousands."""
KINDS = {f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str", "int", "float", "bool", "null", "merge")}
"""Of values."""


def read_yaml(path: Path, name: str) -> Any:
    """What a YAML file holds.

    Args:
        path: of the file.
        name: what an error calls it.

    Raises:
        UserError: it cannot be read, or see `parse_yaml`.
        FileNotFoundError: there is none.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe may never say anything, a device never end
            raise UserError(f"{name}: not a file: name one that holds YAML")
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
    except (FileNotFoundError, UserError):
        raise
    except (OSError, ValueError) as error:  # ValueError: no file can have this name
        raise UserError(f"{name}: cannot be read: {resource_limit_message(error) or error}") from error
    try:
        return parse_yaml(raw.decode("utf-8-sig"), name)
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 at byte {error.start}: save it as UTF-8") from error


def parse_yaml(text: str, name: str) -> Any:
    """What a YAML text holds.

    Args:
        text: a single document.
        name: what an error calls it.

    Raises:
        UserError: it is not YAML, has a key twice or one that is no text, or is more than anybody means.
    """
    if len(text) > LARGEST:
        raise UserError(f"{name}: more than {LARGEST // 2**20} MiB: these are no settings")
    try:
        return _load(text)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UserError(f"{name}: not readable as YAML: {line}{error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number or a date that is none
        raise UserError(f"{name}: not readable as YAML: {error}") from error


def require_plain(text: str, name: str) -> None:
    """Makes sure of a text, which may be YAML or not, that it has no key twice and is not too much, as `parse_yaml`.

    Raises:
        UserError: it has, or is.
    """
    try:
        _load(text)
    except _Refused as error:
        raise UserError(f"{name}: {error.problem}") from error
    except yaml.YAMLError:
        return
    except UnicodeError as error:
        raise UserError(f"{name} {text}: is not UTF-8: if it is the name of a file, rename that") from error
    except ValueError as error:
        raise UserError(f"{name} {text}: looks like a number and is none ({error})") from error


class _Refused(yaml.MarkedYAMLError):
    """What is YAML, but no settings."""


def _refused(at: yaml.Node | yaml.Event, problem: str) -> _Refused:
    return _Refused(problem=problem, problem_mark=at.start_mark)


def _load(text: str) -> Any:
    _require_shallow(text)
    if (node := yaml.compose(text, _Loader)) is not None:
        _count(node, {})
    return yaml.load(text, _Loader)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Takes no key twice, where YAML's own takes the last, and none that is no text; a date is a text."""

    yaml_implicit_resolvers: ClassVar = {
        sign: [(tag, pattern) for tag, pattern in kinds if tag in KINDS]
        for sign, kinds in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """What a mapping's node stands for."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not key.tag.endswith((":str", ":merge")) or not key.value:
                raise _refused(key, "a key that is no text: put it in quotes")
            if key.value in lines:
                raise _refused(key, f"{key.value!r} is there again, after line {lines[key.value]}: keep one")
            lines[key.value] = key.start_mark.line + 1
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _require_shallow(text: str, depth: int = 0) -> None:
    """Text in quotes counts as what it says without them: a parser of settings reads it once more."""
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise _refused(event, f"nested more than {DEEPEST} deep")
        if isinstance(event, yaml.ScalarEvent) and event.value != text.strip():
            with suppress(ParserError, ReaderError, ScannerError):  # then it is text and no more
                _require_shallow(event.value, depth + 1)


def _count(node: yaml.Node, counted: dict[yaml.Node, int]) -> int:
    """The values in a node, written out in full, no more than `MOST`; those of nodes met before are known."""
    if node not in counted:
        counted[node] = 0  # until its end
        pairs = [pair if isinstance(pair, tuple) else (pair,) for pair in node.value if node.id != "scalar"]
        counted[node] = 1 + sum(_count(part, counted) for pair in pairs for part in pair)
        if counted[node] > MOST:
            raise _refused(node, f"more than {MOST:,} values")
        if node.tag not in KINDS:
            raise _refused(node, f"a value of the kind {node.tag}: leave the tag out")
        if node.tag.endswith((":int", ":float")) and len(node.value) > DIGITS:
            raise _refused(node, f"a number of {len(node.value)} digits")
    elif not counted[node]:
        raise _refused(node, "an alias that is a part of itself")
    return counted[node]
