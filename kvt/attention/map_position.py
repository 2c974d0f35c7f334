"""A two-dimensional positional encoding of the attention map, without ever making the map."""

from typing import Any

import torch
from torch import Tensor, nn

from kvt.attention.base import Attention
from kvt.attention.cache import KVCache
from kvt.attention.positions import column_sinusoid, map_channels, sinusoid
from kvt.system.errors import UserError, require_positive, unknown


class SinusoidalMap(nn.Module):
    """The fixed 2-D sinusoid P (n, m, channels), projected by the weight w: only its column part is ever made.

    Every channel of P depends on the row alone or on the column alone. A term constant along a row cancels in the
    softmax, so w · P_ij may be replaced by c_j = w_col · p_col(j).
    """

    def __init__(self, max_len: int, channels: int) -> None:
        super().__init__()
        self.row_channels, _ = map_channels(channels)
        self.register_buffer("rows", sinusoid(max_len, self.row_channels), persistent=False)
        self.register_buffer("columns", column_sinusoid(max_len, channels), persistent=False)

    def forward(self, weight: Tensor, n: int, m: int) -> Tensor:
        """The bias of m keys, (maps, 1, m), of weights (maps, channels)."""
        columns: Tensor = self.get_buffer("columns")[:m]
        return (weight[:, self.row_channels :] @ columns.T).unsqueeze(1)

    def cancelled(self, weight: Tensor, n: int, m: int) -> Tensor:
        """What `forward` leaves out of w · P_ij, for the last n of m rows: (maps, n, 1)."""
        rows: Tensor = self.get_buffer("rows")[m - n : m]
        return (weight[:, : self.row_channels] @ rows.T).unsqueeze(-1)


class LearnedMap(nn.Module):
    """A learned table P (max_len, max_len, channels), projected by the weight w to w · P_ij."""

    def __init__(self, max_len: int, channels: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(max_len, max_len, channels).normal_(std=0.02))

    def forward(self, weight: Tensor, n: int, m: int) -> Tensor:
        """The bias of the last n of m positions towards all m, (maps, n, m), of weights (maps, channels)."""
        return (self.table[m - n : m, :m] @ weight.T).permute(2, 0, 1)

    def cancelled(self, weight: Tensor, n: int, m: int) -> Tensor:
        """What `forward` leaves out of w · P_ij: nothing, (maps, 1, 1)."""
        return weight.new_zeros(len(weight), 1, 1)


MAPS: dict[str, type[SinusoidalMap | LearnedMap]] = {"sinusoid": SinusoidalMap, "learned": LearnedMap}


class MapPosition(Attention):
    """Adds a positional encoding P of the map to every score and projects its m channels back to one number.

    logit_ij = Linear_{m→1}(score_ij · 1_m + P_ij)          (Borji 2023, §2, "KV+Pos")
             = (Σw) · score_ij + w · P_ij + b

    which is a learned gain Σw and a bias. With the fixed sinusoid the bias shrinks further, to one number a
    key position (see `SinusoidalMap`), and the attention costs what it costs without positions. The row terms and
    b cancel in the softmax.

    Args:
        max_len: the longest sequence.
        pos_dim: m, the number of channels; at least 3 with "sinusoid".
        pos: "sinusoid", the paper's fixed encoding, or "learned", a free table of max_len² · m numbers.
        per_head: whether each head has a linear map of its own, as in the paper's model of characters; by default they
            share one, as everywhere else.

    Raises:
        UserError: unknown `pos`, too few channels; in forward: a sequence longer than `max_len`.
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
        self.max_len = max_len
        self.positions = MAPS[pos](max_len, pos_dim)
        self.to_logit = nn.Linear(pos_dim, heads if per_head else 1)

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """As without positions, but of x alone: a context has positions of its own.

        Raises:
            UserError: a context.
        """
        if context is not None:
            raise UserError(f"{type(self).__name__} encodes the map of a sequence to itself: use QKV for a context")
        return super().project(x)

    def scores(self, x: Tensor, context: Tensor | None = None, *, cache: KVCache | None = None) -> Tensor:
        """Those of the formula, also what is constant along a row and cancels in the softmax: (B, heads, N, M)."""
        scores = super().scores(x, context, cache=cache)
        return scores + self.positions.cancelled(self.to_logit.weight, *scores.shape[-2:])

    def gain_and_bias(self, n: int, m: int) -> tuple[Tensor, Tensor]:
        """Σw (maps, 1, 1), and the projected positions: (maps, 1, m) for the sinusoid, (maps, n, m) for the table."""
        if m > self.max_len:
            raise UserError(f"a sequence of {m} tokens is longer than max_len={self.max_len}")
        weight, bias = self.to_logit.weight, self.to_logit.bias
        return weight.sum(1)[:, None, None], self.positions(weight, n, m) + bias[:, None, None]
