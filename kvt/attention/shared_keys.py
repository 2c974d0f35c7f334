"""Shared key and value projections as in Gemma 4 and DeepSeek-V4 (checked against their code in transformers)."""

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from kvt.attention.rotary import whole_pairs
from kvt.attention.variants import QSharedKV
from kvt.system.errors import UserError

EPS = 1e-6  # of the norms, in both models


class HeadNorm(nn.RMSNorm):
    """RMS norm over the channels of a head; its weight takes the type of x, so that autocast runs the fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class NormedSharedKV(QSharedKV):
    """`QSharedKV` with RMS norms over the channels of a head and rotary positions; self-attention only.

    Args:
        rope: share of a head's channels that is rotated; default: the model's, rounded up to whole pairs of channels.
    """

    share: ClassVar[float]
    query_norm: HeadNorm

    def __init__(self, dim: int, heads: int, *, rope: float | None = None, **kwargs: Any) -> None:
        rope = whole_pairs(self.share, dim, heads) if rope is None else rope
        super().__init__(dim, heads, rope=rope, **kwargs)
        self.key_norm = HeadNorm(self.head_dim, EPS)

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        if context is not None:
            raise UserError(f"{type(self).__name__} is of a decoder without cross-attention: use QKV for a context")
        q, k, v = super().project(x)
        return q, self.key_norm(k), v

    def query(self, x: Tensor) -> Tensor:
        return self.query_norm(super().query(x))

    def borrow_keys(self) -> None:
        super().borrow_keys()
        del self.key_norm


class QSharedKVGemma(NormedSharedKV, name="q-kv-gemma", label="Q≠K=V (Gemma)", colour="#332288"):
    """softmax(α (R_i q̂_i)·(R_j k̂_j)) v̂_j: k̂ and v̂ are of one projection, as in the global layers of Gemma 4.

    k̂ = g ⊙ rms(k), q̂ = h ⊙ rms(q) with learned scales g and h; v̂ = rms(k), without a scale and without rotation. A
    quarter of the channels is rotated. Key and value differ after the norms, so that both are cached: what sharing
    saves is weights. (Hugging Face transformers, models/gemma4, `attention_k_eq_v`. The model has α = 1, here
    score="dot", and fewer key and value heads.)

    Args:
        rope_base: the model's 1,000,000 is over all channels of a head, base^(−2i/D); of a quarter, it is its fourth
            root.
    """

    share = 1 / 4

    def __init__(self, dim: int, heads: int, *, rope_base: float = 1e6**0.25, **kwargs: Any) -> None:
        super().__init__(dim, heads, rope_base=rope_base, **kwargs)
        self.query_norm = HeadNorm(self.head_dim, EPS)

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x, context)
        return q, k, F.rms_norm(v, (self.head_dim,), eps=EPS)


class QSharedKVDeepSeek(NormedSharedKV, name="q-kv-deepseek", label="Q≠K=V (DeepSeek)", colour="#DDCC77"):
    """R_iᵀ softmax(α (R_i q̂_i)·(R_j k̂_j)) R_j k̂_j: one tensor is key and value, as in DeepSeek-V4.

    k̂ = g ⊙ rms(k) with a learned scale g, q̂ = rms(q). An eighth of the channels is rotated, of the value too; rotated
    back where it is asked, a token sees R_(j−i) k̂_j, which depends on how far away it stands. All heads share one key,
    which is cached once. (Hugging Face transformers, models/deepseek_v4, where 64 of 512 channels are rotated. Not
    here: the low-rank query and output, attention sinks, and the compressed tokens beyond a window of 128.)
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

    def merge(self, values: Tensor, start: int) -> Tensor:
        return super().merge(self.rotary.back(values, start), start)
