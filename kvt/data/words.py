"""Sentences as words, and words as sentences."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from kvt.errors import UserError

Spaced = list[tuple[str, bool]]
"""The words of a sentence, each with whether a space follows it."""


def splitter(language: str) -> Callable[[str], Spaced]:
    """spaCy's rules for words of a language, which need no trained model: "Don't run." → Do, n't, run, "."

    Args:
        language: "de", "en" …; "xx" has rules that suit many.

    Raises:
        UserError: spaCy has no such language, or needs another package for it.
    """
    import spacy  # here, for it is slow to import and only translation needs it

    try:
        tokenizer = spacy.blank(language).tokenizer
    except (ImportError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"language {language!r}: spaCy has no rules for its words ({reason:.80}); is the code right, like de, en?"
        ) from error

    def split(sentence: str) -> Spaced:
        return [(word.text, bool(word.whitespace_)) for word in tokenizer(sentence) if not word.is_space]

    return split


def learn_joints(sentences: Iterable[Spaced]) -> list[list[str]]:
    """Which words are written together with the word before them, and which with the one after, mostly.

    Punctuation is judged first. The other words are judged where punctuation does not explain that no space is there:
    "shirt" is no suffix for often standing behind a hyphen.

    Returns:
        Words to join to what is before them, such as "." and "n't"; words to join to what is after them, such as "(".
    """
    sentences = list(sentences)
    before: set[str] = set()
    after: set[str] = set()
    for judged in (_is_punctuation, lambda word: not _is_punctuation(word)):
        joined_before: Counter[str] = Counter()
        joined_after: Counter[str] = Counter()
        for sentence in sentences:
            for (left, spaced), (right, _) in pairwise(sentence):
                if left in after or right in before or '"' in (left, right):  # of those `join` knows by itself
                    continue
                joined_before[right] += -1 if spaced else 1
                joined_after[left] += -1 if spaced else 1
        before |= {word for word, votes in joined_before.items() if votes > 0 and judged(word)}
        after |= {word for word, votes in joined_after.items() if votes > 0 and judged(word)}
    return [sorted(before), sorted(after)]


def join(words: Sequence[str], joints: Sequence[Sequence[str]]) -> str:
    """A sentence of words, spaces left out where `learn_joints` says so; quotation marks open and close in turn.

    >>> join(["Do", "n't", "run", "(", "he", "said", ")", "."], [[".", ")", "n't"], ["("]])
    "Don't run (he said)."
    """
    before, after = map(set, joints)
    text, quoted = "", False
    for i, word in enumerate(words):
        joined = i == 0 or words[i - 1] in after or word in before
        if word == '"':
            joined = i == 0 or quoted
        elif i > 0 and words[i - 1] == '"':
            joined = quoted or word in before
        text += word if joined else f" {word}"
        quoted ^= word == '"'
    return text


def _is_punctuation(word: str) -> bool:
    return not any(character.isalnum() for character in word)
