import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvt.data.texts import read_text
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


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (None, " is missing: name a text file"),
        (b"", " is empty: choose another file"),
        (b"\xef\xbb\xbf", " is empty: choose another file"),
        ("12345 für".encode("latin1"), " is not UTF-8 at byte 7: convert it, e.g. iconv -f latin1 -t UTF-8"),
        (b"\xff\xfe" + "für".encode("utf-16-le"), " is UTF-16: convert it, e.g. iconv -f UTF-16 -t UTF-8"),
        (b"\xfe\xff" + "für".encode("utf-16-be"), " is UTF-16: convert it, e.g. iconv -f UTF-16 -t UTF-8"),
        ("für".encode("utf-32"), " is UTF-32: convert it, e.g. iconv -f UTF-32 -t UTF-8"),
        ("for".encode("utf-16-le"), " is UTF-16 or no text: 3 of its 6 bytes are NUL: convert the original"),
        ("for".encode("utf-16").decode("latin1").encode(), " is UTF-16 or no text: 3 of its 10 bytes are NUL"),
        ("für".encode("utf-16-le"), " is UTF-16 or no text: 3 of its 6 bytes are NUL: convert the original"),
    ],
)
def test_a_text_that_cannot_be_read_is_named(tmp_path, raw, message):
    path = tmp_path / "a.txt"
    if raw is not None:
        path.write_bytes(raw)
    assert user_error(lambda: read_text(path)).startswith(f"{path}{message}")


def test_a_text_may_have_a_nul(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"0123456\x0089")
    assert read_text(tmp_path / "a.txt") == "0123456\x0089"
