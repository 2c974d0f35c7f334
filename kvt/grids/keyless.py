"""Attention of the grid `keyless`: Q≠K=V with a routing matrix."""

from typing import Any

import torch
from torch import Tensor, nn

from kvt.attention.variants import QSharedKV


class Routed(QSharedKV):
    """softmax(α Q R Kᵀ) K: `q-kv` with queries multiplied by a matrix R per head (arXiv:2606.21848).

    R has shape (heads, head_dim, head_dim). The layer represents the same functions as `q-kv`, because R can be merged
    into the query projection.

    Args:
        std: R is initialised from N(0, std²). The default is that of a trial by the authors of arXiv:2606.04032, whose
            models with four heads fail at recall. With std = 1 / √head_dim, initial scores are about as large as
            without R.
    """

    def __init__(self, dim: int, heads: int, *, std: float = 0.02, **kwargs: Any) -> None:
        super().__init__(dim, heads, **kwargs)
        self.routing = nn.Parameter(std * torch.randn(self.heads, self.head_dim, self.head_dim))

    def query(self, x: Tensor) -> Tensor:
        return super().query(x) @ self.routing
