"""Texts of files and folders."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvt.data.texts import Corpus, read_text
from tests.data.helpers import user_error

# ---- one file ------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(
    text=st.text(min_size=1).filter(lambda text: "\r\n" not in text and text[0] != "\ufeff" and "\0" not in text),
    mark=st.booleans(),
    newline=st.sampled_from(["\n", "\r\n"]),
)
def test_any_text_comes_back_without_byte_order_mark_and_windows_line_ends(tmp_path_factory, text, mark, newline):
    path = tmp_path_factory.getbasetemp() / "any.txt"
    path.write_bytes(("\ufeff" * mark + text.replace("\n", newline)).encode())
    assert read_text(path) == text


@pytest.mark.parametrize("raw", [None, b"", b"\xef\xbb\xbf", "für".encode("latin1")])
def test_a_text_that_cannot_be_read_is_named(tmp_path, raw):
    path = tmp_path / "a.txt"
    if raw is not None:
        path.write_bytes(raw)
    assert str(path) in user_error(lambda: read_text(path))


def test_a_folder_is_read_without_hidden_files_and_files_that_are_not_utf8(tmp_path):
    """Links to folders are followed."""
    names = ["b.txt", "a/c.txt", "a-b/d.txt", "a/.git/e.txt", "a/site-packages/f.txt", ".h.txt", "i.py"]
    for name in names:
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(f"{name}|!||")
    (tmp_path / "texts/link").symlink_to(tmp_path / "texts/a-b")
    (tmp_path / "texts/latin.txt").write_bytes("für".encode("latin1"))
    corpus = Corpus(tmp_path / "texts", "*.txt", "|")
    assert sorted(filter(None, corpus.documents())) == sorted(["b.txt", "a/c.txt", "a-b/d.txt", "a-b/d.txt", *"!!!!"])
    assert corpus.not_utf8 == ["latin.txt"]


def test_a_text_may_have_a_nul(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"0123456\x0089")
    assert read_text(tmp_path / "a.txt") == "0123456\x0089"
