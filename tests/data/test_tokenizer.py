"""A sentence cut into words and joined again is the sentence."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvt.data.tokenizer import fit_detokenizer, join, splitter
from kvt.system.errors import UserError

ENGLISH = [
    "A man in a blue shirt is standing on a ladder.",
    "Two dogs run, jump and bark in the snow.",
    "She doesn't know why he isn't here.",
    "The boy's dog doesn't like the girl's cat.",
    'A sign says "stop" in red letters.',
    'He said: "I don\'t know", and left.',
    '"Run!", they cried.',
    "A T-shirt-wearing man holds a two-year-old child.",
    "A well-known, dark-haired woman sings; people listen.",
    "Is it cold? No, it's warm!",
    "A man (in black) talks to a woman (in white).",
    "It costs $5, she's told.",
    "They're late, we're not.",
    "A semi-circle of half-full glasses.",
    "The woman, who's old, can't see; the man won't help.",
    'A cat named "Tom" chases a mouse named "Jerry".',
]
GERMAN = [
    "Ein Mann steht auf einer Leiter, um ein Fenster zu putzen.",
    "Zwei Hunde rennen, springen und bellen im Schnee.",
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


@pytest.mark.parametrize("language", ["qq", "zh-Hans", "", "../en", "punctuation"])
def test_a_language_without_rules_is_named(language):
    with pytest.raises(UserError, match=f"language '{language}': spaCy has no rules for its words: use a code such as"):
        splitter(language)


def test_a_package_that_rules_need_is_named(monkeypatch):
    def refuse(code):
        raise ImportError("install spaCy with `pip install spacy[ja]`")

    monkeypatch.setattr("spacy.blank", refuse)
    with pytest.raises(UserError, match="language 'jpn': spaCy needs another package: install spaCy with `pip"):
        splitter("jpn")
