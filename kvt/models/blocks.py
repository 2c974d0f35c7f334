"""Transformer blocks and stacks of blocks, for any attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kvt.attention import Attention, AttentionFactory, KVCache
from kvt.attention.cache import OnePass
from kvt.attention.kernels import Dropout
from kvt.system import UserError, require_choice, require_positive

MakeAttention = Callable[[int], nn.Module]  # a function from a width to a layer, such as an `AttentionFactory`


def factory_of(attention: str | MakeAttention, heads: int | None, max_len: int | None) -> Any:
    """Return `attention`. For a name or an import path, return an `AttentionFactory`; UserError if `heads` is None."""
    if not isinstance(attention, str):
        return attention
    if heads is None:
        raise UserError(f"heads is missing: pass the number of heads beside the name {attention!r}")
    return AttentionFactory(attention, heads=heads, max_len=max_len)


class FeedForward(nn.Sequential):
    """Position-wise feed-forward network: dim → hidden → activation → dropout → dim."""

    def __init__(self, dim: int, hidden: int, activation: type[nn.Module], dropout: float = 0.0) -> None:
        super().__init__(nn.Linear(dim, hidden), activation(), Dropout(dropout), nn.Linear(hidden, dim))


class Residual(nn.Module):
    """Base class of a layer f with norm, dropout and residual connection; f gets the keyword arguments of `forward`."""

    def __init__(self, dim: int, layer: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.layer, self.dropout = nn.LayerNorm(dim), layer, Dropout(dropout)

    def change(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Return Drop(f(x)); raise UserError if f(x) and x differ in shape, because x + f(x) might broadcast."""
        change = self.layer(x, **kwargs)
        if getattr(change, "shape", None) != x.shape:
            name, found = type(self.layer).__name__, tuple(getattr(change, "shape", ())) or type(change).__name__
            raise UserError(f"{name}.forward must return a tensor of the input's shape, {tuple(x.shape)}, not {found}")
        return self.dropout(change)


class PreNorm(Residual):
    """Pre-norm residual connection: x + Drop(f(LN(x)))."""

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return x + self.change(self.norm(x), **kwargs)


class PostNorm(Residual):
    """Post-norm residual connection: LN(x + Drop(f(x))), as in Vaswani et al. 2017."""

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.norm(x + self.change(x, **kwargs))


NORMS: dict[str, type[Residual]] = {"pre": PreNorm, "post": PostNorm}


class TanhGELU(nn.GELU):
    """GPT-2's approximation of GELU: x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))."""

    def __init__(self) -> None:
        super().__init__(approximate="tanh")


ACTIVATIONS: dict[str, type[nn.Module]] = {
    **{"relu": nn.ReLU, "gelu": nn.GELU, "gelu_tanh": TanhGELU, "silu": nn.SiLU, "tanh": nn.Tanh}
}
# With float alone, the command-line parser would turn 4 into 4.0, and runs recorded with 4 would get other names.
Expansion = int | float


@dataclass(frozen=True)
class BlockStyle:
    """Settings of the layer norms and feed-forward networks of a model, named like their command-line flags.

    Args:
        norm: position of the layer norm in a residual connection, a key of `NORMS`.
        activation: activation function of the feed-forward networks, a key of `ACTIVATIONS`.
        expansion: hidden width of the feed-forward networks divided by the model width; 0 omits these networks.
    """

    norm: str = "pre"
    activation: str = "relu"
    expansion: Expansion = 4

    def __post_init__(self) -> None:
        require_choice("norm", self.norm, NORMS)
        require_choice("activation", self.activation, ACTIVATIONS)
        if not 0 <= self.expansion < inf:
            raise UserError(f"expansion={self.expansion} must be 0 or more")

    def residual(self, dim: int, layer: nn.Module, dropout: float = 0.0) -> Residual:
        """Return `layer` with layer norm, dropout and a residual connection."""
        return NORMS[self.norm](dim, layer, dropout)

    def feed_forward(self, dim: int, dropout: float = 0.0, hidden_dropout: float = 0.0) -> nn.Module:
        """Return a feed-forward network with a residual connection, or the identity if `expansion` is 0."""
        if not self.expansion:
            return nn.Identity()
        hidden = max(1, round(self.expansion * dim))
        return self.residual(dim, FeedForward(dim, hidden, ACTIVATIONS[self.activation], hidden_dropout), dropout)


STYLE = BlockStyle()  # the default of the language models and of the translation model


class EncoderBlock(nn.Module):
    """Self-attention and a feed-forward network, each with a residual connection."""

    def __init__(self, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward

    def forward(self, x: Tensor, token: int | None = None, **attend: Any) -> Tensor:
        """Apply the block: (B, N, dim) → (B, N, dim), or (B, dim) at index `token`; pass `attend` to the attention."""
        x = self.attention(x, **attend)
        return self.feed_forward(x if token is None else x[:, token])


class Stack(nn.ModuleList):
    """A list of `depth` blocks, made by `make_block`."""

    def __init__(self, depth: int, make_block: Callable[[], nn.Module]) -> None:
        require_positive(depth=depth)
        super().__init__(make_block() for _ in range(depth))


def stacks_of(model: nn.Module) -> list[Stack]:
    """Return all `Stack` modules of a model, including the model if it is a `Stack`."""
    return [module for module in model.modules() if isinstance(module, Stack)]


class Encoder(Stack):
    """A stack of `EncoderBlock` modules.

    `share_layers` is the number of consecutive layers in a group. Only the first layer of a group computes keys and
    values. All layers of the group attend to these keys and values (Brandon et al. 2024, "Cross-Layer Attention"). Each
    group has one cache.

    If `recomputes` is True, training stores only the input of each group (activation checkpointing).
    """

    recomputes = False

    def __init__(self, depth: int, make_block: Callable[[], nn.Module], share_layers: int = 1) -> None:
        require_positive(share_layers=share_layers)
        super().__init__(depth, make_block)
        self.share_layers = share_layers
        for place, block in enumerate(self):
            if place % share_layers:
                attention = block.get_submodule("attention.layer")
                if not isinstance(attention, Attention):
                    raise UserError(f"share_layers: {type(attention).__name__} is not a kvt.attention.Attention")
                attention.borrow_keys()

    def forward(
        self, x: Tensor, caches: Sequence[KVCache] | None = None, *, token: int | None = None, **attend: Any
    ) -> Tensor:
        """Apply all blocks: (B, N, dim) → (B, N, dim), or (B, dim) at index `token`; `caches` has one per group."""
        again, blocks = self.recomputes and self.training, list(self)
        for group, first in enumerate(range(0, len(blocks), self.share_layers)):
            members = blocks[first : first + self.share_layers]
            arguments = attend | ({"cache": caches[group]} if caches else {})  # a user's attention may lack `cache`
            if token is not None and members[-1] is blocks[-1]:
                arguments["token"] = token
            if again:
                x = checkpoint(_apply, members, x, use_reentrant=False, **arguments)
            else:
                x = _apply(members, x, **arguments)
        return x


def _apply(group: Sequence[nn.Module], x: Tensor, token: int | None = None, **attend: Any) -> Tensor:
    if len(group) > 1 and "cache" not in attend:
        attend["cache"] = OnePass()
    for block in group[:-1]:
        x = block(x, **attend)
    y: Tensor = group[-1](x, token, **attend)
    return y


def make_cache(block: nn.Module, max_len: int, slides: bool = False) -> KVCache:
    """Return an empty cache for the self-attention of a block."""
    cache: KVCache = getattr(block.get_submodule("attention.layer"), "make_cache", KVCache)(max_len, slides)
    return cache


class DecoderBlock(nn.Module):
    """Causal self-attention, cross-attention to a memory and a feed-forward network, each in a residual branch."""

    def __init__(self, attention: nn.Module, cross_attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention, self.cross_attention, self.feed_forward = attention, cross_attention, feed_forward

    def forward(
        self, x: Tensor, memory: Tensor, memory_mask: Tensor, caches: tuple[KVCache, KVCache] | None = None
    ) -> Tensor:
        """Apply the block to target tokens: (B, N, dim) → (B, N, dim).

        `memory` contains encoded source tokens, (B, M, dim). `memory_mask`, boolean (B, 1, 1, M), is True where target
        tokens may attend to the source token. `caches` contains the caches of self-attention and of cross-attention.
        """
        cache, memory_cache = caches or (None, None)
        # no padding mask is needed: padding follows the sentence, and causal attention ignores later positions
        x = self.attention(x, causal=True, cache=cache)
        x = self.cross_attention(x, context=memory, mask=memory_mask, cache=memory_cache)
        return self.feed_forward(x)


class Decoder(Stack):
    """A stack of `DecoderBlock` modules."""

    def forward(
        self, x: Tensor, memory: Tensor, memory_mask: Tensor, caches: Sequence[tuple[KVCache, KVCache]] | None = None
    ) -> Tensor:
        for layer, block in enumerate(self):
            x = block(x, memory, memory_mask, caches[layer] if caches else None)
        return x
