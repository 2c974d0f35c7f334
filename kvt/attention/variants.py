"""The attention variants, each by the projections it owns."""

import torch
from torch import Tensor

from kvt.attention.base import Attention
from kvt.attention.kernels import allowed_pairs, dropout
from kvt.attention.map_position import MapPosition


class QKV(Attention):
    """softmax(α Q Kᵀ) V: the usual attention (Vaswani et al. 2017; Borji 2023, eq. 1)."""

    projections = "qkv"


class KV(Attention):
    """softmax(α K Kᵀ) V: keys also act as queries, so the scores are symmetric (Borji 2023, eq. 2)."""

    projections = "kkv"


class QSharedKV(Attention):
    """softmax(α Q Kᵀ) K: keys also act as values, which halves the cache ("Q–K=V" of the follow-up)."""

    projections = "qkk"


class K(Attention):
    """softmax(α K Kᵀ) K: one projection for all three roles ("Q=K=V" of the follow-up)."""

    projections = "kkk"


class QKVPos(MapPosition, QKV):
    """`QKV` with a positional encoding of its map."""


class KVPos(MapPosition, KV):
    """`KV` made asymmetric by a positional encoding of its map (Borji 2023, §2, "KV+Pos")."""


class KPos(MapPosition, K):
    """`K` with a positional encoding of its map."""


class Identity(Attention):
    """A = I: every token attends to itself alone, so tokens exchange nothing."""

    projections = "vvv"

    def attention_weights(self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        n, m = q.shape[-2], k.shape[-2]
        unit = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n).triu(m - n)
        allowed = allowed_pairs(n, m, mask, causal, q.device)
        unit = unit if allowed is None else unit & allowed
        return unit.expand(*q.shape[:2], n, m).to(q.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        n, m = q.shape[-2], k.shape[-2]
        weights = v.new_ones(*q.shape[:2], n)  # the diagonal of the map
        if mask is not None:
            weights = weights * mask.expand(*mask.shape[:-2], n, m).diagonal(m - n, -2, -1)
        p = self.dropout if self.training else 0.0
        return dropout(weights, p).unsqueeze(-1) * v[..., m - n :, :]
