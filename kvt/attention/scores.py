"""Functions that compute a score for each pair of a query and a key."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DotScore(nn.Module):
    """s_ij = scale · f(q_i) · g(k_j): a dot product of features. In this class, f(x) = g(x) = x, and scale is 1.

    `forward` maps queries (B, H, N, D) and keys (B, H, M, D) to scores (B, H, N, M). `features` also accepts keys of
    groups of heads, (B, kv_heads, M, D), for fast kernels.
    """

    scale = 1.0

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return f(q) and g(k)."""
        return q, k

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        q, k = self.features(q, k)
        return self.scale * q @ k.mT


class ScaledDot(DotScore):
    """s_ij = q_i · k_j / √D, where D is the number of channels of a head (Vaswani et al. 2017, eq. 1)."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__(heads, head_dim)
        self.scale = head_dim**-0.5


class ModelScaledDot(DotScore):
    """s_ij = q_i · k_j / √(H·D), where H·D is the model width, as in Borji's code for images and characters."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__(heads, head_dim)
        self.scale = (heads * head_dim) ** -0.5


class Cosine(DotScore):
    """s_ij = q_i · k_j / (‖q_i‖ ‖k_j‖), between −1 and 1."""

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(q, dim=-1), F.normalize(k, dim=-1)


class Bilinear(DotScore):
    """s_ij = q_i · W k_j, where each head has a learned matrix W, (D, D) (score "general", Luong et al. 2015, §3.1)."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__(heads, head_dim)
        self.weight = nn.Parameter(xavier(heads, head_dim, head_dim))

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if k.shape[1] < q.shape[1]:  # q · W k = Wᵀ q · k: heads can share keys if W is applied to q
            return q @ self.weight, k
        return q, k @ self.weight.mT


class Additive(nn.Module):
    """s_ij = a · tanh(U q_i + W k_j) (Bahdanau et al. 2015, A.1.2).

    Each head learns a vector a, (D), and matrices U and W, (D, D). `forward` needs memory in proportion to N · M · D.
    """

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.query = nn.Parameter(xavier(heads, head_dim, head_dim))
        self.key = nn.Parameter(xavier(heads, head_dim, head_dim))
        self.weight = nn.Parameter(xavier(heads, head_dim, 1))

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        q, k = q @ self.query.mT, k @ self.key.mT
        hidden = torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3))  # (B, H, N, M, D)
        return (hidden @ self.weight.unsqueeze(1)).squeeze(-1)


def xavier(heads: int, rows: int, columns: int) -> Tensor:  # (heads, rows, columns)
    return torch.stack([nn.init.xavier_uniform_(torch.empty(rows, columns)) for _ in range(heads)])


SCORES: dict[str, type[nn.Module]] = {
    "scaled_dot": ScaledDot,
    "model_scaled_dot": ModelScaledDot,
    "dot": DotScore,
    "cosine": Cosine,
    "bilinear": Bilinear,
    "additive": Additive,
}
