"""YAML settings: plain data, or one line that names the file and the line."""

from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import strategies as st

from kvt.system.errors import UserError
from kvt.system.files import parse_yaml, read_yaml
from tests.helpers.hostile import fuzz

BOMB = "a: &a [1, 1]\n" + "".join(f"{n}: &{n} [*{o}, *{o}]\n" for o, n in pairwise("abcdefghijklmopqrstuvwxz"))
"""Two lines for a value twice as large each: 2²⁴ numbers in 24 lines."""


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a: 1\nb: 2\na: 3\n", ["line 3", "'a' is repeated"]),
        ("a:\n  b: 1\n  b: 2\n", ["line 3", "'b' is repeated"]),
        ("a: 1\n2: 3\n", ["line 2", "quotes"]),
        ("no: 3\n", ["line 1", "quotes"]),
        ("a: 0b_\n", []),
        ("a: 1\nb: !!python/object/apply:os.mkdir [owned]\n", ["line 2", "tag"]),
        ("--- 1\n--- 2\n", ["line 2", "document"]),
        ("a:\n\tb: 1\n", ["line 2"]),
        (BOMB, ["more than 100,000 values"]),
        ("a: &a [*a]\n", ["more than 100,000 values"]),
    ],
)
def test_errors_name_the_line(text, named, in_tmp_dir):
    with pytest.raises(UserError, match=r"^mine\.yaml: ") as refused:
        parse_yaml(text, "mine.yaml")
    for words in named:
        assert words in str(refused.value)
    assert not Path("owned").exists()


def test_merges_are_allowed_and_dates_are_strings():
    merged = parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\n", "mine.yaml")
    assert merged["b"] == {"x": 3, "y": 2}
    assert parse_yaml("a: 2024-12-24\n", "mine.yaml") == {"a": "2024-12-24"}


def test_files(tmp_path):
    (tmp_path / "mark.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    (tmp_path / "latin.yaml").write_bytes(b"a: caf\xe9\n")
    assert read_yaml(tmp_path / "mark.yaml", "it") == {"a": 1}
    for path in (tmp_path / "latin.yaml", tmp_path, tmp_path / "mark.yaml" / "x", Path("a" * 5000)):
        with pytest.raises(UserError, match="it: cannot be read"):
            read_yaml(path, "it")
    with pytest.raises(FileNotFoundError):
        read_yaml(tmp_path / "nowhere.yaml", "it")


NAMES = st.text("abcdefgh", min_size=1, max_size=3).filter(lambda name: name not in ("y", "n"))
DATA = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.text("abc 1[]{}:#&*!'\"\n", max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
FRAGMENTS = ["[", "]", "{", "}", ": ", "- ", "&a ", "*a", "!!set ", "<<: ", "? ", "|", "---\n", "\t", "\n", "\0"]
FRAGMENTS += ["\ufeff", "\x85", "\u2028", "'", '"', "#", "%", "@", "\ud800", "1e400", "0b_", "2024-99-99", "=", "~"]


@fuzz(0.08, data=DATA, spoil=st.lists(st.tuples(st.integers(0, 200), st.sampled_from(FRAGMENTS)), max_size=2))
def test_documents(held, data, spoil):
    text = yaml.safe_dump(data)
    for at, fragment in spoil:
        text = text[:at] + fragment + text[at:]
    found = []
    held(lambda: found.append(parse_yaml(text, "mine.yaml")), "mine.yaml")
    assert spoil or found == [data]
