"""Transformer layers and stacks, built from any attention."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

MakeAttention = Callable[[int], nn.Module]
"""From the width of the model to a self-attention layer, as `kvt.attention.AttentionFactory` is."""


class FeedForward(nn.Sequential):
    """The position-wise network: dim → hidden → activation → dropout → dim. Shapes (B, N, dim) → (B, N, dim)."""

    def __init__(self, dim: int, hidden: int, activation: type[nn.Module], dropout: float = 0.0) -> None:
        super().__init__(nn.Linear(dim, hidden), activation(), nn.Dropout(dropout), nn.Linear(hidden, dim))


class Residual(nn.Module):
    """A layer f with a norm, a dropout and a way around it; `PreNorm` and `PostNorm` say in which order.

    Shapes (B, N, dim) → (B, N, dim); keyword arguments go to the layer.
    """

    def __init__(self, dim: int, layer: nn.Module, dropout: float) -> None:
        super().__init__()
        self.norm, self.layer, self.dropout = nn.LayerNorm(dim), layer, nn.Dropout(dropout)


class PreNorm(Residual):
    """x + Drop(f(LN(x)))."""

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """See the formula."""
        return x + self.dropout(self.layer(self.norm(x), **kwargs))


class PostNorm(Residual):
    """LN(x + Drop(f(x))), as in the first transformer."""

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """See the formula."""
        return self.norm(x + self.dropout(self.layer(x, **kwargs)))


class EncoderBlock(nn.Module):
    """Self-attention, then a feed-forward network, each in a residual connection.

    Args:
        dim: width.
        make_attention: makes the self-attention.
        feed_forward: the position-wise network.
        residual: `PreNorm` or `PostNorm`.
        dropout: of both residual branches.
    """

    def __init__(
        self,
        dim: int,
        make_attention: MakeAttention,
        feed_forward: nn.Module,
        residual: type[Residual],
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention = residual(dim, make_attention(dim), dropout)
        self.feed_forward = residual(dim, feed_forward, dropout)

    def forward(self, x: Tensor, **attend: Any) -> Tensor:
        """(B, N, dim) → (B, N, dim); `attend` (mask, causal, cache) goes to the attention."""
        return self.feed_forward(self.attention(x, **attend))


class Encoder(nn.ModuleList):
    """A stack of `EncoderBlock`s."""

    def forward(self, x: Tensor, **attend: Any) -> Tensor:
        """(B, N, dim) → (B, N, dim)."""
        for block in self:
            x = block(x, **attend)
        return x
