"""Multi-head attention as its formula: project, score, softmax, weighted values, output."""

from typing import ClassVar

from torch import Tensor, nn

from kvt.attention.cache import KVCache
from kvt.attention.dropout import dropout
from kvt.attention.kernels import dot_product_attention
from kvt.attention.masks import masked_softmax, require_mask
from kvt.attention.scores import DotScore, make_score
from kvt.system.errors import UserError, require_positive, require_probability

MAX_LISTED_DIVISOR = 64  # divisors listed in an error message: finding all takes time that grows with the number


class Attention(nn.Module):
    """Multi-head attention whose roles (query, key, value) may share projections.

    For each head,  softmax(gain · score(Q, K) + bias) V;  the heads are concatenated and projected
    (Borji 2023, eq. 1 and 2). `projections` names the projection behind query, key and value: "qkv" is the usual
    attention, in "kkv" the keys also act as queries. A shared projection exists, and is computed, once.

    A variant sets `projections`, or overrides `project`, `gain_and_bias`, `logits` or `attention_weights`.

    Masks are boolean, True where a query may attend to a key. A query that may attend to no key gets zeros.

    Args:
        dim: model width; `heads` must divide it.
        heads: number of attention maps.
        kv_heads: number of key and value heads, each shared by heads / kv_heads queries (grouped-query
            attention; 1 is multi-query); default: `heads`. Where keys act as queries, the heads of a group have
            the same map.
        score: compatibility function, a name in `kvt.attention.scores.SCORES`.
        dropout: probability of dropping an attention weight in training.
        bias: whether the query, key and value projections have a bias.
        output_bias: whether the output projection has one.

    Raises:
        UserError: sizes that do not divide, an unknown score, a probability outside [0, 1).
    """

    projections: ClassVar[str] = "qkv"

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
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        require_positive(dim=dim, heads=heads, kv_heads=kv_heads)
        if dim % heads:
            raise UserError(f"heads={heads} must divide dim={dim}: choose heads from {_divisors(dim)}")
        if heads % kv_heads:
            raise UserError(f"kv_heads={kv_heads} must divide heads={heads}: choose from {_divisors(heads)}")
        require_probability(dropout=dropout)
        self.heads, self.kv_heads, self.head_dim, self.dropout = heads, kv_heads, dim // heads, dropout
        self.projection = nn.ModuleDict(
            {
                name: nn.Linear(dim, self.head_dim * (heads if name == "q" else kv_heads), bias=bias)
                for name in sorted(set(self.projections))
            }
        )
        self.score = make_score(score, heads, self.head_dim)
        self.output = nn.Linear(dim, dim, bias=output_bias)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Let every token of x attend to the context, or to x itself: (B, N, dim) → (B, N, dim).

        Args:
            x: (B, N, dim).
            context: (B, M, dim), for cross-attention; only for variants with a query projection.
            mask: boolean, (B, heads, N, M), any of which may be 1.
            causal: whether a token attends only to itself and its past.
            cache: past keys and values, to which those of x are appended: M counts all of them, and the tokens of x
                are the last N. With a context: its keys and values, computed by the first call only.

        Raises:
            UserError: a mask of another shape or dtype.
        """
        q, k, v = self._heads(x, context, cache)
        require_mask(mask, q, k)
        values = self.attend(q, k, v, mask, causal)  # (B, heads, N, head_dim)
        return self.output(values.transpose(1, 2).flatten(2))

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, (B, heads or kv_heads, N or M, head_dim); shared ones are the same tensor.

        Raises:
            UserError: a context for a variant without a query projection.
        """
        if context is not None and self.projections[0] != "q":
            raise UserError(f"{type(self).__name__} has no query projection to attend to a context with: use QKV there")
        source = x if context is None else context
        projected = {name: self._project_heads(name, x if name == "q" else source) for name in self.projection}
        q, k, v = (projected[name] for name in self.projections)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Return the values weighted by the attention map, (B, heads, N, head_dim); by a fast kernel if there is one.

        The kernels need a dot-product score, and neither `logits` nor `attention_weights` overridden.
        """
        p = self.dropout if self.training else 0.0
        if not (self.has_logits and type(self).logits is Attention.logits and isinstance(self.score, DotScore)):
            return dropout(self.attention_weights(q, k, mask, causal), p) @ v
        gain, bias = self.gain_and_bias(q.shape[-2], k.shape[-2])
        q, k = self.score.features(q, k)
        return dot_product_attention(
            q, k, v, scale=self.score.scale, gain=gain, bias=bias, mask=mask, causal=causal, dropout_p=p
        )

    def attention_weights(self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Return the attention map softmax(logits), (B, heads, N, M)."""
        return masked_softmax(self.logits(q, k), mask, causal)

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """Return gain · score(q, k) + bias, (B, heads, N, M)."""
        gain, bias = self.gain_and_bias(q.shape[-2], k.shape[-2])
        logits = self.score(q, k)
        logits = logits if gain is None else logits * gain
        return logits if bias is None else logits + bias

    def gain_and_bias(self, num_queries: int, num_keys: int) -> tuple[Tensor | None, Tensor | None]:
        """Return gain and bias of the logits; None stands for 1 and 0. The queries are the last of the positions.

        Returns:
            The gain, broadcastable to (B, heads, 1, 1), and the bias, to (B, heads, N, M). A bias of shape (…, 1, M)
            belongs to the keys alone and costs no N × M tensor.
        """
        return None, None

    def weights(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Return the attention maps of `forward` without dropout, (B, heads, N, M); the cache keeps its length."""
        q, k = self._query_and_key(x, context, cache)
        require_mask(mask, q, k)
        return self.attention_weights(q, k, mask, causal)

    def scores(self, x: Tensor, context: Tensor | None = None, *, cache: KVCache | None = None) -> Tensor:
        """Return the logits of the maps of `weights`, before any mask: (B, heads, N, M)."""
        return self.logits(*self._query_and_key(x, context, cache))

    @property
    def has_logits(self) -> bool:
        """Whether the maps are a softmax of `logits`: not if a variant overrides `attention_weights`."""
        return type(self).attention_weights is Attention.attention_weights

    def init_xavier(self) -> None:
        """Redraw all projections: Xavier-uniform weights, zero biases."""
        for linear in [*self.projection.values(), self.output]:
            assert isinstance(linear, nn.Linear)
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def _heads(self, x: Tensor, context: Tensor | None, cache: KVCache | None) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of all heads, (B, heads, N or M, head_dim), past ones taken from the cache."""
        if context is not None and cache is not None and cache.length:
            q, (k, v) = self._project_heads("q", x), cache.read()
        else:
            q, k, v = self.project(x, context)
            if cache is not None:
                k, v = cache.append(k, v)
        return self._repeat_groups(q), self._repeat_groups(k), self._repeat_groups(v)

    def _query_and_key(self, x: Tensor, context: Tensor | None, cache: KVCache | None) -> tuple[Tensor, Tensor]:
        length = cache.length if cache is not None else 0
        q, k, _ = self._heads(x, context, cache)
        if cache is not None:
            cache.length = length
        return q, k

    def _project_heads(self, name: str, x: Tensor) -> Tensor:
        """(B, N, dim) → (B, heads or kv_heads, N, head_dim)."""
        return self.projection[name](x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _repeat_groups(self, t: Tensor) -> Tensor:
        """(B, kv_heads, N, D) → (B, heads, N, D)."""
        return t if t.shape[1] == self.heads else t.repeat_interleave(self.heads // t.shape[1], dim=1)


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, min(number, MAX_LISTED_DIVISOR) + 1) if number % d == 0)
