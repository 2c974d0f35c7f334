"""Attention with a two-dimensional positional encoding of its map."""

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from kvt.attention.base import Attention
from kvt.attention.cache import KVCache
from kvt.attention.ordinary import is_plain
from kvt.attention.positions import map_sinusoids
from kvt.system import UserError, require_choice, require_positive


class SinusoidalMap(nn.Module):
    """A fixed 2-D sinusoidal encoding P of the attention map. `MapPosition` adds w · P_ij to logits, with learned w.

    Each channel of P depends only on the row i or only on the column j. The sum over the row channels is constant along
    a row, so it cancels in the softmax. `forward` returns the sum over the column channels, c_j = w_col · p_col(j).
    """

    def __init__(self, max_len: int, channels: int) -> None:
        super().__init__()
        rows, columns = map_sinusoids(max_len, channels)
        self.row_channels = rows.shape[1]
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)

    def forward(self, weight: Tensor, num_queries: int, num_keys: int) -> Tensor:
        """Return the biases c_j of all keys j, (maps, 1, M), for each row w of `weight`, (maps, channels)."""
        columns = self.get_buffer("columns")[:num_keys].T.to(weight.dtype)
        return (weight[:, self.row_channels :] @ columns).unsqueeze(1)

    def cancelled(self, weight: Tensor, num_queries: int, num_keys: int) -> Tensor:
        """Return the row part of w · P_ij, which `forward` omits, for the last N of M positions: (maps, N, 1)."""
        rows: Tensor = self.get_buffer("rows")[num_keys - num_queries : num_keys]
        return (weight[:, : self.row_channels] @ rows.T.to(weight.dtype)).unsqueeze(-1)


class LearnedMap(nn.Module):
    """A learned encoding P of the attention map, (max_len, max_len, channels)."""

    def __init__(self, max_len: int, channels: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(max_len, max_len, channels).normal_(std=0.02))

    def forward(self, weight: Tensor, num_queries: int, num_keys: int) -> Tensor:
        """Return w · P_ij for the last N of M rows i, (maps, N, M), for each row w of `weight`, (maps, channels)."""
        return (self.table[num_keys - num_queries : num_keys, :num_keys] @ weight.T).permute(2, 0, 1)


MAPS: dict[str, type[SinusoidalMap | LearnedMap]] = {"sinusoid": SinusoidalMap, "learned": LearnedMap}


class MapPosition(Attention):
    """Attention that adds m channels of positional encoding P to each score, and projects the sum to one logit.

    logit_ij = Linear_{m→1}(score_ij · 1_m + P_ij)          (Borji 2023, §2, "KV+Pos")
             = (Σw) · score_ij + w · P_ij + b

    Σw is the gain, and w · P_ij + b the bias. `SinusoidalMap` omits the part of the bias that cancels in the softmax.

    Args:
        max_len: length of the longest sequence.
        pos_dim: m, the number of channels of P; at least 3 with "sinusoid".
        pos: "sinusoid" for the fixed encoding of the paper, or "learned" for a table of max_len² · m weights.
        per_head: whether each head has a linear map of its own, as in the character model of the paper.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        max_len: int,
        pos_dim: int = 10,
        pos: str = "sinusoid",
        per_head: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, heads, **kwargs)
        require_choice("pos", pos, MAPS)
        require_positive(max_len=max_len, pos_dim=pos_dim)
        self.max_len, self.pos_dim = max_len, pos_dim
        self.positions = MAPS[pos](max_len, pos_dim)
        self.to_logit = nn.Linear(pos_dim, heads if per_head else 1)

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        if context is not None:
            raise UserError(f"{type(self).__name__} encodes positions of self-attention only: use QKV for a context")
        return super().project(x)

    def scores(self, x: Tensor, context: Tensor | None = None, *, cache: KVCache | None = None) -> Tensor:
        """Return the logits of the class's formula, (B, heads, N, M), including terms that cancel in the softmax."""
        scores = super().scores(x, context, cache=cache)
        if isinstance(self.positions, SinusoidalMap):
            scores = scores + self.positions.cancelled(self._linear_map()[0], *scores.shape[-2:])
        return scores

    def gain_and_bias(self, num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
        """Return the gain Σw, (maps, 1, 1), and the bias w · P + b; `maps` is 1 or the number of heads.

        The bias is (maps, N, M) with a learned table. With the sinusoid, whose row part cancels, it is (maps, 1, M).
        Raises UserError if there are more than `max_len` keys.
        """
        if num_keys > self.max_len:
            raise UserError(f"a sequence of {num_keys} tokens is longer than max_len={self.max_len}")
        weight, bias = self._linear_map()
        return weight.sum(1)[:, None, None], self.positions(weight, num_queries, num_keys) + bias[:, None, None]

    def _linear_map(self) -> tuple[Tensor, Tensor]:  # w (maps, m) and b (maps)
        if is_plain(self.to_logit):
            return self.to_logit.weight, self.to_logit.bias
        like = next(chain(self.positions.parameters(), self.positions.buffers()))
        zero_and_units = torch.eye(self.pos_dim + 1, self.pos_dim, dtype=like.dtype, device=like.device).roll(1, 0)
        bias, *_ = outputs = self.to_logit(zero_and_units)
        return (outputs[1:] - bias).mT, bias
