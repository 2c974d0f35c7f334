"""Tokens and their ids."""

from collections import Counter
from collections.abc import Iterable, Sequence

from torchtext.vocab import Vocab

from kvt.system.errors import UserError

UNK, PAD, BOS, EOS = "<unk>", "<pad>", "<bos>", "<eos>"
SPECIALS = (UNK, PAD, BOS, EOS)
"""Unknown token, padding, begin and end of a sentence."""


def count_symbols(symbols: Iterable[str], specials: Sequence[str] = (), min_freq: int = 1) -> list[str]:
    """Return the vocabulary of a text: specials, then each symbol that occurs `min_freq` times, most frequent first.

    >>> count_symbols("to be or not to be".split(), specials=["<unk>"])
    ['<unk>', 'be', 'to', 'not', 'or']
    """
    return list(Vocab(Counter(symbols), min_freq=min_freq, specials=list(specials)).itos)


class Vocabulary:
    """Maps symbols to ids, their positions in the list `vocab`, and back.

    Args:
        vocab: all symbols; if `<unk>` is one of them, it stands for every symbol that is not.
    """

    def __init__(self, vocab: Sequence[str]) -> None:
        self.vocab = vocab
        self.ids = {symbol: i for i, symbol in enumerate(vocab)}

    def encode(self, symbols: Iterable[str]) -> list[int]:
        """Return the id of each symbol; raise UserError for an unknown one if there is no `<unk>`."""
        unknown = self.ids.get(UNK)
        encoded = []
        for symbol in symbols:
            i = self.ids.get(symbol, unknown)
            if i is None:
                known = " ".join(map(repr, self.vocab[:20])) + (" …" if len(self.vocab) > 20 else "")
                raise UserError(f"{symbol!r} is not in the vocabulary of the model, which has {known}")
            encoded.append(i)
        return encoded

    def decode(self, ids: Iterable[int]) -> list[str]:
        return [self.vocab[i] for i in ids]
