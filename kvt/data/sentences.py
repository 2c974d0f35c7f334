"""Sentences as rows of numbers: <bos>, the words, <eos>, and <pad> up to the longest.

>>> vocabulary = Vocabulary([*SPECIALS, "ein", "Hund"])  # <unk>, <pad>, <bos> and <eos> are 0, 1, 2 and 3
>>> sentences = padded([encode(vocabulary, ["ein", "Hund"]), encode(vocabulary, [])])
>>> sentences.tolist(), unpadded(sentences)
([[2, 4, 5, 3], [2, 3, 1, 1]], [[2, 4, 5, 3], [2, 3]])
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvt.data.vocabulary import BOS, EOS, PAD, SPECIALS, Vocabulary

PAD_NUMBER, BOS_NUMBER, EOS_NUMBER = (SPECIALS.index(symbol) for symbol in (PAD, BOS, EOS))


def encode(vocabulary: Vocabulary, words: Sequence[str]) -> list[int]:
    """Return the numbers of <bos>, the words and <eos>."""
    return vocabulary.encode([BOS, *words, EOS])


def padded(sentences: Sequence[Sequence[int]]) -> Tensor:
    """Return sentences as one tensor: B lists → int64 (B, longest)."""
    return pad_sequence([torch.tensor(row) for row in sentences], batch_first=True, padding_value=PAD_NUMBER)


def unpadded(sentences: Tensor) -> list[list[int]]:
    """Return the tokens of each row without padding: int64 (B, N) → B lists."""
    return [row[row != PAD_NUMBER].tolist() for row in sentences.cpu()]
