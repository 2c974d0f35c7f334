"""The rooms of the package: imports run one way."""

import ast
from pathlib import Path

import pytest

import kvt

ROOT = Path(kvt.__file__).parent
ROOMS = ["cli", "reports", "study", "bench", "training", "tasks", "models", "data", "attention", "system"]
"""A room imports from those after it."""
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def imported(source: str) -> set[str]:
    """The modules of kvt that a source file imports, wherever in it.

    >>> sorted(imported("import kvt.tasks\\nfrom kvt.data import loader\\nfrom kvt import models"))
    ['kvt.data', 'kvt.models', 'kvt.tasks']
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"kvt.{alias.name}" for alias in node.names} if node.module == "kvt" else {node.module or ""}
    return {name for name in names if name.split(".")[0] == "kvt"}


def test_nothing_stands_outside_a_room():
    assert {path.parts[0] for path in FILES} == {*ROOMS, "__init__.py", "__main__.py"}


@pytest.mark.parametrize("path", [path for path in FILES if len(path.parts) > 1], ids=str)
def test_a_file_imports_from_the_rooms_below_it(path):
    above = ROOMS[: ROOMS.index(path.parts[0])]
    assert not [
        name for name in imported((ROOT / path).read_text()) if name.split(".")[1:2] in [[room] for room in above]
    ]


def test_no_room_imports_in_a_circle():
    modules = {".".join(("kvt", *path.with_suffix("").parts)).removesuffix(".__init__"): path for path in FILES}
    arrows = {}
    for name, path in modules.items():
        found = ast.parse((ROOT / path).read_text()).body
        source = "\n".join(ast.unparse(node) for node in found if isinstance(node, ast.Import | ast.ImportFrom))
        arrows[name] = imported(source) & modules.keys() - {name}

    def behind(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " → ".join((*way, name))
        for other in arrows[name]:
            if other not in done:
                behind(other, (*way, name))
        done.add(name)

    done: set[str] = set()
    for name in modules:
        behind(name, ())
