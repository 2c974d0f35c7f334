"""Random damage to files, folders and plain data, as hypothesis strategies."""

import copy
import os
import shutil
from functools import partial
from pathlib import Path

from hypothesis import strategies as st


def cut(path: Path, keep: float) -> None:
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])


def flip(path: Path, at: float, bits: int) -> None:
    raw = bytearray(path.read_bytes())
    if raw:
        raw[int(at * (len(raw) - 1))] ^= bits
    path.write_bytes(raw)


def fill(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def replace(path: Path, by: str) -> None:
    """Something that is not a file."""
    path.unlink()
    if by == "folder":
        path.mkdir()
    elif by == "broken link":
        path.symlink_to("nowhere")


def rename(path: Path, name: str | bytes) -> Path:
    """In the new name, `*` stands for the old suffix."""
    new = os.fsencode(name).replace(b"*", os.fsencode(path.suffix))
    os.rename(path, os.path.join(os.fsencode(path.parent), new))
    return path.with_name(os.fsdecode(new))


def clear(folder: Path) -> None:
    """Remove everything in a folder."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


CUT = st.builds(partial, st.just(cut), keep=st.floats(0, 1))
FLIP = st.builds(partial, st.just(flip), at=st.floats(0, 1), bits=st.integers(1, 255))
FILL = st.builds(
    partial, st.just(fill), content=st.sampled_from([b"", b"\0" * 999, b"GIF89a", b"PK\x03\x04"]) | st.binary()
)
REPLACE = st.builds(partial, st.just(replace), by=st.sampled_from(["nothing", "folder", "broken link"]))
NAMES = [
    "*",
    "0",
    "0.txt",
    "ä\u2028\u202e🙂*",
    "a\nb\t\x1b[2J*",
    b"\xff\xfe*",
    "n" * 249 + "*",
    "-rf*",
    "~*",
    " *",
    "%s{0}*",
]


@st.composite
def spoiled(draw, content, values):
    """A copy of plain data in which values are changed, removed, added or moved; `values` are put in."""
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 2))):
        inner = [part for part in _containers(content) if part]
        if not inner:
            break
        container = draw(st.sampled_from(inner))
        key = draw(st.sampled_from([*container] if isinstance(container, dict) else range(len(container))))
        match draw(st.sampled_from(["other", "other", "other", "gone", "in a list", "more", "moved", "renamed"])):
            case "other":
                container[key] = copy.deepcopy(draw(values))
            case "gone":
                del container[key]
            case "in a list":
                container[key] = [container[key]]
            case "more" if isinstance(container, list):
                container.append(copy.deepcopy(draw(values)))
            case "more":
                container[str(draw(values))[:50]] = copy.deepcopy(draw(values))
            case "renamed" if isinstance(container, dict):
                container[str(draw(values))[:50]] = container.pop(key)
            case _ if container is not content:
                value = container.pop(key)
                target = draw(st.sampled_from([c for c in _containers(content) if isinstance(c, dict)]))
                target[str(key)] = value
    return content


def _containers(content):
    """Every dictionary and list in plain data, itself first."""
    if isinstance(content, dict | list):
        yield content
        for part in content.values() if isinstance(content, dict) else content:
            yield from _containers(part)
