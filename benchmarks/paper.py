"""The paper's models (Borji 2023), written from its formulas: the baseline of training.py.

The models are not optimised, and use no code of `kvt` that may become faster. They compute every attention map, for
`kv+pos` with a tensor of m channels. Symbols enter as one-hot vectors. Parameters have the names of `kvt.models`, so
that these models and kvt's can load each other's weights.
"""

from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvt.attention.literal import map_logits, map_sinusoid
from kvt.attention.positions import sinusoid


class PaperQKV(nn.Module):
    """softmax(α Q Kᵀ) V, (B, N, dim) → (B, N, dim)  (Borji 2023, eq. 1).

    Args:
        dim: model width.
        heads: number of heads.
        scale: factor α of the scores.
        bias: whether the projections of query, key and value have biases.
        max_len: length of the longest sequence, for `PaperKVPos`.
        pos_dim: channels m of the positional encoding of the attention map, for `PaperKVPos`.
    """

    roles = "qkv"

    def __init__(self, dim: int, heads: int, *, scale: float, bias: bool, max_len: int, pos_dim: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, scale
        self.projection = nn.ModuleDict({role: nn.Linear(dim, dim, bias=bias) for role in self.roles})
        self.output = nn.Linear(dim, dim)

    def project(self, role: str, x: Tensor) -> Tensor:
        """Return the projection for a role, "q", "k" or "v": (B, N, dim) → (B, heads, N, head_dim)."""
        return self.projection[role](x).unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def logits(self, x: Tensor) -> Tensor:
        """Return α Q Kᵀ, (B, heads, N, N)."""
        return self.project("q", x) @ self.project("k", x).transpose(-2, -1) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        values = self.logits(x).softmax(-1) @ self.project("v", x)
        return self.output(values.transpose(1, 2).flatten(2))


class PaperKV(PaperQKV):
    """softmax(α K Kᵀ) V  (Borji 2023, eq. 2)."""

    roles = "kv"

    def logits(self, x: Tensor) -> Tensor:
        """Return α K Kᵀ, (B, heads, N, N)."""
        k = self.project("k", x)
        return k @ k.transpose(-2, -1) * self.scale


class PaperKVPos(PaperKV):
    """softmax(Linear_{m→1}(α K Kᵀ · 1_m + P)) V  (Borji 2023, §2)."""

    def __init__(self, dim: int, heads: int, *, max_len: int, pos_dim: int, scale: float, bias: bool) -> None:
        super().__init__(dim, heads, scale=scale, bias=bias, max_len=max_len, pos_dim=pos_dim)
        self.register_buffer("encoding", map_sinusoid(max_len, pos_dim), persistent=False)
        self.to_logit = nn.Linear(pos_dim, 1)

    def logits(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        positions: Tensor = self.get_buffer("encoding")[:n, :n]
        return map_logits(super().logits(x), positions, self.to_logit.weight, self.to_logit.bias)


PAPER: dict[str, type[PaperQKV]] = {"qkv": PaperQKV, "kv": PaperKV, "kv+pos": PaperKVPos}


class Residual(nn.Module):
    """A layer with a norm, a dropout and a residual connection."""

    def __init__(self, dim: int, layer: nn.Module, dropout: float) -> None:
        super().__init__()
        self.norm, self.layer, self.dropout = nn.LayerNorm(dim), layer, nn.Dropout(dropout)


class PreNorm(Residual):
    """x + Drop(f(LN(x)))."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.layer(self.norm(x)))


class PostNorm(Residual):
    """LN(x + Drop(f(x)))."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.dropout(self.layer(x)))


def encoder(
    depth: int,
    residual: type[Residual],
    make_attention: Callable[[], nn.Module],
    *,
    dim: int,
    hidden: int,
    activation: type[nn.Module],
    dropout: float,
) -> nn.Sequential:
    """Return residual blocks of attention and a feed-forward network, dim → hidden → activation → Drop → dim."""

    def block() -> nn.Sequential:
        feed_forward = nn.Sequential(nn.Linear(dim, hidden), activation(), nn.Dropout(dropout), nn.Linear(hidden, dim))
        layers = {"attention": make_attention(), "feed_forward": feed_forward}
        return nn.Sequential(OrderedDict((name, residual(dim, layer, dropout)) for name, layer in layers.items()))

    return nn.Sequential(*(block() for _ in range(depth)))


class PaperLists(nn.Module):
    """The model of lists (Borji 2023, §3.1): int64 (B, N) → logits (B, N, symbols).

    α = 1/√(dim / heads), m = 10, post-norm, FF = dim → 2 dim → ReLU → Drop → dim.
    """

    def __init__(
        self, attn: str, *, symbols: int, length: int, dim: int, depth: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.symbols = symbols
        self.embed = nn.Linear(symbols, dim)
        self.register_buffer("positions", sinusoid(length, dim), persistent=False)
        self.encoder = encoder(
            depth,
            PostNorm,
            lambda: PAPER[attn](dim, heads, scale=(dim // heads) ** -0.5, bias=True, max_len=length, pos_dim=10),
            dim=dim,
            hidden=2 * dim,
            activation=nn.ReLU,
            dropout=dropout,
        )
        self.head = nn.Sequential(
            nn.Linear(dim, dim), nn.LayerNorm(dim), nn.ReLU(), nn.Dropout(dropout), nn.Linear(dim, symbols)
        )

    def forward(self, symbols: Tensor) -> Tensor:
        one_hot = F.one_hot(symbols, self.symbols).to(self.embed.weight.dtype)
        x = self.embed(one_hot) + self.get_buffer("positions")[: symbols.shape[1]]
        return self.head(self.encoder(x))


class PaperViT(nn.Module):
    """The model of images (Borji 2023, §3.2): (B, channels, side, side) → logits (B, classes).

    α = 1/√dim, m = 50, pre-norm, FF = dim → dim → GELU → dim, a class token, learned positions, no dropout.
    """

    def __init__(
        self, attn: str, *, channels: int, side: int, classes: int, patch: int, dim: int, depth: int, heads: int
    ) -> None:
        super().__init__()
        self.patch, tokens = patch, (side // patch) ** 2 + 1
        self.embed = nn.Linear(channels * patch**2, dim)
        self.class_token = nn.Parameter(torch.randn(dim))
        self.positions = nn.Parameter(torch.randn(tokens, dim))
        self.encoder = encoder(
            depth,
            PreNorm,
            lambda: PAPER[attn](dim, heads, scale=dim**-0.5, bias=False, max_len=tokens, pos_dim=50),
            dim=dim,
            hidden=dim,
            activation=nn.GELU,
            dropout=0.0,
        )
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, classes))

    def forward(self, images: Tensor) -> Tensor:
        tiles = images.unflatten(-1, (-1, self.patch)).unflatten(-3, (-1, self.patch))  # (B, C, rows, p, columns, p)
        patches = tiles.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)  # (B, patches, p · p · C)
        class_token = self.class_token.expand(len(images), 1, -1)
        x = torch.cat([class_token, self.embed(patches)], dim=1) + self.positions
        return self.head(self.encoder(x)[:, 0])
