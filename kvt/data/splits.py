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
Redraw = Callable[[tuple[Tensor, ...], Generator], tuple[Tensor, ...]]
"""Replaces examples by new draws of the same kind. Where it draws no match, an example stays."""
HELD_OUT = 4  # one of so many possible examples is each other split's, where examples are of several kinds


def draw_apart(
    draw: Draw,
    sizes: Mapping[str, int],
    seed: int,
    tries: float = inf,
    redraw: Redraw | None = None,
    by_hash: bool = False,
) -> dict[str, tuple[Tensor, ...]]:
    """Draw splits of these sizes, and again each example whose input an earlier split has.

    Examples that are often drawn are soon all in the first split, so that the others have the rest, another
    distribution. Where this matters, name `redraw`: if splits share an example, each possible example then belongs to
    one of the splits, by a hash of its input.

    Args:
        redraw: draws again what belongs to another split, of the same kind, so that all have as many of each.
        by_hash: whether examples belong to splits by their hash even if the splits share none.

    Raises:
        ValueError: after so many `tries`, a split still has such examples.
    """
    names = [*sizes]
    generators = [torch.Generator().manual_seed(derive_seed(seed, stream)) for stream in range(len(names))]
    splits = {name: draw(sizes[name], generator) for name, generator in zip(names, generators, strict=True)}
    keys = {name: [*row_hashes(inputs)] for name, (inputs, *_) in splits.items()}  # of the inputs
    different = [*map(set, keys.values())]
    by_hash = redraw is not None and (by_hash or sum(map(len, different)) > len(set().union(*different)))
    earlier: set[bytes] = set()  # hashes of the inputs of the splits before

    def is_elsewhere(key: bytes, split: str) -> bool:
        place = key[0] % HELD_OUT
        return split != names[place if place < len(names) else 0] if by_hash else key in earlier

    for (split, tensors), generator in zip(splits.items(), generators, strict=True):
        again = [row for row, key in enumerate(keys[split]) if is_elsewhere(key, split)]
        attempts = count(1)
        while again:
            if next(attempts) >= tries:
                raise ValueError(f"{split}: {len(again)} examples are those of another split")
            replaced = tuple(tensor[again] for tensor in tensors)
            drawn = redraw(replaced, generator) if redraw else draw(len(again), generator)
            for tensor, rows in zip(tensors, drawn, strict=True):
                tensor[again] = rows
            for row, key in zip(again, row_hashes(drawn[0]), strict=True):
                keys[split][row] = key
            again = [row for row in again if is_elsewhere(keys[split][row], split)]
        earlier.update(keys[split])
    return splits
