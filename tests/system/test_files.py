"""YAML settings are plain data, or one line that names the file and the line; a file is complete or absent."""

from pathlib import Path

import pytest

from kvt.system import UserError, atomically, parse_yaml


@pytest.mark.parametrize(
    ("text", "line"), [("a: 1\nb: !!python/object/apply:os.mkdir [owned]\n", "line 2"), ("a:\n\tb: 1\n", "line 2")]
)
def test_errors_name_file_and_line(text, line, in_tmp_dir):
    with pytest.raises(UserError, match=rf"(?s)mine\.yaml.*{line}"):
        parse_yaml(text, "mine.yaml")
    assert not Path("owned").exists()


def test_dates_are_strings_and_files_are_utf8(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 2024-12-24\n")
    assert parse_yaml(path.read_bytes(), "it") == {"a": "2024-12-24"}
    path.write_bytes(b"a: caf\xe9\n")
    with pytest.raises(UserError, match="it"):
        parse_yaml(path.read_bytes(), "it")


def test_a_full_disk_keeps_the_old_file(tmp_path):
    (tmp_path / "last.ckpt").write_text("old")

    def write() -> None:
        with atomically(tmp_path / "last.ckpt") as part:
            part.write_text("ne")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("last.ckpt", "old")]
