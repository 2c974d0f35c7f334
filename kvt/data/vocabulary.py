"""Symbols and their numbers."""

from collections import Counter
from collections.abc import Iterable, Sequence

from torchtext.vocab import Vocab

from kvt.system.errors import UserError

UNK, PAD, BOS, EOS = "<unk>", "<pad>", "<bos>", "<eos>"
SPECIALS = (UNK, PAD, BOS, EOS)
"""An unknown symbol, what fills short sentences up, what begins and what ends a sentence."""


def count_symbols(symbols: Iterable[str], specials: Sequence[str] = (), min_freq: int = 1) -> list[str]:
    """The vocabulary of a text: the specials, then every symbol that occurs `min_freq` times, frequent ones first.

    >>> count_symbols("to be or not to be".split(), specials=["<unk>"])
    ['<unk>', 'be', 'to', 'not', 'or']
    """
    return list(Vocab(Counter(symbols), min_freq=min_freq, specials=list(specials)).itos)


class Vocabulary:
    """Numbers of symbols, as a plain list tells them: the n-th symbol has the number n.

    Args:
        vocab: all symbols; where `<unk>` is one of them, it stands for every other.
    """

    def __init__(self, vocab: Sequence[str]) -> None:
        self.vocab = vocab
        self.numbers = {symbol: number for number, symbol in enumerate(vocab)}

    def encode(self, symbols: Iterable[str]) -> list[int]:
        """The number of each symbol.

        Raises:
            UserError: one is not in the vocabulary, and that has no `<unk>`.
        """
        unknown = self.numbers.get(UNK)
        encoded = []
        for symbol in symbols:
            number = self.numbers.get(symbol, unknown)
            if number is None:
                known = " ".join(map(repr, self.vocab[:20])) + (" …" if len(self.vocab) > 20 else "")
                raise UserError(f"{symbol!r} is not in the vocabulary of the model, which has {known}")
            encoded.append(number)
        return encoded

    def decode(self, numbers: Iterable[int]) -> list[str]:
        """The symbol of each number."""
        return [self.vocab[number] for number in numbers]
