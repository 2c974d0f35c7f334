"""Examples that show the same, wherever they stand."""

from collections.abc import Iterator
from hashlib import blake2b

from torch import Tensor


def row_hashes(examples: Tensor) -> Iterator[bytes]:
    """What tells each row of a tensor from rows that hold anything else, in 16 bytes.

    >>> import torch
    >>> same, other, again = row_hashes(torch.tensor([[1, 2], [1, 3], [1, 2]]))
    >>> (same == again, same == other)
    (True, False)
    """
    for part in examples.split(4096):  # a view of overlapping windows takes no more memory than that
        for row in part.cpu().numpy():
            yield blake2b(row.tobytes(), digest_size=16).digest()
