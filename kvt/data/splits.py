"""Generate random splits such that no input of the model is in two splits."""

from collections.abc import Callable, Mapping
from itertools import count
from math import inf

import torch
from torch import Generator, Tensor

from kvt.data.loader import row_hashes
from kvt.data.order import derive_seed

Draw = Callable[[int, Generator], tuple[Tensor, ...]]
"""A function that draws a given number of examples, and returns tensors, of which the first is the model's input."""
Redraw = Callable[[tuple[Tensor, ...], Generator], tuple[Tensor, ...]]  # replaces each example by one of the same kind
HELD_OUT = 4  # a hash assigns 1 / HELD_OUT of the possible examples to each split except the first


def draw_apart(
    draw: Draw,
    sizes: Mapping[str, int],
    seed: int,
    tries: float = inf,
    redraw: Redraw | None = None,
    by_hash: bool = False,
) -> dict[str, tuple[Tensor, ...]]:
    """Draw splits of the given sizes, and replace every example whose input is also in an earlier split.

    If few different examples are possible, the first split may contain all frequent examples, so that later splits have
    a different distribution. `redraw` avoids this bias: if the drawn splits have an input in common, a hash of the
    input assigns every possible example to one split, and `redraw` replaces each example that is in a wrong split.

    Args:
        draw: draws the examples of a split.
        sizes: maps the name of each split to its number of examples.
        seed: seed of all draws.
        tries: if a split needs this number of rounds of replacement or more, the function raises ValueError.
        redraw: returns another example of the same kind for each given example, and decides what a kind is.
        by_hash: only with `redraw`: whether the hash assigns examples even if the splits have no input in common.
    """
    names = [*sizes]
    generators = [torch.Generator().manual_seed(derive_seed(seed, stream)) for stream in range(len(names))]
    splits = {name: draw(sizes[name], generator) for name, generator in zip(names, generators, strict=True)}
    keys = {name: [*row_hashes(inputs)] for name, (inputs, *_) in splits.items()}
    different = [*map(set, keys.values())]
    by_hash = redraw is not None and (by_hash or sum(map(len, different)) > len(set().union(*different)))
    earlier: set[bytes] = set()  # hashes of the inputs in earlier splits

    def is_elsewhere(key: bytes, split: str) -> bool:
        place = key[0] % HELD_OUT
        return split != names[place if place < len(names) else 0] if by_hash else key in earlier

    for (split, tensors), generator in zip(splits.items(), generators, strict=True):
        again = [row for row, key in enumerate(keys[split]) if is_elsewhere(key, split)]
        attempts = count(1)
        while again:
            if next(attempts) >= tries:
                raise ValueError(f"{split}: {len(again)} examples belong to another split")
            replaced = tuple(tensor[again] for tensor in tensors)
            drawn = redraw(replaced, generator) if redraw else draw(len(again), generator)
            for tensor, rows in zip(tensors, drawn, strict=True):
                tensor[again] = rows
            for row, key in zip(again, row_hashes(drawn[0]), strict=True):
                keys[split][row] = key
            again = [row for row in again if is_elsewhere(keys[split][row], split)]
        earlier.update(keys[split])
    return splits
