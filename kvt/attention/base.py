"""The base class of kvt's attention layers, which include their input and output projections."""

import re
from copy import copy
from typing import ClassVar

from torch import Tensor, nn

from kvt.attention.cache import KVCache
from kvt.attention.kernels import (
    dot_product_attention,
    dropout,
    masked_softmax,
    product,
    repeat_groups,
    require_mask,
    split_mask,
    without_self,
)
from kvt.attention.rotary import Rotary
from kvt.attention.scores import SCORES, DotScore
from kvt.system import UserError, require_choice, require_positive, require_probability

ATTENTION: dict[str, type["Attention"]] = {}  # classes by their names in `--attn`


class Attention(nn.Module):
    """Multi-head attention in which query, key and value may share projections.

    Each head computes  softmax(gain · score(Q, K) + bias) V,  by default with gain 1 and bias 0 (`gain_and_bias`). The
    outputs of all heads are concatenated and projected (Borji 2023, eq. 1 and 2). The three letters of `projections`
    name the layers that compute query, key and value: "qkv" is the usual attention; with "kkv", the key projection also
    computes the queries.

    A subclass, called a variant, may set `projections`, and may override methods such as `query`, `project`, `rotate`,
    `gain_and_bias`, `logits`, `attention_weights`, `attend` and `merge`.

    Args:
        dim: model width, a multiple of `heads`.
        heads: number of attention heads.
        kv_heads: number of key heads and of value heads, a divisor of `heads`. A group of heads / kv_heads query heads
            shares a key and value head (grouped-query attention; multi-query if `kv_heads` is 1). Default: `heads`.
        score: name of the function that computes scores, a key of `kvt.attention.scores.SCORES`.
        dropout: probability of dropping an attention weight in training.
        bias: whether the query, key and value projections have a bias.
        output_bias: whether the output projection has a bias.
        rope: fraction of a head's channels that `Rotary` rotates in queries and keys; not used in cross-attention. The
            number of rotated channels must be even.
        rope_base: base of the rotation frequencies (see `Rotary`).
        attend_self: False means that in self-attention, a token attends to itself only if it may attend to no other
            token (Kitaev et al. 2020, "Reformer"). False raises UserError if `attention_weights` is overridden.
    """

    projections: ClassVar[str] = "qkv"
    label: ClassVar[str]  # name of the attention in reports
    colour: ClassVar[str]  # colour in figures, from the palettes of Okabe and Ito or Tol for colour-blind readers
    formula: ClassVar[str]  # first line of the docstring of the class, up to the first colon

    def __init_subclass__(cls, *, name: str | None = None, label: str = "", colour: str = "") -> None:
        """With a `name`, add the subclass to `ATTENTION`, and set label, colour and (from its docstring) formula."""
        super().__init_subclass__()
        if name:
            cls.label, cls.colour, cls.formula = label, colour, re.split("[:\n]", cls.__doc__ or "", maxsplit=1)[0]
            ATTENTION[name] = cls

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        score: str = "scaled_dot",
        dropout: float = 0.0,
        bias: bool = True,
        output_bias: bool = True,
        rope: float = 0.0,
        rope_base: float = 10_000.0,
        attend_self: bool = True,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        require_positive(dim=dim, heads=heads, kv_heads=kv_heads)
        for name, number, whole, size in (("heads", heads, "dim", dim), ("kv_heads", kv_heads, "heads", heads)):
            if size % number:
                divisors = ", ".join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)
                raise UserError(f"{name}={number} must divide {whole}={size}: choose {name} from {divisors}")
        require_probability(dropout=dropout)
        require_choice("score", score, SCORES)
        if not (attend_self or self.has_logits):
            raise UserError(f"attend_self=False: {type(self).__name__} has no logits: leave attend_self at True")
        self.dim, self.heads, self.kv_heads, self.head_dim, self.dropout = dim, heads, kv_heads, dim // heads, dropout
        self.widths = dict.fromkeys("qkv", self.head_dim)  # for each projection: output channels per head
        self.attend_self, self.borrows_keys = attend_self, False
        self.rotary = Rotary(rope, self.head_dim, rope_base)
        self.projection = nn.ModuleDict(
            {
                name: nn.Linear(dim, self.head_dim * (heads if name == "q" else kv_heads), bias=bias)
                for name in sorted(set(self.projections))
            }
        )
        self.score = SCORES[score](heads, self.head_dim)
        self.output = nn.Linear(dim, dim, bias=output_bias)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        cache: KVCache | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Let every token of x attend to the context, or to x if there is no context: (B, N, dim) → (B, N, dim).

        Args:
            x: tokens, (B, N, dim).
            context: tokens that x attends to in cross-attention, (B, M, dim). A context needs a query projection.
            mask: boolean, (B, heads, N, M), or with size 1 in any dimension. An entry is True if the query may attend
                to the key. If a query may attend to no key, the output projection gets zeros for this query.
            causal: whether a token attends only to itself and to earlier tokens. The tokens of x have the last N of the
                M positions. If N > M, the first N − M tokens attend to no key.
            cache: keys and values of earlier tokens. The call appends the keys and values of x, and M is the number of
                cached tokens including x. With a context, the first call caches the keys and values of the context, and
                later calls read them. After `borrow_keys`, a cache is required, and the call only reads it: a lower
                layer must have appended keys and values for the tokens of x.
            bias: numbers to add to the logits, of the shapes allowed for `mask`. If an entry is −inf, the query does
                not attend to the key. A variant that overrides `attention_weights` or `attend` ignores finite entries.
        """
        start = self._start(x, cache)
        q, k, v = self._heads(x, context, cache)
        attend_self = self.attend_self or context is not None
        return self.merge(self.attend(q, k, v, self._mask(q, k, mask, bias), causal, attend_self), start, x)

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value; raise UserError if there is a context but no query projection.

        A query projection returns (B, heads, N, head_dim). Any other projection returns (B, kv_heads, M, head_dim),
        where M is the length of the context, or N if there is no context.
        """
        if context is not None and self.projections[0] != "q":
            raise UserError(f"{type(self).__name__} has no query projection, which a context needs: use QKV instead")
        source = x if context is None else context
        projected = {
            name: self.query(x) if name == "q" else self._project_heads(name, source)
            for name in sorted({*self.projections})
        }
        q, k, v = (projected[name] for name in self.projections)
        return q, k, v

    def query(self, x: Tensor) -> Tensor:
        """Apply the query projection, for variants that have one: (B, N, dim) → (B, heads, N, head_dim)."""
        return self._project_heads("q", x)

    def borrow_keys(self) -> None:
        """Remove the key and value projections. The layer then uses the cached keys and values of a lower layer.

        Raises UserError if the variant has no query projection.
        """
        if self.projections[0] != "q":
            raise UserError(f"share_layers: {type(self).__name__} has no query projection: use qkv, q-kv or mla")
        for name in {*self.projections[1:]}:
            del self.projection[name]
        self.borrows_keys = True

    def rotate(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Apply `Rotary` to query and key, whose first token has position `start`; return query, key and value."""
        key = self.rotary(k, start)
        return key if q is k else self.rotary(q, start), key, v

    def merge(self, values: Tensor, start: int, x: Tensor | None = None) -> Tensor:
        """Concatenate the heads and apply the output projection: (B, heads, N, head_dim) → (B, N, dim).

        Subclasses may use `start`, in self-attention the position of the first token, and `x`, the layer's input.
        """
        return self.output(values.transpose(1, 2).flatten(2))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, attend_self: bool = True
    ) -> Tensor:
        """Return the product of attention map and values, (B, heads, N, head_dim), with dropout of the map in training.

        Keys and values are (B, kv_heads, M, head_dim). `mask` is None, boolean, or, if the class overrides neither
        `attend` nor `attention_weights`, numbers to add to the logits.
        """
        p = self.dropout if self.training else 0.0
        own_logits = not self.has_logits or type(self).logits is not Attention.logits
        hooked = self.score._forward_hooks or self.score._forward_pre_hooks  # only a call of the score runs its hooks
        if own_logits or not isinstance(self.score, DotScore) or hooked:
            return product(dropout(self._map(q, k, mask, causal, attend_self), p), v)
        gain, bias = self.gain_and_bias(q.shape[-2], k.shape[-2])
        q, k = self.score.features(q, k)
        masks = (mask, causal, attend_self)
        return dot_product_attention(q, k, v, *masks, scale=self.score.scale, gain=gain, bias=bias, p=p)

    def attention_weights(self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Return the attention map, softmax(logits) over the keys that each query may attend to: (B, heads, N, M)."""
        return masked_softmax(self.logits(q, k), mask, causal)

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """Return gain · score(q, k) + bias, (B, heads, N, M)."""
        gain, bias = self.gain_and_bias(q.shape[-2], k.shape[-2])
        logits = self.score(q, k)
        logits = logits if gain is None else logits * gain
        return logits if bias is None else logits + bias

    def after_initialisation(self) -> None:
        """Set initial weights that depend on others, after all others are set. The base class does nothing here."""

    def gain_and_bias(self, num_queries: int, num_keys: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the gain and the bias of the logits; a gain of None means 1, and a bias of None means 0.

        The gain is broadcastable to (B, heads, 1, 1), and the bias to (B, heads, N, M). A bias that depends only on the
        key has shape (…, 1, M). The queries have the last `num_queries` of the `num_keys` positions.
        """
        return None, None

    def make_cache(self, max_len: int, slides: bool = False) -> KVCache:
        """Return an empty cache for at most `max_len` tokens, to pass to `forward`; `KVCache` documents `slides`."""
        return KVCache(max_len, slides)

    def weights(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        cache: KVCache | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return the attention maps of `forward` without dropout, (B, heads, N, M). The cache stays unchanged.

        Raises UserError if the variant overrides `attend` but not `attention_weights`.
        """
        if not self.has_map:
            remedy = "override attention_weights to return the map, as docs/guides/attention.md shows"
            raise UserError(f"{type(self).__name__} overrides attend, but has no map: {remedy}")
        q, k, _ = self._heads(x, context, cache and copy(cache))
        return self._map(q, k, self._mask(q, k, mask, bias), causal, self.attend_self or context is not None)

    def scores(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Return the logits without the `mask` and `bias` of `forward`, (B, heads, N, M). The cache stays unchanged."""
        q, k, _ = self._heads(x, context, copy(cache))
        return self.logits(q, repeat_groups(k, q.shape[1]))

    @property
    def has_map(self) -> bool:
        """Whether the layer can return attention maps: False if it overrides `attend` but not `attention_weights`."""
        return not self.has_logits or type(self).attend is Attention.attend

    @property
    def has_logits(self) -> bool:
        """Whether attention maps are the softmax of `logits`: False if the variant overrides `attention_weights`."""
        return type(self).attention_weights is Attention.attention_weights

    def _heads(
        self,
        x: Tensor,
        context: Tensor | None,
        cache: KVCache | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, (B, heads, N, head_dim), and k and v, (B, kv_heads, M, head_dim).

        If there is a `cache`, k and v are all that it contains. The keys and values of this call are first appended to
        it, unless the layer borrows keys or the cache already holds those of the context.
        """
        for name, tokens in (("x", x), ("context", context)):
            if tokens is not None and (tokens.ndim != 3 or tokens.shape[-1] != self.dim):
                raise UserError(f"{name} of shape {tuple(tokens.shape)}: expected (B, N, {self.dim})")
        if cache is not None and (self.borrows_keys or (context is not None and cache.length)):
            q, (k, v) = self.query(x), cache.read()
            if context is None:
                q, *_ = self.rotate(q, q, q, self._start(x, cache))
        else:
            q, k, v = self.project(x, context)
            if context is None:
                q, k, v = self.rotate(q, k, v, self._start(x, cache))
            if cache is not None:
                k, v = cache.append(k, v)
        return q if self.projections[0] == "q" else self._repeat_groups(q), k, v

    def _mask(self, q: Tensor, k: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
        """Return one mask: numbers if there is a `bias` and the variant adds it to logits, else booleans or None."""
        require_mask(mask, q, k)
        if bias is None:
            return mask
        allowed = bias > float("-inf")
        require_mask(allowed, q, k)
        if self.has_logits and type(self).attend is Attention.attend:
            return bias if mask is None else bias.masked_fill(~mask, float("-inf"))
        return allowed if mask is None else allowed & mask

    def _start(self, x: Tensor, cache: KVCache | None) -> int:  # position of the first token in self-attention
        # a layer that borrows keys gets a cache to which a lower layer has already appended the tokens of x
        return cache.length - self.borrows_keys * x.shape[1] if cache else 0

    def _map(self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, attend_self: bool) -> Tensor:
        if not attend_self:
            allowed, added = split_mask(mask)
            allowed, causal = without_self(q.shape[-2], k.shape[-2], allowed, causal, q.device), False
            mask = allowed if added is None else added.masked_fill(~allowed, float("-inf"))
        return self.attention_weights(q, repeat_groups(k, q.shape[1]), mask, causal)

    def _project_heads(self, name: str, x: Tensor) -> Tensor:  # (B, N, dim) → (B, heads or kv_heads, N, head_dim)
        return self.projection[name](x).unflatten(-1, (-1, self.widths[name])).transpose(1, 2)

    def _repeat_groups(self, t: Tensor) -> Tensor:  # (B, kv_heads, N, D) → (B, heads, N, D)
        return repeat_groups(t, self.heads)
