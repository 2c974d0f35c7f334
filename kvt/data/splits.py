"""Generated splits that share no example."""

from collections.abc import Callable, Mapping
from itertools import count
from math import inf

import torch
from torch import Generator, Tensor

from kvt.data.loader import row_hashes
from kvt.data.order import derive_seed

Draw = Callable[[int, Generator], tuple[Tensor, ...]]
"""Draws so many examples; the first tensor is the model's input."""


def draw_apart(draw: Draw, sizes: Mapping[str, int], seed: int, tries: float = inf) -> dict[str, tuple[Tensor, ...]]:
    """Draw splits of these sizes, and again each example whose input an earlier split has.

    Raises:
        ValueError: after so many `tries`, a split still has such examples.
    """
    splits: dict[str, tuple[Tensor, ...]] = {}
    earlier: set[bytes] = set()  # hashes of the inputs of the splits before
    for stream, (split, size) in enumerate(sizes.items()):
        generator = torch.Generator().manual_seed(derive_seed(seed, stream))
        tensors = draw(size, generator)
        keys = [*row_hashes(tensors[0])]
        again = [row for row, key in enumerate(keys) if key in earlier]
        attempts = count(1)
        while again:
            if next(attempts) >= tries:
                raise ValueError(f"{split}: {len(again)} examples are in an earlier split")
            drawn = draw(len(again), generator)
            for tensor, rows in zip(tensors, drawn, strict=True):
                tensor[again] = rows
            for row, key in zip(again, row_hashes(drawn[0]), strict=True):
                keys[row] = key
            again = [row for row in again if keys[row] in earlier]
        earlier.update(keys)
        splits[split] = tensors
    return splits
