"""YAML settings: plain data, or one line that names the file and the line."""

from pathlib import Path

import pytest

from kvt.system.errors import UserError
from kvt.system.files import parse_yaml, read_yaml


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3"),
        ("a:\n  b: 1\n  b: 2\n", "line 3"),
        ("a: 1\nb: !!python/object/apply:os.mkdir [owned]\n", "line 2"),
        ("a:\n\tb: 1\n", "line 2"),
    ],
)
def test_errors_name_file_and_line(text, line, in_tmp_dir):
    with pytest.raises(UserError, match=rf"mine\.yaml.*{line}"):
        parse_yaml(text, "mine.yaml")
    assert not Path("owned").exists()


def test_merges_are_allowed_and_dates_are_strings():
    merged = parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\n", "mine.yaml")
    assert merged["b"] == {"x": 3, "y": 2}
    assert parse_yaml("a: 2024-12-24\n", "mine.yaml") == {"a": "2024-12-24"}


def test_files(tmp_path):
    (tmp_path / "mark.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    (tmp_path / "latin.yaml").write_bytes(b"a: caf\xe9\n")
    assert read_yaml(tmp_path / "mark.yaml", "it") == {"a": 1}
    for path in (tmp_path / "latin.yaml", tmp_path):
        with pytest.raises(UserError, match="it"):
            read_yaml(path, "it")
    with pytest.raises(FileNotFoundError):
        read_yaml(tmp_path / "nowhere.yaml", "it")
