import gzip
import shutil
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvt.data import texts as module
from kvt.data.texts import corpus_files, read_pairs, read_text
from tests.data.helpers import files_in, serving, user_error
from tests.data.test_download import published

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


# ---- parallel corpora ----------------------------------------------------------------------------

SENTENCES = {
    "train": [("Zwei Männer.", "Two men."), ("Ein Hund läuft.", "A dog runs."), ("Ja!", "Yes!")],
    "val": [("Eine Katze.", "A cat.")],
    "test": [("Ein Vogel.", "A bird."), ("Nein!", "No!")],
}


def write_corpus(root: Path, source: str = "de", target: str = "en") -> None:
    root.mkdir()
    for split, pairs in SENTENCES.items():
        for i, language in enumerate((source, target)):
            (root / f"{split}.{language}").write_text("".join(f"{pair[i]}\n" for pair in pairs), encoding="utf-8")


@pytest.fixture
def root(tmp_path) -> Path:
    write_corpus(tmp_path / "corpus")
    return tmp_path / "corpus"


def read(*arguments) -> dict[str, list[tuple[str, str]]]:
    return {split: read_pairs(*files) for split, files in corpus_files(*arguments).items()}


def own(root: Path, source: str = "de", target: str = "en") -> dict[str, list[tuple[str, str]]]:
    return read(source, target, root.parent / "data", root)


def test_lines_are_paired_in_the_order_asked_for(root):
    assert own(root) == SENTENCES
    assert own(root, "en", "de") == {split: [(b, a) for a, b in pairs] for split, pairs in SENTENCES.items()}
    assert not (root.parent / "data").exists()


words = st.text(string.ascii_letters + " äß\t,.\u2028\u2029\x0b\x0c\x1c\x1d\x1e\x85", min_size=1)
sentences = st.lists(st.tuples(*[words.filter(lambda text: text.strip())] * 2), min_size=1, max_size=5)


@settings(max_examples=30)
@given(pairs=sentences, newline=st.sampled_from(["\n", "\r\n"]), ends=st.booleans(), mark=st.booleans())
def test_every_line_keeps_its_translation(tmp_path_factory, pairs, newline, ends, mark):
    """Whatever symbols it holds: of those that str.splitlines knows, only the newline ends a line."""
    root = tmp_path_factory.getbasetemp() / "every"
    root.mkdir(exist_ok=True)
    for split in SENTENCES:
        for i, language in enumerate(("de", "en")):
            text = "\ufeff" * mark + newline.join(pair[i] for pair in pairs) + newline * ends
            (root / f"{split}.{language}").write_bytes(text.encode())
    assert own(root)["train"] == [(a.strip(), b.strip()) for a, b in pairs]


# Each: what is done to the good corpus, the path the message begins with, and what it goes on to say.
MISTAKES = {
    "no source": (lambda r: (r / "train.de").unlink(), "train.de", "is missing: add the file"),
    "no folder": (lambda r: shutil.rmtree(r), "train.de", "is missing: add the file"),
    "shorter": (
        lambda r: (r / "train.en").write_text("Two men.\nA dog runs.\n"),
        "train.de",
        "has 3 lines, {root}/train.en has 2: both need one sentence a line",
    ),
    "empty file": (lambda r: (r / "val.en").write_text(""), "val.en", "is empty: choose another file"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line_that_names_the_file(root, mistake):
    spoil, path, goes_on = MISTAKES[mistake]
    spoil(root)
    message = user_error(lambda: own(root))
    assert message.startswith(f"{root}/{path} {goes_on.format(root=root)}")
    assert not (root.parent / "data").exists()


def test_a_language_is_no_translation_of_itself(root):
    message = user_error(lambda: own(root, "de", "de"))
    assert message == "source and target are both 'de': choose two languages"


def small_multi30k(monkeypatch, url: str) -> dict[str, bytes]:
    """What a server of a small Multi30k at `url` serves; what is known of the files is set to it."""
    files = {}
    for split, name in module.MULTI30K_SPLITS.items():
        for i, language in enumerate(("de", "en")):
            lines = "".join(f"{pair[i]}\n" for pair in SENTENCES[split])
            packed = files[f"{name}.{language}.gz"] = gzip.compress(lines.encode())
            monkeypatch.setitem(module.MULTI30K, f"{name}.{language}", published(f"{url}/{name}.{language}.gz", packed))
    return files


def test_only_what_multi30k_lacks_is_downloaded(tmp_path, monkeypatch):
    (tmp_path / "multi30k").mkdir()
    (tmp_path / "multi30k/val.de").write_text("My own line.")
    with serving({}) as server:
        server.files = small_multi30k(monkeypatch, server.url)
        assert read("de", "en", tmp_path)["val"] == [("My own line.", "A cat.")]
        assert read("de", "en", tmp_path)["train"] == SENTENCES["train"]
    assert sorted(server.fetched) == sorted(server.files.keys() - {"val.de.gz"})
    assert files_in(tmp_path) == {f"multi30k/{name.removesuffix('.gz')}" for name in server.files}
