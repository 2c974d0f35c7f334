import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvt.data import texts
from kvt.data.texts import Corpus, decode_text, read_text
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


@pytest.mark.parametrize("raw", [None, b"", b"\xef\xbb\xbf", "für".encode("latin1"), "für".encode("utf-16")])
def test_a_text_that_cannot_be_read_is_named(tmp_path, raw):
    path = tmp_path / "a.txt"
    if raw is not None:
        path.write_bytes(raw)
    assert str(path) in user_error(lambda: read_text(path))


@given(
    text=st.text("aé。\ufeff\r\n ", min_size=1),
    mark=st.booleans(),
    separator=st.sampled_from([None, "\n", "a\n"]),
    piece=st.integers(4, 9),
)
def test_a_file_that_is_read_in_pieces_is_the_text_of_the_file(tmp_path_factory, text, mark, separator, piece):
    """Only what stands at its beginning is a byte order mark."""
    path = tmp_path_factory.getbasetemp() / "pieces.txt"
    path.write_bytes(("\ufeff" * mark + text).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "PIECE", piece)
        corpus = Corpus(path, separator=separator)
        pieces = [part for group in corpus.pieces() for part in corpus.read(group)]
    whole = decode_text(path.read_bytes(), "it")
    documents = [document for document in (whole.split(separator) if separator else [whole]) if document]
    assert "".join(part for part, _ in pieces) == "".join(documents)
    assert sum(ends for _, ends in pieces) == len(documents)


def test_a_text_may_have_a_nul(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"0123456\x0089")
    assert read_text(tmp_path / "a.txt") == "0123456\x0089"
