"""Transformer layers and stacks, built from any attention."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from kvt.attention import KVCache
from kvt.attention.dropout import Dropout
from kvt.system.errors import require_positive
from kvt.system.memory import footprint, require_memory

MakeAttention = Callable[[int], nn.Module]
"""From the width of the model to a self-attention layer, as `kvt.attention.AttentionFactory` is."""


class FeedForward(nn.Sequential):
    """The position-wise network: dim → hidden → activation → dropout → dim. Shapes (B, N, dim) → (B, N, dim)."""

    def __init__(self, dim: int, hidden: int, activation: type[nn.Module], dropout: float = 0.0) -> None:
        super().__init__(nn.Linear(dim, hidden), activation(), Dropout(dropout), nn.Linear(hidden, dim))


class Residual(nn.Module):
    """A layer f with a norm, a dropout and a way around it; `PreNorm` and `PostNorm` say in which order.

    Shapes (B, N, dim) → (B, N, dim); keyword arguments go to the layer.
    """

    def __init__(self, dim: int, layer: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.layer, self.dropout = nn.LayerNorm(dim), layer, Dropout(dropout)


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
        attention: self-attention, in `PreNorm` or `PostNorm`.
        feed_forward: the position-wise network, likewise.
    """

    def __init__(self, attention: Residual, feed_forward: Residual) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward

    def forward(self, x: Tensor, **attend: Any) -> Tensor:
        """(B, N, dim) → (B, N, dim); `attend` (mask, causal, cache) goes to the attention."""
        return self.feed_forward(self.attention(x, **attend))


class Stack(nn.ModuleList):
    """Blocks of one kind, each on top of the one before.

    Args:
        depth: how many.
        make_block: makes the next.

    Raises:
        UserError: the depth is not positive, or there is no memory for so many.
    """

    def __init__(self, depth: int, make_block: Callable[[], nn.Module]) -> None:
        require_positive(depth=depth)
        first = make_block()
        require_memory((depth - 1) * footprint(first), f"depth={depth}")
        super().__init__([first, *(make_block() for _ in range(depth - 1))])


class Encoder(Stack):
    """A stack of `EncoderBlock`s; causal, it is the decoder of a language model."""

    def forward(self, x: Tensor, caches: Sequence[KVCache] | None = None, **attend: Any) -> Tensor:
        """(B, N, dim) → (B, N, dim); `caches` has one for each block."""
        for block, cache in self._with(caches):
            x = block(x, **cache, **attend)
        return x

    def forward_token(self, x: Tensor, token: int, caches: Sequence[KVCache] | None = None, **attend: Any) -> Tensor:
        """What `forward` makes of one token, (B, dim), without what nobody would read of the others."""
        *blocks, (last, last_cache) = self._with(caches)
        for block, cache in blocks:
            x = block(x, **cache, **attend)
        assert isinstance(last, EncoderBlock)
        return last.feed_forward(last.attention(x, **last_cache, **attend)[:, token])

    def _with(self, caches: Sequence[KVCache] | None) -> list[tuple[nn.Module, dict[str, KVCache]]]:
        kept: list[dict[str, KVCache]] = [{"cache": cache} for cache in caches] if caches else [{}] * len(self)
        return [*zip(self, kept, strict=True)]


class DecoderBlock(nn.Module):
    """Causal self-attention, attention to what was read, a feed-forward network, each in a residual connection.

    Args:
        attention: self-attention, in `PreNorm` or `PostNorm`.
        cross_attention: attention with a query of its own, likewise.
        feed_forward: the position-wise network, likewise.
    """

    def __init__(self, attention: Residual, cross_attention: Residual, feed_forward: Residual) -> None:
        super().__init__()
        self.attention, self.cross_attention, self.feed_forward = attention, cross_attention, feed_forward

    def forward(
        self, x: Tensor, memory: Tensor, memory_mask: Tensor, caches: tuple[KVCache, KVCache] | None = None
    ) -> Tensor:
        """(B, N, dim), the memory (B, M, dim), which of it may be looked at (B, 1, 1, M) → (B, N, dim)."""
        cache, memory_cache = caches or (None, None)
        # no mask for padding: it stands behind a sentence, where causal attention does not look
        x = self.attention(x, causal=True, cache=cache)
        x = self.cross_attention(x, context=memory, mask=memory_mask, cache=memory_cache)
        return self.feed_forward(x)


class Decoder(Stack):
    """A stack of `DecoderBlock`s."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        memory_mask: Tensor,
        caches: Sequence[tuple[KVCache, KVCache]] | None = None,
    ) -> Tensor:
        """(B, N, dim) → (B, N, dim); `caches` has two for each block, of x and of the memory."""
        for layer, block in enumerate(self):
            x = block(x, memory, memory_mask, caches[layer] if caches else None)
        return x
