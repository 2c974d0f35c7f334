import bz2
import gzip
import io
import lzma
import tarfile
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvt.data import texts
from kvt.data.texts import Corpus, decode_text, read_text
from kvt.data.tokens import read_tokenizer
from kvt.tasks.translation import read_pairs
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


def packed() -> dict[str, bytes]:
    """A text in other formats, by what a message calls them."""
    text = b"To be, or not to be, that is the question.\n" * 50
    tar, archive = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as file:
        entry = tarfile.TarInfo("a.txt")
        entry.size = len(text) * 10
        file.addfile(entry, io.BytesIO(text * 10))
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a.txt", text)
    return {
        "gzip data: unpack it with gunzip": gzip.compress(text),
        "bzip2 data: unpack it with bunzip2": bz2.compress(text),
        "xz data: unpack it with unxz": lzma.compress(text),
        "zstd data: unpack it with unzstd": b"\x28\xb5\x2f\xfd\x04\x58",
        "a tar archive: unpack it with tar -xf": tar.getvalue(),
        "a zip archive: unpack it with unzip": archive.getvalue(),
        "a Parquet file: name its folder, as hf:FOLDER": b"PAR1\x15\x04\x15" + text,
        "a SentencePiece model: convert it to tokenizer.json": b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02" + text,
    }


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (None, " is missing: name a text file"),
        (b"", " is empty: choose another file"),
        (b"\xef\xbb\xbf", " is empty: choose another file"),
        (
            "12345 für".encode("latin1"),
            " is not UTF-8 at byte 7: convert it, e.g. Western European text from Windows with iconv",
        ),
        (
            "for".encode("utf-16-be"),
            " is UTF-16 or not a text: 3 of its 6 bytes are NUL: convert the original, e.g. iconv -f UTF-16BE",
        ),
        (
            "für".encode("utf-16-le"),
            " is UTF-16 or not a text: 3 of its 6 bytes are NUL: convert the original, e.g. iconv -f UTF-16LE",
        ),
        (b"\xff\xfe" + "für".encode("utf-16-le"), " is UTF-16: convert it, e.g. iconv -f UTF-16 -t UTF-8"),
        (b"\xfe\xff" + "für".encode("utf-16-be"), " is UTF-16: convert it, e.g. iconv -f UTF-16 -t UTF-8"),
        ("für".encode("utf-32"), " is UTF-32: convert it, e.g. iconv -f UTF-32 -t UTF-8"),
        ("for".encode("utf-16-le"), " is UTF-16 or not a text: 3 of its 6 bytes are NUL: convert the original"),
        ("for".encode("utf-16").decode("latin1").encode(), " is UTF-16 or not a text: 3 of its 10 bytes are NUL"),
    ],
)
def test_a_text_that_cannot_be_read_is_named(tmp_path, raw, message):
    path = tmp_path / "a.txt"
    if raw is not None:
        path.write_bytes(raw)
    assert user_error(lambda: read_text(path)).startswith(f"{path}{message}")


@pytest.mark.parametrize("told", packed())
def test_a_packed_text_is_named_wherever_a_text_is_read(tmp_path, told):
    for name in ("train.de", "train.en"):
        (tmp_path / name).write_bytes(packed()[told])
    path = tmp_path / "train.en"
    assert user_error(lambda: Corpus(path).texts) == f"{path} is {told}"
    assert user_error(lambda: read_text(path)) == f"{path} is {told}"
    assert user_error(lambda: read_tokenizer(path)) == f"--tokenizer {path} is {told}"
    assert user_error(lambda: read_pairs(path, path)) == f"{path} is {told}"
    (tmp_path / "a.txt").write_text("a text")
    assert str(Corpus(tmp_path).left_out).startswith("2 of 3 files, which are not UTF-8, such as train.")


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


def test_what_is_wrong_with_a_file_is_counted_over_all_of_it(tmp_path, monkeypatch):
    """A piece may be NULs, and a byte is that of the file."""
    path = tmp_path / "a.txt"
    monkeypatch.setattr(texts, "PIECE", 50)
    path.write_bytes(b"a\n" * 300 + bytes(50) + b"a\n" * 50)
    assert Corpus(path).texts == [path]
    path.write_bytes(b"a\n" * 300 + b"\xff")
    assert "not UTF-8 at byte 600" in user_error(lambda: Corpus(path).texts)
    path.write_bytes(b"a\n" * 300 + bytes(100))
    assert "100 of its 700 bytes are NUL" in user_error(lambda: Corpus(path).texts)


def test_a_text_may_have_a_nul(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"0123456\x0089")
    assert read_text(tmp_path / "a.txt") == "0123456\x0089"
