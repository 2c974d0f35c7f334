"""Hostile text files: one line that names the file, or its text to the symbol."""

import os
from functools import partial

from hypothesis import strategies as st

from kvt.data.texts import fingerprint
from kvt.system.console import one_line
from kvt.tasks import Characters
from kvt.training.lightning_cli import CLI
from tests.conftest import CONFIGS, QUIET, TINY
from tests.helpers import spoiling
from tests.helpers.hostile import fuzz
from tests.helpers.spoiling import CUT, FILL, FLIP, REPLACE, clear, rename

PIECES = [
    *(b"\0", b"\r\n", b"\r", b"\n\r", b"\xef\xbb\xbf", b"\xff", b"\xff\xfea\0", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"),
    *(b"\xc3", b"\xc0\x80", "\U0010ffff".encode(), "e\u0301\u202e\u2028\u0085".encode(), b"\x1b[2J", b"\n" * 99, b" "),
    *(b"a" * 50_000, b"a b\n" * 9, "".join(map(chr, range(32, 3000))).encode(), b"<unk><pad>", b"%s{0}$HOME"),
]
TEXT = st.lists(st.sampled_from(PIECES) | st.text(max_size=50).map(str.encode), max_size=8).map(b"".join)
NAME = st.builds(partial, st.just(rename), name=st.sampled_from(spoiling.NAMES))
SPOIL = st.just(lambda path: None) | CUT | FLIP | FILL | REPLACE | NAME


def fit(*flags: str) -> None:
    words = ["--config", str(CONFIGS / "characters.yaml"), *QUIET, *TINY, "--batch_size", "1", "--fast_dev_run", "1"]
    CLI(["fit", *words, *flags], test=True)


@fuzz(0.06, raw=TEXT, spoil=SPOIL, length=st.sampled_from([1, 3, 4, 100, 10_000]), val=st.sampled_from([0.1, 0.5, 3]))
def test_texts(held, in_tmp_dir, raw, spoil, length, val):
    clear(in_tmp_dir)
    path = in_tmp_dir / "own.txt"
    path.write_bytes(raw)
    path = spoil(path) or path
    name = os.path.relpath(path)
    line = held(lambda: fit(f"--text={name}", f"--length={length}", f"--val_size={val}"), one_line(name))
    if path.is_file() and not path.is_symlink():
        text = clean(path.read_bytes())
        fits = text is not None and 2 <= round(val * len(text)) < len(text) - length
        assert (line is None) == (fits and "\udcff" not in name)
        if line is None:
            assert Characters(name, length=length, val_size=val).hparams["content"] == fingerprint(text)


def clean(raw: bytes) -> str | None:
    """The text, without what other systems add; None where there is none."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return (text[1:] if text.startswith("\ufeff") else text).replace("\r\n", "\n")
