"""Hostile parallel corpora: one line that names file and line, or every sentence beside its translation."""

from contextlib import suppress
from functools import partial
from pathlib import Path

from hypothesis import strategies as st

from kvt.data.texts import parallel_corpus
from kvt.system.console import one_line
from kvt.training.lightning_cli import CLI
from tests.conftest import CONFIGS, QUIET, TINY
from tests.helpers import spoiling
from tests.helpers.hostile import fuzz
from tests.helpers.spoiling import CUT, FILL, FLIP, REPLACE, clear, rename

WORDS = ["Hund", "dog", "läuft", "<pad>", "<unk>", "<eos>", '"', "'", ".", "(", "don't", "中文", "🙂", "e\u0301", "\0"]
WORDS += [
    "a\u2028b",
    "a\x85b",
    "a\rb",
    "\u200b",
    "\u202e",
    "http://a.b/c?d=e",
    "&amp;",
    "%s{0}",
    "|",
    "=1+1",
    "\x1b[2J",
]
SENTENCE = st.lists(st.sampled_from(WORDS) | st.text(min_size=1, max_size=8), min_size=1, max_size=6).map(" ".join)
PAIR = st.tuples(SENTENCE, SENTENCE) | SENTENCE.map(lambda sentence: (sentence, sentence))
SPLITS = st.tuples(*(st.lists(PAIR, min_size=1, max_size=most) for most in (6, 3, 2)))
FILES = [f"{split}.{language}" for split in ("train", "val", "test") for language in ("de", "en")]


def put(path: Path, lines: list[bytes], at: float) -> None:
    """More lines, somewhere among the others."""
    there = path.read_bytes().split(b"\n")
    where = int(at * len(there))
    path.write_bytes(b"\n".join([*there[:where], *lines, *there[where:]]))


def drop(path: Path) -> None:
    path.write_bytes(path.read_bytes().rstrip(b"\n").rpartition(b"\n")[0])


def other_system(path: Path) -> None:
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))


LINES = [b"", b" \t\xe3\x80\x80", b"\xe2\x80\xa8", b"\xff", b"\xed\xa0\x80", b"\0", b"Hund " * 200_000, b"(" * 200_000]
LINES += [b"a" * 1001, b":)" * 400, b"http://a." * 90, b" a" * 50]
SPOIL = (
    CUT
    | FLIP
    | FILL
    | REPLACE
    | st.builds(partial, st.just(rename), name=st.sampled_from(spoiling.NAMES))
    | st.builds(partial, st.just(put), lines=st.lists(st.sampled_from(LINES), max_size=2), at=st.floats(0, 1))
    | st.sampled_from([drop, other_system])
)
LANGUAGES = ["de", "xx", "zh", "eng", "klingon", "", "lex_attrs", "ja", "../de", "d" * 300, "train.de", "DE", "\x1b[2J"]


def write(root: Path, splits, source: str = "de") -> None:
    root.mkdir()
    for split, pairs in zip(("train", "val", "test"), splits, strict=True):
        for side, language in enumerate((source, "en")):
            text = "".join(f"{pair[side]}\n" for pair in pairs)
            (root / f"{split}.{language}").write_text(text, encoding="utf-8", newline="")


def fit(*flags: str) -> None:
    words = ["--config", str(CONFIGS / "translation.yaml"), *QUIET, *TINY, "--batch_size", "2", "--root", "own"]
    CLI(["fit", *words, "--fast_dev_run", "1", *flags], test=True)


def lines(path: Path) -> list[str] | None:
    """Its sentences; None where it has none, or one of them is none."""
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    text = (text[1:] if text.startswith("\ufeff") else text).replace("\r\n", "\n")
    sentences = [line.strip() for line in (text[:-1] if text.endswith("\n") else text).split("\n")]
    return (
        None if "" in sentences or any(len(word) > 1000 for line in sentences for word in line.split()) else sentences
    )


@fuzz(0.08, splits=SPLITS, spoiled=st.lists(st.tuples(st.sampled_from(FILES), SPOIL), max_size=2))
def test_corpora(held, in_tmp_dir, splits, spoiled):
    clear(in_tmp_dir)
    write(root := in_tmp_dir / "own", splits)
    for name, spoil in spoiled:
        if (root / name).is_file() and not (root / name).is_symlink():
            spoil(root / name)
    line = held(fit, *(one_line(f"own/{name}") for name in FILES), "--max_len")
    known = [lines(root / name) if (root / name).is_file() else None for name in FILES]
    sound = None not in known and all(len(a) == len(b) for a, b in zip(known[::2], known[1::2], strict=True))
    if line is None:
        read = parallel_corpus("de", "en", in_tmp_dir, root)
        assert [*read.values()] == [[*zip(*pair, strict=True)] for pair in zip(known[::2], known[1::2], strict=True)]
    else:
        assert not sound or "--max_len" in line


@fuzz(0.01, language=st.sampled_from(LANGUAGES) | st.text(st.characters(blacklist_characters="\0"), max_size=5))
def test_languages(held, in_tmp_dir, language):
    clear(in_tmp_dir)
    with suppress(OSError, ValueError):  # no file can have that name
        write(in_tmp_dir / "own", [[("a b", "c d")]] * 3, language)
    held(lambda: fit(f"--source={language}"), "language", "source", "own")
