"""Attention variants. In formulas, α is the scale, by default 1/√head_dim; g, c are gain and bias of `MapPosition`."""

from typing import Any

import torch
from torch import Tensor

from kvt.attention.base import Attention
from kvt.attention.kernels import allowed_pairs, dropout, own_pairs, repeat_groups
from kvt.attention.map_position import MapPosition
from kvt.attention.phase import Phase
from kvt.system import unknown


class QKV(Attention, name="qkv", label="QKV", colour="#0072B2"):
    """softmax(α Q Kᵀ) V: the usual attention (Vaswani et al. 2017; Borji 2023, eq. 1).

    Args:
        init: "symmetric" gives the query and key projections the same initial weights. Default: independent weights.
    """

    projections = "qkv"

    def __init__(self, dim: int, heads: int, *, init: str | None = None, **kwargs: Any) -> None:
        super().__init__(dim, heads, **kwargs)
        if init not in (None, "symmetric"):
            raise unknown("init", init, ["symmetric"])
        self.starts_symmetric = init == "symmetric"
        self.after_initialisation()

    @torch.no_grad()
    def after_initialisation(self) -> None:
        if self.starts_symmetric and not self.borrows_keys:
            for asks, is_asked in zip(
                self.projection["q"].parameters(), self.projection["k"].parameters(), strict=True
            ):
                heads = is_asked.unflatten(0, (self.kv_heads, self.head_dim))
                asks.copy_(heads.repeat_interleave(self.heads // self.kv_heads, 0).flatten(0, 1))


class KV(Attention, name="kv", label="KV", colour="#D55E00"):
    """softmax(α K Kᵀ) V: keys also act as queries, so that scores are symmetric (Borji 2023, eq. 2)."""

    projections = "kkv"


class KVPos(MapPosition, KV, name="kv+pos", label="KV+Pos", colour="#009E73"):
    """softmax(g α K Kᵀ + c) V: `KV` with a positional encoding that makes logits asymmetric (Borji 2023, §2)."""


class KVPhase(Phase, KV, name="kv+phase", label="KV+Phase", colour="#882255"):
    """softmax(α K R(φ) Kᵀ) V: `KV`, but a key that acts as query is rotated by −φ (see `Phase`)."""


class QKVPos(MapPosition, QKV, name="qkv+pos", label="QKV+Pos", colour="#56B4E9"):
    """softmax(g α Q Kᵀ + c) V: `QKV` with the positional encoding of `KVPos`."""


class XKV(Attention, name="x-kv", label="Q=X", colour="#44AA99"):
    """softmax(α X Kᵀ) V: the input token, split into heads, is the query (Karbevski and Mijoski 2025)."""

    projections = "kkv"

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        _, k, v = super().project(x, context)
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2), k, v


class QSharedKV(Attention, name="q-kv", label="Q≠K=V", colour="#CC79A7"):
    """softmax(α Q Kᵀ) K: keys also act as values, which halves the cache without `rope` ("Q-K=V", arXiv:2606.04032)."""

    projections = "qkk"


class K(Attention, name="k", label="Q=K=V", colour="#E69F00"):
    """softmax(α K Kᵀ) K: query, key and value share one projection ("Q=K=V", arXiv:2606.04032)."""

    projections = "kkk"


class KPos(MapPosition, K, name="k+pos", label="Q=K=V+Pos", colour="#000000"):
    """softmax(g α K Kᵀ + c) K: `K` with the positional encoding of `KVPos`."""


class KPhase(Phase, K, name="k+phase", label="Q=K=V+Phase", colour="#999933"):
    """softmax(α K R(φ) Kᵀ) K: `K` with the rotation of `KVPhase`."""


class Identity(Attention, name="identity", label="Identity", colour="#777777"):
    """The attention map is the identity matrix: tokens attend only to themselves."""

    projections = "vvv"

    def attention_weights(self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        n, m = q.shape[-2], k.shape[-2]
        unit = own_pairs(n, m, q.device)
        allowed = allowed_pairs(n, m, mask, causal, q.device)
        unit = unit if allowed is None else unit & allowed
        return unit.expand(*q.shape[:2], n, m).to(q.dtype)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, attend_self: bool = True
    ) -> Tensor:
        n, m = q.shape[-2], k.shape[-2]
        weights = v.new_ones(*q.shape[:2], n)  # the weights of each token for itself
        if mask is not None:
            weights = weights * mask.expand(*mask.shape[:-2], n, m).diagonal(m - n, -2, -1)
        p = self.dropout if self.training else 0.0
        return dropout(weights, p).unsqueeze(-1) * repeat_groups(v[..., m - n :, :], q.shape[1])
