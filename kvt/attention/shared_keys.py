"""Shared key and value projections as in Gemma 4 and DeepSeek-V4."""

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from kvt.attention.rotary import whole_pairs
from kvt.attention.variants import QSharedKV
from kvt.system import UserError

EPS = 1e-6  # epsilon of the RMS norms of both models


class HeadNorm(nn.RMSNorm):
    """RMS norm over a head's channels. The weight is cast to the dtype of x, as torch's fused kernel requires."""

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class NormedSharedKV(QSharedKV):
    """`QSharedKV` for self-attention only, with rotary position embeddings and RMS norms over the channels of a head.

    Args:
        rope: fraction of a head's channels to rotate; the number of these channels must be even. Default: the fraction
            of Gemma 4 or DeepSeek-V4, rounded up to whole pairs of channels.
    """

    share: ClassVar[float]
    query_norm: HeadNorm

    def __init__(self, dim: int, heads: int, *, rope: float | None = None, **kwargs: Any) -> None:
        rope = whole_pairs(self.share, dim, heads) if rope is None else rope
        super().__init__(dim, heads, rope=rope, **kwargs)
        self.key_norm = HeadNorm(self.head_dim, EPS)

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        if context is not None:
            raise UserError(f"{type(self).__name__} supports self-attention only: use QKV for a context")
        q, k, v = super().project(x)
        return q, self.key_norm(k), v

    def query(self, x: Tensor) -> Tensor:
        return self.query_norm(super().query(x))

    def borrow_keys(self) -> None:
        super().borrow_keys()
        del self.key_norm


class QSharedKVGemma(NormedSharedKV, name="q-kv-gemma", label="Q≠K=V (Gemma)", colour="#332288"):
    """softmax(α (R_i q̂_i)·(R_j k̂_j)) v̂_j: key and value share a projection, as in the global layers of Gemma 4.

    k̂ = g ⊙ rms(k) and q̂ = h ⊙ rms(q) have learned scales g and h. v̂ = rms(k) has no scale, and is not rotated. In
    queries and keys, a quarter of the channels is rotated by default. Keys and values differ, so both are cached. (See
    `attention_k_eq_v` of models/gemma4 in Hugging Face transformers. Gemma 4 itself has score="dot", so α = 1, and
    fewer key and value heads than query heads.)

    Args:
        rope_base: base of the rotation frequencies. Pair i of Gemma 4 has the frequency 1,000,000^(−2i/D) in a head of
            D channels. Since r = D/4 channels are rotated, this equals base^(−2i/r) with the default 1,000,000^(1/4).
    """

    share = 1 / 4

    def __init__(self, dim: int, heads: int, *, rope_base: float = 1e6**0.25, **kwargs: Any) -> None:
        super().__init__(dim, heads, rope_base=rope_base, **kwargs)
        self.query_norm = HeadNorm(self.head_dim, EPS)

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x, context)
        return q, k, F.rms_norm(v, (self.head_dim,), eps=EPS)


class QSharedKVDeepSeek(NormedSharedKV, name="q-kv-deepseek", label="Q≠K=V (DeepSeek)", colour="#DDCC77"):
    """R_iᵀ softmax(α (R_i q̂_i)·(R_j k̂_j)) R_j k̂_j: one tensor is both key and value, as in DeepSeek-V4.

    k̂ = g ⊙ rms(k) with a learned scale g, and q̂ = rms(q). By default, an eighth of the channels of q̂ and of k̂ is
    rotated, and all heads share one key head. R_iᵀ rotates the output of query i back, so that the output depends on
    the distance j − i through R_(j−i) k̂_j. (Unlike in transformers' models/deepseek_v4, query and output have full
    rank, there are no attention sinks, and queries attend to all tokens, not to the last 128 and to compressed tokens.)
    """

    share = 1 / 8

    def __init__(self, dim: int, heads: int, *, kv_heads: int | None = 1, **kwargs: Any) -> None:
        super().__init__(dim, heads, kv_heads=kv_heads, **kwargs)
        self.query_norm = HeadNorm(self.head_dim, EPS, elementwise_affine=False)

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, _ = super().project(x, context)
        return q, k, k

    def rotate(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        q, key, _ = super().rotate(q, k, v, start)
        return q, key, key if v is k else self.rotary(v, start)

    def merge(self, values: Tensor, start: int, x: Tensor | None = None) -> Tensor:
        return super().merge(self.rotary.back(values, start), start, x)
