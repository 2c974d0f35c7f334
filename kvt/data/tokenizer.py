"""Split sentences into tokens, and join tokens to sentences."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise

from kvt.system.errors import UserError

SpacedTokens = list[tuple[str, bool]]
"""The tokens of a sentence, each with whether a space follows it."""


def language_code(language: str) -> str:
    """Return spaCy's code for a language, "zh" for "zho", too; raise UserError if it knows none of that code."""
    from spacy.util import get_lang_class  # slow to import, and only translation needs it

    try:
        return str(get_lang_class(language).lang)
    except (ImportError, AttributeError, ValueError) as error:
        reason = "spaCy has no rules for its words"
        raise UserError(f"language {language!r}: {reason}: use a code such as de or en") from error


@cache
def splitter(language: str) -> Callable[[str], SpacedTokens]:
    """Return spaCy's tokenizer for a language, rules without a trained model: "Don't run." → Do, n't, run, "."

    `language` is a code such as "de" or "en"; "xx" has rules that suit many. Raises UserError if spaCy has none for it,
    or needs another package to split it.
    """
    code = language_code(language)
    import spacy

    try:
        tokenizer = spacy.blank(code).tokenizer
    except Exception as error:  # each package has its own for what it lacks
        raise UserError(f"language {language!r}: spaCy needs another package: {error}") from error

    def split(sentence: str) -> SpacedTokens:
        return [(word.text, bool(word.whitespace_)) for word in tokenizer(sentence) if not word.is_space]

    return split


def fit_detokenizer(sentences: Iterable[SpacedTokens]) -> list[list[str]]:
    """Learn which tokens are mostly written without a space before them, and which without one after them.

    Each pair of neighbours votes for or against both of its tokens. The token with the most votes is decided first,
    and the pairs that it explains vote no longer: "shirt" is no suffix because it often follows a hyphen, nor is "eau"
    because it follows "l'".

    Returns two sorted lists: tokens to join to the one before, like "." and "n't", and to the one after, like "(".
    """
    votes: Counter[tuple[str, str]] = Counter()  # by pair: without a space minus with one
    for sentence in sentences:
        for (left, spaced), (right, _) in pairwise(sentence):
            if '"' not in (left, right):  # `join` has a rule for these
                votes[left, right] += -1 if spaced else 1
    # an end of a pair: (0, left token), joined to what follows, or (1, right token)
    scores: dict[tuple[int, str], float] = {}
    pairs: dict[tuple[int, str], set[tuple[str, str]]] = {}
    for pair, vote in votes.items():
        for end in enumerate(pair):
            tie_break = 0 if any(map(str.isalnum, end[1])) else 0.5  # punctuation is joined
            scores[end] = scores.get(end, tie_break) + vote
            pairs.setdefault(end, set()).add(pair)
    joined: tuple[list[str], list[str]] = ([], [])
    while scores and scores[end := max(scores, key=lambda end: (scores[end], end[0]))] >= 1:
        joined[end[0]].append(end[1])
        for pair in list(pairs[end]):  # votes no longer, also not for this end
            for other in enumerate(pair):
                scores[other] -= votes[pair]
                pairs[other].discard(pair)
    return [sorted(joined[1]), sorted(joined[0])]


def join(tokens: Sequence[str], detok_rules: Sequence[Sequence[str]]) -> str:
    """Join tokens to a sentence by the rules of `fit_detokenizer`; quotation marks open and close in turn.

    >>> join(["Do", "n't", "run", "(", "he", "said", ")", "."], [[".", ")", "n't"], ["("]])
    "Don't run (he said)."
    """
    before, after = map(set, detok_rules)
    text, quoted = "", False
    for i, token in enumerate(tokens):
        joined = i == 0 or tokens[i - 1] in after or token in before
        if token == '"':
            joined = i == 0 or quoted
        elif i > 0 and tokens[i - 1] == '"':
            joined = quoted or token in before
        text += token if joined else f" {token}"
        quoted ^= token == '"'
    return text
