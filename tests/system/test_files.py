"""YAML settings are plain data, or one line that names the file and the line; a file is complete or absent."""

from pathlib import Path

import pytest

from kvt.system.errors import UserError
from kvt.system.files import atomically, list_files, parse_yaml, read_yaml


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
    assert read_yaml(path, "it") == {"a": "2024-12-24"}
    path.write_bytes(b"a: caf\xe9\n")
    with pytest.raises(UserError, match="it"):
        read_yaml(path, "it")


def test_files_are_sorted_by_folder_and_hidden_ones_left_out(tmp_path):
    """Splits and content hashes of folders depend on the order."""
    names = ["b.txt", "a/c.txt", "a-b/d.txt", "a/.git/e.txt", "a/__MACOSX/f.txt", "a/left_out/g.txt", ".h.txt", "i.py"]
    for name in names:
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).touch()
    (tmp_path / "texts" / "link").symlink_to(tmp_path / "texts" / "a-b")
    found = [str(path.relative_to(tmp_path)) for path in list_files(tmp_path / "texts", "*.txt", {"left_out"})]
    assert found == [f"texts/{name}" for name in ("b.txt", "a/c.txt", "a-b/d.txt", "link/d.txt")]


def test_a_full_disk_keeps_the_old_file(tmp_path):
    (tmp_path / "last.ckpt").write_text("old")

    def write() -> None:
        with atomically(tmp_path / "last.ckpt") as part:
            part.write_text("ne")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("last.ckpt", "old")]
