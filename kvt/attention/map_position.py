"""A two-dimensional positional encoding of the attention map, computed without a tensor of the map's size."""

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from kvt.attention.base import Attention
from kvt.attention.ordinary import affine_map
from kvt.attention.positions import map_sinusoids
from kvt.system.errors import UserError, require_positive, unknown


class SinusoidalMap(nn.Module):
    """A fixed 2-D sinusoidal encoding P of the attention map; only its column part is computed.

    Every channel of P depends on the row alone or on the column alone. Terms that are constant along a row cancel in
    the softmax. Therefore c_j = w_col · p_col(j) can replace w · P_ij, and costs as little as one bias per key.
    """

    def __init__(self, max_len: int, channels: int) -> None:
        super().__init__()
        rows, columns = map_sinusoids(max_len, channels)
        self.row_channels = rows.shape[1]
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)

    def forward(self, weight: Tensor, num_queries: int, num_keys: int) -> Tensor:
        """Return the bias c_j of every key position, (maps, 1, M), for weights w, (maps, channels)."""
        columns = self.get_buffer("columns")[:num_keys].T.to(weight.dtype)
        return (weight[:, self.row_channels :] @ columns).unsqueeze(1)

    def cancelled(self, weight: Tensor, num_queries: int, num_keys: int) -> Tensor:
        """Return the row part of w · P_ij, which `forward` omits, for the last N of M rows: (maps, N, 1)."""
        rows: Tensor = self.get_buffer("rows")[num_keys - num_queries : num_keys]
        return (weight[:, : self.row_channels] @ rows.T.to(weight.dtype)).unsqueeze(-1)


class LearnedMap(nn.Module):
    """A learned table P, (max_len, max_len, channels)."""

    def __init__(self, max_len: int, channels: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(max_len, max_len, channels).normal_(std=0.02))

    def forward(self, weight: Tensor, num_queries: int, num_keys: int) -> Tensor:
        """Return w · P_ij of the last N of M rows, (maps, N, M), for weights w, (maps, channels)."""
        return (self.table[num_keys - num_queries : num_keys, :num_keys] @ weight.T).permute(2, 0, 1)


MAPS: dict[str, type[SinusoidalMap | LearnedMap]] = {"sinusoid": SinusoidalMap, "learned": LearnedMap}


class MapPosition(Attention):
    """Attention that adds a positional encoding P with m channels to every score, and projects to one number.

    logit_ij = Linear_{m→1}(score_ij · 1_m + P_ij)          (Borji 2023, §2, "KV+Pos")
             = (Σw) · score_ij + w · P_ij + b

    The second line is a learned gain Σw and a bias. With the fixed sinusoid, the bias depends on the key alone (see
    `SinusoidalMap`).

    Args:
        max_len: length of the longest sequence.
        pos_dim: m, the number of channels; at least 3 with "sinusoid".
        pos: "sinusoid", the paper's fixed encoding, or "learned", a table of max_len² · m weights.
        per_head: whether each head has its own linear map, as in the paper's character model. By default all heads
            share one linear map.
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
        if pos not in MAPS:
            raise unknown("pos", pos, MAPS)
        require_positive(max_len=max_len, pos_dim=pos_dim)
        self.max_len, self.pos_dim = max_len, pos_dim
        self.positions = MAPS[pos](max_len, pos_dim)
        self.to_logit = nn.Linear(pos_dim, heads if per_head else 1)

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        if context is not None:
            raise UserError(f"{type(self).__name__} encodes positions of self-attention only: use QKV for a context")
        return super().project(x)

    def scores(self, x: Tensor, context: Tensor | None = None, **given: Any) -> Tensor:
        """Return the logits of the formula, (B, heads, N, M), including terms that cancel in the softmax."""
        scores = super().scores(x, context, **given)
        if isinstance(self.positions, SinusoidalMap):
            scores = scores + self.positions.cancelled(self._linear_map()[0], *scores.shape[-2:])
        return scores

    def gain_and_bias(self, num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
        """Return the gain Σw, (maps, 1, 1), and the bias w · P + b.

        The bias is (maps, N, M) for a learned table. For the sinusoid it omits the row part, which cancels in the
        softmax: (maps, 1, M).
        """
        if num_keys > self.max_len:
            raise UserError(f"a sequence of {num_keys} tokens is longer than max_len={self.max_len}")
        weight, bias = self._linear_map()
        return weight.sum(1)[:, None, None], self.positions(weight, num_queries, num_keys) + bias[:, None, None]

    def _linear_map(self) -> tuple[Tensor, Tensor]:  # w (maps, m) and b (maps)
        like = next(chain(self.positions.parameters(), self.positions.buffers()))
        weight, bias = affine_map(self.to_logit, self.pos_dim, like)
        assert bias is not None
        return weight, bias
