"""Hostile YAML: plain data of a sensible size, or one line that names the file and, where there is one, the line."""

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import strategies as st

from kvt.system.errors import UserError
from kvt.system.yaml_io import MOST, parse_yaml, read_yaml, require_plain
from tests.helpers.hostile import fuzz

NAMES = st.text("abcdefgh", min_size=1, max_size=3).filter(lambda name: name not in ("y", "n"))
DATA = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.text("abc 1[]{}:#&*!'\"\n", max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
FRAGMENTS = [
    *(
        "[",
        "]",
        "{",
        "}",
        ": ",
        "- ",
        "&a ",
        "*a",
        "!!set ",
        "!!python/object/apply:os.mkdir [owned]",
        "<<: ",
        "? ",
        "|",
        "---\n",
    ),
    *(
        "\t",
        "\n",
        "\0",
        "\ufeff",
        "\x85",
        "\u2028",
        "'",
        '"',
        "#",
        "%",
        "@",
        "\ud800",
        "1e400",
        "0b_",
        "2024-99-99",
        "=",
        "~",
    ),
    *("[" * 10_000, "- " * 10_000, "'" + "[" * 10_000 + "'", "9" * 5000, "0x" + "f" * 5000, "&a [*a]", "a: 1\na: 2\n"),
]
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)

REFUSED = {
    "a key twice": ("a: 1\nb: 2\na: 3\n", ["line 3", "'a' is there again, after line 1"]),
    "a key twice within": ("a:\n  b: 1\n  b: 2\n", ["line 3", "'b' is there again, after line 2"]),
    "a key that is a number": ("a: 1\n2: 3\n", ["line 2", "quotes"]),
    "a key that is a truth value": ("no: 3\n", ["line 1", "quotes"]),
    "an empty key": ("'': 3\n", ["line 1", "quotes"]),
    "billions of values": (BOMB, ["line 5", f"{MOST:,}"]),
    "a part of itself": ("a: &a [*a]\n", ["line 1", "itself"]),
    "deep": ("a:\n  " + "[" * 100_000, ["line 2", "deep"]),
    "deep in quotes": (f"a: '{'[' * 100_000}'\n", ["deep"]),
    "a number of many digits": (f"a: 0x{'f' * 5000}\n", ["line 1", "5002 digits"]),
    "a number that is none": ("a: 0b_\n", ["mine.yaml"]),
    "a tag": ("a: 1\nb: !!python/object/apply:os.mkdir [owned]\n", ["line 2", "tag"]),
    "two documents": ("--- 1\n--- 2\n", ["line 2", "document"]),
    "a tab": ("a:\n\tb: 1\n", ["line 2"]),
    "too long": ("#" * 2**21, ["1 MiB"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_nobody_means(name):
    text, named = REFUSED[name]
    with pytest.raises(UserError) as refused:
        parse_yaml(text, "mine.yaml")
    for words in ("mine.yaml", *named):
        assert words in str(refused.value)


def test_what_stays_allowed():
    merged = parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\n", "mine.yaml")
    assert merged["b"] == {"x": 3, "y": 2}
    assert parse_yaml("a: 2024-12-24\n", "mine.yaml") == {"a": "2024-12-24"}


@pytest.mark.parametrize("text", ["", "a: b: c", "@x", "[x", "../data/my set", "a#b"])
def test_a_flag_may_hold_what_is_no_yaml(text):
    require_plain(text, "--text")


def test_files(tmp_path):
    (tmp_path / "mark.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    (tmp_path / "latin.yaml").write_bytes(b"a: caf\xe9\n")
    os.mkfifo(tmp_path / "pipe")
    assert read_yaml(tmp_path / "mark.yaml", "it") == {"a": 1}
    for path, words in {
        tmp_path / "latin.yaml": "not UTF-8 at byte 6",
        tmp_path / "pipe": "not a file",
        tmp_path: "not a file",
        Path("/dev/zero"): "not a file",
        tmp_path / "mark.yaml" / "x": "cannot be read",
        Path("a" * 5000): "cannot be read",
        Path("\0"): "cannot be read",
    }.items():
        with pytest.raises(UserError, match=f"it: {words}"):
            read_yaml(path, "it")
    with pytest.raises(FileNotFoundError):
        read_yaml(tmp_path / "nowhere.yaml", "it")


@fuzz(0.1, data=DATA, spoil=st.lists(st.tuples(st.integers(0, 200), st.sampled_from(FRAGMENTS)), max_size=2))
def test_documents(held, tmp_path, monkeypatch, data, spoil):
    monkeypatch.chdir(tmp_path)
    text = yaml.safe_dump(data)
    for at, fragment in spoil:
        text = text[:at] + fragment + text[at:]
    found = []
    held(lambda: found.append(parse_yaml(text, "mine.yaml")), "mine.yaml")
    assert spoil or found == [data]
    assert not (tmp_path / "owned").exists()
