"""The cycles of a permutation, found by walking along them; and heads whose keys are given."""

from typing import Any

import torch
from torch import Tensor

from kvt.attention import KV, Attention


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def head(keys: Tensor, attention: type[Attention] = KV, **setting: Any) -> Attention:
    """A head with these keys, (N, channels): its input is the keys, its values are the unit vectors of the tokens."""
    n, channels = keys.shape
    layer = attention(channels, 1, bias=False, score="dot", **setting).double()
    with torch.no_grad():
        layer.projection["k"].weight.copy_(torch.eye(channels))
    assert layer.project(keys[None])[1].shape == (1, 1, n, channels)
    return layer


def cycles_of(successor: Tensor) -> list[list[int]]:
    """Return each cycle of a permutation as its tokens in order."""
    left: set[int] = set(range(len(successor)))
    found: list[list[int]] = []
    while left:
        found.append([left.pop()])
        while (following := int(successor[found[-1][-1]])) in left:
            left.remove(following)
            found[-1].append(following)
    return found
