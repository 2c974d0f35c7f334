"""The attentions to compare, each by the projections it owns."""

import torch
from torch import Tensor

from kvt.attention.base import Attention, allowed_pairs
from kvt.attention.dropout import dropout
from kvt.attention.map_position import MapPosition


class QKV(Attention):
    """The usual attention, softmax(α Q Kᵀ) V (Vaswani et al. 2017; Borji 2023, eq. 1)."""

    projections = "qkv"


class KV(Attention):
    """No query: softmax(α K Kᵀ) V. Its scores are symmetric (Borji 2023, eq. 2)."""

    projections = "kkv"


class QSharedKV(Attention):
    """Key and value shared: softmax(α Q Kᵀ) K. Its cache is half as large ("Q–K=V" of the follow-up)."""

    projections = "qkk"


class K(Attention):
    """One projection for all three roles: softmax(α K Kᵀ) K ("Q=K=V" of the follow-up)."""

    projections = "kkk"


class QKVPos(MapPosition, QKV):
    """`QKV` with a positional encoding of its map."""


class KVPos(MapPosition, KV):
    """`KV` made asymmetric by a positional encoding of its map (Borji 2023, §2, "KV+Pos")."""


class KPos(MapPosition, K):
    """`K` with a positional encoding of its map."""


class Identity(Attention):
    """Every token attends to itself alone, A = I: what a model does without any exchange between tokens."""

    projections = "vvv"

    def attention_weights(self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """The unit matrix, its forbidden entries zero."""
        n, m = q.shape[-2], k.shape[-2]
        unit = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n).triu(m - n)
        allowed = allowed_pairs(n, m, mask, causal, q.device)
        unit = unit if allowed is None else unit & allowed
        return unit.expand(*q.shape[:2], n, m).to(q.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Each token's own value, without making the map."""
        n, m = q.shape[-2], k.shape[-2]
        kept = v.new_ones(*q.shape[:2], n)
        if mask is not None:
            kept = kept * mask.expand(*mask.shape[:-2], n, m).diagonal(m - n, -2, -1)
        p = self.dropout if self.training else 0.0
        return dropout(kept, p).unsqueeze(-1) * v[..., m - n :, :]
