"""Sentences as words, and words as sentences."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import pairwise

from kvt.system.errors import UserError

SpacedTokens = list[tuple[str, bool]]
"""The words of a sentence, each with whether a space follows it."""
LONGEST_WORD = 1000
"""In characters: spaCy's time grows with the square, and 10,000 brackets in a row take it half a minute."""


@cache
def splitter(language: str) -> Callable[[str], SpacedTokens]:
    """spaCy's rules for words of a language, which need no trained model: "Don't run." → Do, n't, run, "."

    Args:
        language: "de", "en" …; "xx" has rules that suit many.

    Raises:
        UserError: spaCy has no such language, or needs another package for it.
    """
    import spacy  # here, for it is slow to import and only translation needs it

    try:
        tokenizer = spacy.blank(language).tokenizer
    except (ImportError, AttributeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"language {language!r}: spaCy has no rules for its words ({reason:.80}); is the code right, like de, en?"
        ) from error

    def split(sentence: str) -> SpacedTokens:
        return [(word.text, bool(word.whitespace_)) for word in tokenizer(sentence) if not word.is_space]

    return split


def require_words(sentence: str, where: str) -> None:
    """Makes sure that a sentence can be split in no time.

    Raises:
        UserError: it has a word that is none; the line begins with `where` it stands.
    """
    longest = max(map(len, sentence.split()), default=0)
    if longest > LONGEST_WORD:
        raise UserError(f"{where} has {longest} characters in a row, {LONGEST_WORD} at most make a word: put in spaces")


def fit_detokenizer(sentences: Iterable[SpacedTokens]) -> list[list[str]]:
    """Which words are written together with the word before them, and which with the one after, mostly.

    Every neighbourhood votes for or against both of its words. The clearest case is decided first, and what it explains
    votes no longer: "shirt" is no suffix for often standing behind a hyphen, nor is "eau" for standing behind "l'".

    Returns:
        Words to join to what is before them, such as "." and "n't"; words to join to what is after them, such as "(".
    """
    votes: Counter[tuple[str, str]] = Counter()  # of neighbours, for no space between them
    for sentence in sentences:
        for (left, spaced), (right, _) in pairwise(sentence):
            if '"' not in (left, right):  # of which `join` knows by itself
                votes[left, right] += -1 if spaced else 1
    scores: tuple[dict[str, float], dict[str, float]] = ({}, {})  # for joining what comes next, and what came before
    pairs: tuple[dict[str, set[tuple[str, str]]], ...] = ({}, {})
    for pair, vote in votes.items():
        for side in (0, 1):
            word = pair[side]
            doubt = 0 if any(character.isalnum() for character in word) else 0.5  # in doubt it is punctuation
            scores[side][word] = scores[side].get(word, doubt) + vote
            pairs[side].setdefault(word, set()).add(pair)
    numbers: tuple[dict[str, int], ...] = tuple({word: n for n, word in enumerate(side)} for side in scores)

    def entry(side: int, word: str) -> tuple[float, int, int, str]:
        """What comes first of all, if it is the clearest case."""
        return -scores[side][word], -side, numbers[side][word], word

    waiting = [entry(side, word) for side in (0, 1) for word in scores[side]]
    heapify(waiting)
    detok_rules: tuple[list[str], list[str]] = ([], [])
    while waiting:
        negative, opposite, _, word = heappop(waiting)
        side = -opposite
        if negative != -scores[side][word]:
            continue  # it has another entry by now
        if scores[side][word] < 1:
            break
        detok_rules[side].append(word)
        for pair in list(pairs[side][word]):
            for end in (0, 1):
                scores[end][pair[end]] -= votes[pair]
                pairs[end][pair[end]].discard(pair)
                heappush(waiting, entry(end, pair[end]))
    return [sorted(detok_rules[1]), sorted(detok_rules[0])]


def join(words: Sequence[str], detok_rules: Sequence[Sequence[str]]) -> str:
    """A sentence of words, spaces left out where `fit_detokenizer` says so; quotation marks open and close in turn.

    >>> join(["Do", "n't", "run", "(", "he", "said", ")", "."], [[".", ")", "n't"], ["("]])
    "Don't run (he said)."
    """
    before, after = map(set, detok_rules)
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
