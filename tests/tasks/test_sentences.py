"""A sentence cut into words and joined again is the sentence; parallel corpora."""

import gzip
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvt.system import UserError
from kvt.tasks import translation as module
from kvt.tasks.translation import SentencePairs, fit_detokenizer, join, read_pairs, splitter
from tests.data.helpers import files_in, user_error
from tests.data.test_download import published

ENGLISH = [
    "A man in a blue shirt is standing on a ladder.",
    "She doesn't know why he isn't here.",
    "The boy's dog doesn't like the girl's cat.",
    'A sign says "stop" in red letters.',
    'He said: "I don\'t know", and left.',
    '"Run!", they cried.',
    "A T-shirt-wearing man holds a two-year-old child.",
    "A well-known, dark-haired woman sings; people listen.",
    "A man (in black) talks to a woman (in white).",
    "It costs $5, she's told.",
    "Is it cold? No, it's warm!",
    "They're late, we're not.",
    "The woman, who's old, can't see; the man won't help.",
    'A cat named "Tom" chases a mouse named "Jerry".',
]
GERMAN = [
    "Ein Mann steht auf einer Leiter, um ein Fenster zu putzen.",
    'Auf dem Schild steht "Halt" in roter Schrift.',
    "Ist es kalt? Nein, es ist warm!",
    "Eine Frau (in Weiß) spricht mit einem Mann (in Schwarz).",
    "Ein dunkelhaariger, ca. zwei Jahre alter Junge weint; niemand hört ihn.",
    "Ein T-Shirt-Verkäufer lacht.",
    "Das Radio-Gerät geht nicht.",
    'Er sagt: "Komm!", und geht.',
]
SENTENCES = {"en": ENGLISH, "de": GERMAN}
NEW = {
    "en": [
        "The dog isn't cold, it's warm!",
        "A woman (who's late) says: \"I can't run\".",
        "Why doesn't he jump; is he a well-known two-year-old?",
        '"They\'re here", people cried.',
    ],
    "de": [
        "Zwei Jungen (in Rot) lachen; warum?",
        'Der Mann sagt: "Nein!", und rennt.',
        "Das T-Shirt, das Radio-Gerät.",
    ],
}


def pieces(language, sentence):
    return [word for word, _ in splitter(language)(sentence)]


@pytest.mark.parametrize("language", SENTENCES)
def test_what_was_cut_is_joined_again(language):
    detok_rules = fit_detokenizer(map(splitter(language), SENTENCES[language]))
    for sentence in SENTENCES[language] + NEW[language]:
        assert join(pieces(language, sentence), detok_rules) == sentence


def test_words_are_those_of_spacys_rules():
    assert " ".join(pieces("en", "Don't run (fast), he said.")) == "Do n't run ( fast ) , he said ."
    assert pieces("de", "Don't run.") == ["Don't", "run", "."]
    assert splitter("en")("I'm  here") == [("I", False), ("'m", True), ("here", False)]
    assert splitter("en")(" \t ") == splitter("en")("") == []


@settings(max_examples=30)
@given(st.text("ab .,'-\"()\t\n\u00a0é1$", max_size=30))
def test_cutting_loses_nothing_but_spaces(sentence):
    words = pieces("en", sentence)
    assert "".join(words) == "".join(sentence.split())
    assert all(word and not word.isspace() for word in words)


def test_the_clearest_case_explains_the_others():
    sentences = [[("a", True), (word, False), ("-", False), ("shirt", False), (".", False)] for word in "TVT"]
    before, after = fit_detokenizer([*sentences, [("no", True), ("coat", False), (".", False)]])
    assert before == ["-", "."]
    assert after == ["-"]
    french = [[(article, False), (noun, True), ("bu", False)] for article in ("l'", "d'") for noun in ("eau", "or")]
    french += [[("une", True), ("eau", False)], [("un", True), ("or", False)]]
    assert fit_detokenizer(french) == [[], ["d'", "l'"]]


def test_quotation_marks_open_and_close_in_turn():
    assert join([], [["."], ["("]]) == ""
    assert join(list('"a"b"c"'), [[], []]) == '"a" b "c"'
    assert join(['"', "a", '"', "."], [["."], []]) == '"a".'
    assert join(["say", '"', ".", '"', "!"], [[".", "!"], []]) == 'say "."!'


@pytest.mark.parametrize("language", ["qq", "", "../en", "punctuation"])
def test_a_language_without_rules_is_named(language):
    with pytest.raises(UserError, match=f"language '{language}'"):
        splitter(language)


# ---- parallel corpora ----------------------------------------------------------------------------

CORPUS = {
    "train": [("Zwei Männer.", "Two men."), ("Ein Hund läuft.", "A dog runs."), ("Ja!", "Yes!")],
    "val": [("Eine Katze.", "A cat.")],
    "test": [("Ein Vogel.", "A bird."), ("Nein!", "No!")],
}


def write_corpus(root: Path, source: str = "de", target: str = "en") -> None:
    root.mkdir()
    for split, pairs in CORPUS.items():
        for i, language in enumerate((source, target)):
            (root / f"{split}.{language}").write_text("".join(f"{pair[i]}\n" for pair in pairs), encoding="utf-8")


@pytest.fixture
def root(tmp_path) -> Path:
    write_corpus(tmp_path / "corpus")
    return tmp_path / "corpus"


def own(root: Path, source: str = "de", target: str = "en") -> dict[str, list[tuple[str, str]]]:
    return SentencePairs(source, target, root=str(root), data_dir=str(root.parent / "data")).texts


def test_lines_are_paired_in_the_order_asked_for(root):
    assert own(root) == CORPUS
    assert own(root, "en", "de") == {split: [(b, a) for a, b in pairs] for split, pairs in CORPUS.items()}
    assert not (root.parent / "data").exists()


words = st.text(string.ascii_letters + " äß\t,.\u2028\u2029\x0b\x0c\x1c\x1d\x1e\x85", min_size=1)
sentences = st.lists(st.tuples(*[words.filter(lambda text: text.strip())] * 2), min_size=1, max_size=5)


@settings(max_examples=30)
@given(pairs=sentences, newline=st.sampled_from(["\n", "\r\n"]), ends=st.booleans(), mark=st.booleans())
def test_every_line_keeps_its_translation(tmp_path_factory, pairs, newline, ends, mark):
    """Whatever symbols it holds: of those that str.splitlines knows, only the newline ends a line."""
    root = tmp_path_factory.getbasetemp() / "every"
    root.mkdir(exist_ok=True)
    for i, language in enumerate(("de", "en")):
        text = "\ufeff" * mark + newline.join(pair[i] for pair in pairs) + newline * ends
        (root / language).write_bytes(text.encode())
    assert read_pairs(root / "de", root / "en") == [(a.strip(), b.strip()) for a, b in pairs]


def test_files_that_do_not_match_are_named(root):
    (root / "train.de").write_text("Zwei Männer.\n")
    assert all(str(root / file) in user_error(lambda: own(root)) for file in ("train.de", "train.en"))


def test_only_what_multi30k_lacks_is_downloaded(tmp_path, monkeypatch):
    for split, name in module.SPLITS.items():
        for i, language in enumerate(("de", "en")):
            lines = "".join(f"{pair[i]}\n" for pair in CORPUS[split])
            packed = tmp_path / f"server/{name}.{language}.gz"
            monkeypatch.setitem(module.MULTI30K, f"{name}.{language}", published(packed, gzip.compress(lines.encode())))
    (tmp_path / "server/val.de.gz").unlink()
    (tmp_path / "data/multi30k").mkdir(parents=True)
    (tmp_path / "data/multi30k/val.de").write_text("My own line.")
    assert SentencePairs(data_dir=str(tmp_path / "data")).texts["val"] == [("My own line.", "A cat.")]
    assert SentencePairs(data_dir=str(tmp_path / "data")).texts["train"] == CORPUS["train"]
    names = {f"multi30k/{name}.{language}" for name in module.SPLITS.values() for language in ("de", "en")}
    assert files_in(tmp_path / "data") == names
