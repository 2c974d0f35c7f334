"""KV+Pos attention with logits computed by the paper's formula, as a slow baseline and for tests."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvt.attention import Attention, KVPos
from kvt.attention.map_position import MapPosition
from kvt.attention.positions import map_sinusoids


def map_sinusoid(length: int, channels: int) -> Tensor:
    """Return the 2-D sinusoidal encoding P of an attention map, (length, length, channels)."""
    rows, columns = map_sinusoids(length, channels)
    return torch.cat([rows[:, None].expand(-1, length, -1), columns[None].expand(length, -1, -1)], dim=-1)


def map_logits(scores: Tensor, positions: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return Linear_{m→1}(scores · 1_m + P), (B, heads, N, M)   (Borji 2023, §2, "KV+Pos").

    `positions` is P, (N, M, m); `weight` and `bias` are (1, m) and (1), or (heads, m) and (heads).
    """
    channels = scores.unsqueeze(-1) + positions  # (B, heads, N, M, m)
    if len(weight) == 1:
        return F.linear(channels, weight, bias).squeeze(-1)
    return (channels @ weight[:, None, :, None]).squeeze(-1) + bias[:, None, None]


class LiteralMap(MapPosition):
    """`MapPosition` with the same outputs, but logits from `map_logits`, which needs a tensor (B, heads, N, M, m)."""

    def __init__(self, dim: int, heads: int, *, max_len: int, pos_dim: int = 10, **kwargs: Any) -> None:
        super().__init__(dim, heads, max_len=max_len, pos_dim=pos_dim, **kwargs)
        self.register_buffer("sinusoid", map_sinusoid(max_len, pos_dim), persistent=False)

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        n, m = q.shape[-2], k.shape[-2]
        table: Tensor = getattr(self.positions, "table", self.get_buffer("sinusoid"))
        return map_logits(self.score(q, k), table[m - n : m, :m], *self._linear_map())

    scores = Attention.scores  # `MapPosition.scores` would add terms that `logits` already has


class LiteralKVPos(LiteralMap, KVPos):
    """`KVPos` by the paper's formula: softmax(Linear_{m→1}(α K Kᵀ · 1_m + P)) V."""
