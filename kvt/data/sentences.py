"""Sentences as rows of numbers: <bos>, the words, <eos>, and <pad> up to the longest.

>>> vocabulary = Vocabulary([*SPECIALS, "ein", "Hund"])  # <unk>, <pad>, <bos> and <eos> are 0, 1, 2 and 3
>>> ein_hund, hund = [("ein", True), ("Hund", False)], [("Hund", False)]  # each word, and whether a space follows
>>> sentences = encode_sentences([ein_hund, hund], vocabulary, max_len=9, where="train.de")
>>> sentences.tolist(), unpadded(sentences)
([[2, 4, 5, 3], [2, 5, 3, 1]], [[2, 4, 5, 3], [2, 5, 3]])
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvt.data.tokenizer import SpacedTokens
from kvt.data.vocabulary import BOS, EOS, PAD, SPECIALS, Vocabulary
from kvt.system.errors import UserError

PAD_NUMBER, BOS_NUMBER, EOS_NUMBER = (SPECIALS.index(symbol) for symbol in (PAD, BOS, EOS))


def encode(vocabulary: Vocabulary, words: Sequence[str]) -> list[int]:
    """Return the numbers of <bos>, the words and <eos>."""
    return vocabulary.encode([BOS, *words, EOS])


def encode_sentences(sentences: Sequence[SpacedTokens], vocabulary: Vocabulary, max_len: int, where: str) -> Tensor:
    """Return sentences as one padded tensor, int64 (B, longest).

    Raises:
        UserError: a sentence has more than `max_len` tokens; the message names its line and `where` that is.
    """
    rows = [encode(vocabulary, [word for word, _ in sentence]) for sentence in sentences]
    for line, row in enumerate(rows, start=1):
        if len(row) > max_len:
            raise UserError(
                f"line {line} of {where} has {len(row)} tokens, including <bos> and <eos>: choose a greater --max_len "
                f"than {max_len}, or split the sentence"
            )
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD_NUMBER)


def unpadded(sentences: Tensor) -> list[list[int]]:
    """Return the tokens of each row without padding: int64 (B, N) → B lists."""
    return [row[row != PAD_NUMBER].tolist() for row in sentences.cpu()]
