"""Symbols to numbers and back."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvt.data.tokens import UNK, Vocabulary, build_vocab
from kvt.system import UserError
from kvt.tasks.translation import SPECIALS

TEXTS = st.lists(st.sampled_from([*"abcdefgä", *SPECIALS]), max_size=60)


@given(text=TEXTS, specials=st.sampled_from([(), (UNK,), SPECIALS]), min_freq=st.integers(1, 4))
def test_specials_come_first_then_what_is_frequent_enough_most_frequent_first(text, specials, min_freq):
    symbols, count = build_vocab(text, specials, min_freq), Counter(text)
    assert tuple(symbols[: len(specials)]) == specials
    counted = symbols[len(specials) :]
    assert set(counted) == {symbol for symbol in text if count[symbol] >= min_freq} - set(specials)
    assert len(counted) == len(set(counted))
    assert [count[symbol] for symbol in counted] == sorted((count[symbol] for symbol in counted), reverse=True)


@given(text=TEXTS)
def test_decoding_undoes_encoding(text):
    vocabulary = Vocabulary(build_vocab(text))
    numbers = vocabulary.encode(text)
    assert vocabulary.decode(numbers) == text
    assert all(vocabulary.vocab[number] == symbol for number, symbol in zip(numbers, text, strict=True))


def test_a_symbol_unknown_is_unk_or_named():
    assert Vocabulary(["a", UNK, "b"]).encode(["b", "x", "a", "y"]) == [2, 1, 0, 1]
    with pytest.raises(UserError, match=r"^'\\n' is not in the model's vocabulary$"):
        Vocabulary(["a", "b"]).encode("b\n")


def test_symbols_are_compared_in_unicodes_composed_form():
    for composed, decomposed in (
        ("k\xe4se", "ka\u0308se"),
        ("ka\u0308se", "k\xe4se"),
    ):
        words = Vocabulary(["a", composed], " ")
        assert words.encode([composed, decomposed]) == words.begin(f"{composed} {decomposed}") == [1, 1]
    assert Vocabulary("a\xe4b").begin("ba\u0308") == [2, 1]
    assert Vocabulary("a\u0308").begin("a\u0308") == [0, 1]  # as in a model of letters of Hangul
