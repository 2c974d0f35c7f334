"""Hashes of a tensor's rows, to find equal examples."""

from collections.abc import Iterator
from hashlib import blake2b

from torch import Tensor


def row_hashes(examples: Tensor) -> Iterator[bytes]:
    """Yield 16 bytes for each row of a tensor, equal where rows are equal.

    >>> import torch
    >>> same, other, again = row_hashes(torch.tensor([[1, 2], [1, 3], [1, 2]]))
    >>> (same == again, same == other)
    (True, False)
    """
    for part in examples.split(4096):  # in parts, since rows may be overlapping views of a shared storage
        for row in part.cpu().numpy():
            yield blake2b(row.tobytes(), digest_size=16).digest()
