"""The attention of the grid keyless: Q≠K=V with a routing matrix, as those built it who saw it fail at recall."""

from typing import Any

import torch
from torch import Tensor, nn

from kvt.attention.variants import QSharedKV


class Routed(QSharedKV):
    """softmax(α Q R Kᵀ) K: `q-kv` whose queries are mapped by a matrix R a head (Gao and Xu 2026, "Keyless", eq. 2).

    R, (heads, head_dim, head_dim), adds nothing to what `q-kv` can be, as Q R is linear in x, too; but it starts small.

    Args:
        std: R is initialised from N(0, std²); 0.02 is that of the trial in which four heads fail. With std =
            1 / √head_dim, scores start about as large as without R.
    """

    def __init__(self, dim: int, heads: int, *, std: float = 0.02, **kwargs: Any) -> None:
        super().__init__(dim, heads, **kwargs)
        self.routing = nn.Parameter(std * torch.randn(self.heads, self.head_dim, self.head_dim))

    def query(self, x: Tensor) -> Tensor:
        return super().query(x) @ self.routing
