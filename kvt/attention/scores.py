"""Compatibility functions: how well a query and a key fit, one number for each pair."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvt.system.errors import unknown


class DotScore(nn.Module):
    """s_ij = scale · f(q_i) · g(k_j): every score that is a dot product of features of its two sides.

    Such a score runs through the fused kernel. Shapes: q (B, H, N, D), k (B, H, M, D) → (B, H, N, M).
    """

    scale = 1.0

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """f(q) and g(k), of the shapes of q and k."""
        return q, k

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """The scores, (B, H, N, M)."""
        q, k = self.features(q, k)
        return self.scale * q @ k.mT


class ScaledDot(DotScore):
    """s_ij = q_i · k_j / √D, D the dimension of a head (Vaswani et al. 2017, eq. 1)."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__(heads, head_dim)
        self.scale = head_dim**-0.5


class ModelScaledDot(DotScore):
    """s_ij = q_i · k_j / √(H·D): scaled by the dimension of the model, not of a head.

    So did the Key-Value Transformer's vision and character code.
    """

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__(heads, head_dim)
        self.scale = (heads * head_dim) ** -0.5


class Cosine(DotScore):
    """s_ij = q_i · k_j / (‖q_i‖ ‖k_j‖), between −1 and 1."""

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Both sides at unit length."""
        return F.normalize(q, dim=-1), F.normalize(k, dim=-1)


class Bilinear(DotScore):
    """s_ij = q_i · W k_j, W (D, D) learned for each head ("general", Luong et al. 2015, §3.1)."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__(heads, head_dim)
        self.weight = nn.Parameter(xavier(heads, head_dim, head_dim))

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The query, and the key seen through W."""
        return q, k @ self.weight.mT


class Additive(nn.Module):
    """s_ij = a · tanh(U q_i + W k_j), a (D), U and W (D, D) learned for each head (Bahdanau et al. 2015, A.1.2).

    Not a dot product: its memory grows as N · M · D.
    """

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.query = nn.Parameter(xavier(heads, head_dim, head_dim))
        self.key = nn.Parameter(xavier(heads, head_dim, head_dim))
        self.weight = nn.Parameter(xavier(heads, head_dim, 1))

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """The scores, (B, H, N, M)."""
        q, k = q @ self.query.mT, k @ self.key.mT
        hidden = torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3))  # (B, H, N, M, D)
        return (hidden @ self.weight.unsqueeze(1)).squeeze(-1)


def xavier(heads: int, rows: int, columns: int) -> Tensor:
    """One Xavier-uniform matrix a head, (heads, rows, columns)."""
    return torch.stack([nn.init.xavier_uniform_(torch.empty(rows, columns)) for _ in range(heads)])


SCORES: dict[str, type[nn.Module]] = {
    "scaled_dot": ScaledDot,
    "model_scaled_dot": ModelScaledDot,
    "dot": DotScore,
    "cosine": Cosine,
    "bilinear": Bilinear,
    "additive": Additive,
}


def make_score(name: str, heads: int, head_dim: int) -> nn.Module:
    """The compatibility function called `name` in `SCORES`.

    Raises:
        UserError: there is none of that name.
    """
    if name not in SCORES:
        raise unknown("score", name, SCORES)
    return SCORES[name](heads, head_dim)
