"""Multi-head latent attention."""

from typing import Any

import torch
from torch import Tensor, nn

from kvt.attention.ordinary import is_plain
from kvt.attention.scores import SCORES, DotScore
from kvt.attention.variants import QSharedKV
from kvt.system import UserError, require_positive

PRODUCTS = [name for name, score in SCORES.items() if getattr(score, "features", None) is DotScore.features]


class MLA(QSharedKV, name="mla", label="MLA", colour="#661100"):
    """softmax(α Q U Cᵀ) C Wᵀ: keys and values are linear functions of a cached latent vector with r numbers.

    c_j = W_D x_j,  k_j = U c_j,  v_j = W c_j  (DeepSeek-AI 2024, "DeepSeek-V2", eq. 9 to 11). By default, all heads
    share the latent vector c_j, but each head has its own U and W. Because q · U c = Uᵀq · c and Σ a_j W c_j =
    W Σ a_j c_j (end of §2.1.2), the layer attends like a `QSharedKV` with queries Uᵀq, and with c as key and value.

    Rotations do not commute with U. With `rope`, each query and each shared key therefore have d_R = rope · head_dim
    additional channels, q' and k'. k' is cached, too. The default score is (Uᵀq_i · c_j + R_i q'_i · R_j k'_j) /
    √(head_dim + d_R), where R_i rotates as `Rotary` does (decoupled rotary position embeddings, eq. 14 to 18). The
    low-rank query (eq. 12 and 13) and the norm of the latent vector are not implemented.

    Args:
        rank: r, the size of a latent vector; default: twice head_dim. Without `rope`, the cache is then as large as in
            `QKV` with the same `kv_heads`.
        kv_heads: number of latent vectors per token, each for a group of heads / kv_heads heads (Zadouri et al. 2025).
        score: scaled_dot, model_scaled_dot or dot.
        rope: d_R / head_dim, from 0 to 1.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        rank: int | None = None,
        kv_heads: int | None = 1,
        score: str = "scaled_dot",
        bias: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, heads, kv_heads=kv_heads, score=score, bias=bias, **kwargs)
        if score not in PRODUCTS:
            names = ", ".join(PRODUCTS)
            raise UserError(f"score={score}: MLA supports only dot products of queries and keys: choose from {names}")
        self.rank = 2 * self.head_dim if rank is None else rank
        require_positive(rank=self.rank)
        self.rotated = self.rotary.channels
        self.score = SCORES[score](heads, self.head_dim + self.rotated)
        self.widths |= {"q": self.rotated + self.head_dim, "k": self.rotated + self.rank}  # rotated channels first
        for name, number in (("q", heads), ("k", self.kv_heads)):
            self.projection[name] = nn.Linear(dim, number * self.widths[name], bias=bias)
        for name in ("up_k", "up_v"):  # U and W
            self.projection[name] = nn.Linear(self.rank, dim, bias=False)

    def query(self, x: Tensor) -> Tensor:
        """Return queries [q', Uᵀq], (B, heads, N, d_R + r), for the cached keys [k', c], (B, kv_heads, M, d_R + r)."""
        q = super().query(x)
        return torch.cat([q[..., : self.rotated], q[..., self.rotated :] @ self._up("up_k", q)], dim=-1)

    def rotate(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        q, key, _ = super().rotate(q, k, v, start)
        return q, key, key if v is k else self.rotary(v, start)

    def merge(self, values: Tensor, start: int, x: Tensor | None = None) -> Tensor:
        return super().merge(values[..., self.rotated :] @ self._up("up_v", values).mT, start, x)

    def _up(self, name: str, like: Tensor) -> Tensor:  # (heads, head_dim, rank)
        up = self.projection[name]
        weight = up.weight if is_plain(up) else up(torch.eye(self.rank, dtype=like.dtype, device=like.device)).mT
        return weight.unflatten(0, (-1, self.head_dim))
