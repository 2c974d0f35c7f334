"""Random damage to files, folders and plain data, as hypothesis strategies."""

import copy
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


def clear(folder: Path) -> None:
    """Remove everything in a folder."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


NUMBERS = [0, -1, 1, 3, 0.5, 2**31, 2**63, 10**30, float("nan"), float("inf"), -1e308, True]
TEXTS = ["", "x", "~", "ä\u2028", "🙂", "\x1b[2J", "a\nb", "%s{0}", "..", "{a: 1}", "[1", "1e3", "x" * 9999, "a: b: c"]
"""Values of YAML and JSON that a setting hardly ever has."""

CUT = st.builds(lambda keep: partial(cut, keep=keep), st.floats(0, 1))
FLIP = st.builds(lambda at, bits: partial(flip, at=at, bits=bits), st.floats(0, 1), st.integers(1, 255))
CONTENTS = st.sampled_from([b"", b"\0" * 999, b"GIF89a", b"PK\x03\x04"]) | st.binary()
FILL = st.builds(lambda content: lambda path: path.write_bytes(content), CONTENTS)


@st.composite
def spoiled(draw, content, values):
    """Draw a copy of plain data in which values are changed, removed, added or moved; new ones come from `values`."""
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 2))):
        inner = [part for part in _containers(content) if part]
        if not inner:
            break
        place, target = draw(st.sampled_from(inner)), draw(st.sampled_from(inner))
        key = draw(st.sampled_from([*place] if isinstance(place, dict) else range(len(place))))
        new = copy.deepcopy(draw(values))
        match draw(st.sampled_from(["change", "change", "change", "remove", "wrap", "add", "move"])):
            case "change":
                place[key] = new
            case "remove":
                del place[key]
            case "wrap":
                place[key] = [place[key]]
            case how:
                added = new if how == "add" else place.pop(key)
                if isinstance(target, list):
                    target.append(added)
                else:
                    target[draw(st.sampled_from([str(key), str(new)[:50]]))] = added
    return content


def _containers(content):
    """Yield every dictionary and list in plain data, itself first."""
    if isinstance(content, dict | list):
        yield content
        for part in content.values() if isinstance(content, dict) else content:
            yield from _containers(part)
