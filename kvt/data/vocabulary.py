"""Tokens and their ids; sentences as rows of ids: <bos>, the tokens, <eos>, and <pad> up to the longest.

>>> vocabulary = Vocabulary([*SPECIALS, "ein", "Hund"])  # <unk>, <pad>, <bos> and <eos> are 0, 1, 2 and 3
>>> ein_hund, hund = [("ein", True), ("Hund", False)], [("Hund", False)]  # each token, and whether a space follows
>>> sentences = encode_sentences([ein_hund, hund], vocabulary)
>>> sentences.tolist(), unpadded(sentences)
([[2, 4, 5, 3], [2, 5, 3, 1]], [[2, 4, 5, 3], [2, 5, 3]])
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchtext.vocab import Vocab

from kvt.data.tokenizer import SpacedTokens
from kvt.system.errors import UserError

IGNORE = -100
"""The target where nothing is predicted, as torch's cross-entropy has it."""

UNK, PAD, BOS, EOS = "<unk>", "<pad>", "<bos>", "<eos>"
SPECIALS = (UNK, PAD, BOS, EOS)
"""Unknown token, padding, begin and end of a sentence."""
PAD_ID, BOS_ID, EOS_ID = (SPECIALS.index(symbol) for symbol in (PAD, BOS, EOS))


def build_vocab(symbols: Iterable[str], specials: Sequence[str] = (), min_freq: int = 1) -> list[str]:
    """Return the vocabulary of a text: specials, then each symbol that occurs `min_freq` times, most frequent first.

    >>> build_vocab("to be or not to be".split(), specials=["<unk>"])
    ['<unk>', 'be', 'to', 'not', 'or']
    """
    return list(Vocab(Counter(symbols), min_freq=min_freq, specials=list(specials)).itos)


class Vocabulary:
    """Maps symbols to ids, their positions in the list `vocab`, and back.

    If `<unk>` is one of the symbols, it stands for every symbol that is not.
    """

    def __init__(self, vocab: Sequence[str]) -> None:
        self.vocab = vocab
        self.ids = {symbol: i for i, symbol in enumerate(vocab)}

    def encode(self, symbols: Iterable[str]) -> list[int]:
        """Return the id of each symbol; raise UserError for an unknown one if there is no `<unk>`."""
        unknown = self.ids.get(UNK)
        encoded = []
        for symbol in symbols:
            if (i := self.ids.get(symbol, unknown)) is None:
                raise UserError(f"{symbol!r} is not in the model's vocabulary")
            encoded.append(i)
        return encoded

    def decode(self, ids: Iterable[int]) -> list[str]:
        return [self.vocab[i] for i in ids]


def encode_sentences(sentences: Iterable[SpacedTokens], vocabulary: Vocabulary) -> Tensor:
    """Return sentences as one padded tensor, int64 (B, longest)."""
    rows = [vocabulary.encode([BOS, *(token for token, _ in sentence), EOS]) for sentence in sentences]
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD_ID)


def unpadded(sentences: Tensor) -> list[list[int]]:
    """Return the tokens of each row without padding: int64 (B, N) → B lists."""
    return [row[row != PAD_ID].tolist() for row in sentences.cpu()]
