"""What every attention does: project, score, softmax, mix, output."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvt.attention.cache import KVCache
from kvt.attention.dropout import dropout
from kvt.attention.scores import DotScore, make_score
from kvt.system.errors import UserError, require_positive, require_probability

SMALL_MAP = {"highest": 96, "high": 256, "medium": 256}
"""Rows and columns of a map, up to which a processor makes it rather than call its fused kernel, by the setting of
matrix products: measured in docs/performance.md. The kernel of the processor has no dropout, so it gains nothing there.
"""
MOST_PROPOSED = 64
"""The greatest number of heads that an error proposes: to look at all would take as long as the width is great."""


class Attention(nn.Module):
    """Multi-head attention whose roles (query, key, value) may share projections.

    For each head,  A = softmax(gain · score(Q, K) + bias) V,  the heads concatenated and projected
    (Borji 2023, eq. 1 and 2). `projections` names the projection that plays query, key and value: "qkv" is
    the usual attention, "kkv" lets the keys ask. Each named projection exists, and is computed, once.

    A variant says `projections`, or overrides `project`, `gain_and_bias` or `attention_weights`.

    Masks are boolean and True means "may attend". A query that may attend to nothing gets zeros.

    Args:
        dim: width of the model; `heads` must divide it.
        heads: number of attention maps.
        kv_heads: number of key and value heads, each shared by heads / kv_heads queries (grouped-query
            attention; 1 is multi-query); default: `heads`. Where the key also asks, the heads of a
            group share one map, since they share the one tensor it is made of.
        score: compatibility function, a name in `kvt.attention.scores.SCORES`.
        dropout: probability of dropping an attention weight while training.
        bias: whether the projections to query, key and value have a bias.
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
        """Lets every token of x attend to the context, or to x itself.

        Args:
            x: (B, N, dim).
            context: (B, M, dim): cross-attention, whatever its length. Needs a variant with its own query.
            mask: boolean, (B, heads, N, M), any of which may be 1.
            causal: a token attends to itself and its past only.
            cache: past keys and values, to which those of x are added: M counts them all, and the tokens
                of x are the last N of them. With a context: its keys and values, made by the first call only.

        Returns:
            (B, N, dim).

        Raises:
            UserError: a mask of another shape or dtype.
        """
        q, k, v = map(self._all_heads, self._project_once(x, context, cache))
        require_mask(mask, q, k)
        mixed = self.attend(q, k, v, mask, causal)
        return self.output(mixed.transpose(1, 2).flatten(2))  # (B, N, heads · head_dim)

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value: (B, heads or kv_heads, N or M, head_dim) each; a shared one is the same tensor.

        Raises:
            UserError: a context for a variant without a query of its own.
        """
        if context is not None and self.projections[0] != "q":
            raise UserError(f"{type(self).__name__} has no query of its own to look at a context with: use QKV there")
        source = x if context is None else context
        made = {name: self._project_heads(name, x if name == "q" else source) for name in self.projection}
        q, k, v = (made[name] for name in self.projections)
        return q, k, v

    def gain_and_bias(self, n: int, m: int) -> tuple[Tensor | None, Tensor | None]:
        """What turns the score into the logits, gain · score + bias: here neither.

        Args:
            n: number of queries, the last of the m positions.
            m: number of keys.

        Returns:
            The gain, broadcastable to (B, heads, 1, 1), and the bias, to (B, heads, n, m). A bias of one row,
            (…, 1, m), belongs to the keys alone and costs no n × m tensor.
        """
        return None, None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """softmax(logits) V, (B, heads, N, head_dim), through the fused kernel where the score is a dot product.

        A column bias rides along as one more channel, scale · [gain·q, 1/scale] · [k, c], so that no map is ever made:
        except where maps are small and the processor multiplies matrices faster than its fused kernel.
        """
        p = self.dropout if self.training else 0.0
        n, m = q.shape[-2], k.shape[-2]
        overrides = (
            type(self).attention_weights is not Attention.attention_weights or type(self).logits is not Attention.logits
        )
        if overrides or not isinstance(self.score, DotScore):
            return dropout(self.attention_weights(q, k, mask, causal), p) @ v
        q, k = self.score.features(q, k)
        gain, bias = self.gain_and_bias(n, m)
        of_keys = bias is None or bias.shape[-2] == 1
        limit = SMALL_MAP[torch.get_float32_matmul_precision()]
        if of_keys and q.device.type == "cpu" and (n == 1 or max(n, m) <= limit):
            return dropout(_softmax(_logits(q, k, self.score.scale, gain, bias), mask, causal), p) @ v
        if gain is not None:
            q = q * gain.to(q.dtype)
        # the kernel's own flag aligns queries with the first keys, and takes no mask beside it
        kernel_causal = causal and mask is None and n == m and of_keys
        allowed = None if kernel_causal else allowed_pairs(n, m, mask, causal, q.device)
        if bias is None:
            return F.scaled_dot_product_attention(q, k, v, allowed, p, is_causal=kernel_causal, scale=self.score.scale)
        bias = bias.to(q.dtype)
        if not of_keys:
            logit_mask = bias if allowed is None else bias.masked_fill(~allowed, float("-inf"))
            return F.scaled_dot_product_attention(q, k, v, logit_mask, p, scale=self.score.scale)
        # one channel more; on a GPU up to a multiple of 8, which the fused kernels want there
        more = 1 if q.device.type == "cpu" else 8 - self.head_dim % 8
        q, v = F.pad(q, (0, more), value=1 / self.score.scale), F.pad(v, (0, more))
        k = torch.cat([k, F.pad(bias.mT, (0, more - 1)).expand(*k.shape[:-1], more)], dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v, allowed, p, is_causal=kernel_causal, scale=self.score.scale)
        return mixed[..., : self.head_dim]

    def attention_weights(self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """The attention map softmax(logits), (B, heads, N, M), made explicitly."""
        return _softmax(self.logits(q, k), mask, causal)

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """gain · score(q, k) + bias, (B, heads, N, M)."""
        gain, bias = self.gain_and_bias(q.shape[-2], k.shape[-2])
        if isinstance(self.score, DotScore):
            return _logits(*self.score.features(q, k), self.score.scale, gain, bias)
        logits = self.score(q, k)
        logits = logits if gain is None else logits * gain
        return logits if bias is None else logits + bias

    def weights(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        cache: KVCache | None = None,
    ) -> Tensor:
        """The attention maps that `forward` uses for the same arguments, without dropout: (B, heads, N, M).

        The cache holds no more tokens afterwards than before.
        """
        q, k = self._query_and_key(x, context, cache)
        require_mask(mask, q, k)
        return self.attention_weights(q, k, mask, causal)

    def scores(self, x: Tensor, context: Tensor | None = None, *, cache: KVCache | None = None) -> Tensor:
        """What the maps of `weights` are a softmax of, before any mask: (B, heads, N, M)."""
        return self.logits(*self._query_and_key(x, context, cache))

    @property
    def has_logits(self) -> bool:
        """Whether the maps are a softmax of `logits`: not where a variant overrides `attention_weights`."""
        return type(self).attention_weights is Attention.attention_weights

    def init_xavier(self) -> None:
        """Draws all projections anew: Xavier-uniform weights, zero biases. The default is that of nn.Linear."""
        for linear in [*self.projection.values(), self.output]:
            assert isinstance(linear, nn.Linear)
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def _project_once(self, x: Tensor, context: Tensor | None, cache: KVCache | None) -> tuple[Tensor, Tensor, Tensor]:
        """Query of x; key and value of all that it may look at, what the cache holds of them taken from there."""
        if context is not None and cache is not None and cache.length:
            return self._project_heads("q", x), *cache.read()
        q, k, v = self.project(x, context)
        return (q, k, v) if cache is None else (q, *cache.append(k, v))

    def _query_and_key(self, x: Tensor, context: Tensor | None, cache: KVCache | None) -> tuple[Tensor, Tensor]:
        """Those of `forward`, of all heads; the cache holds no more tokens afterwards than before."""
        length = cache.length if cache is not None else 0
        q, k, _ = self._project_once(x, context, cache)
        if cache is not None:
            cache.length = length
        return self._all_heads(q), self._all_heads(k)

    def _project_heads(self, name: str, x: Tensor) -> Tensor:
        """One of the projections, its heads apart: (B, N, dim) → (B, heads, N, head_dim)."""
        return self.projection[name](x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _all_heads(self, t: Tensor) -> Tensor:
        """Repeats grouped heads: (B, kv_heads, N, D) → (B, heads, N, D)."""
        return t if t.shape[1] == self.heads else t.repeat_interleave(self.heads // t.shape[1], dim=1)


def require_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> None:
    """Checks the type and shape of a mask for queries (B, heads, N, D) and keys (B, heads, M, D).

    Raises:
        UserError: it is not boolean, or not of shape (B, heads, N, M).
    """
    if mask is None:
        return
    shape = (*q.shape[:3], k.shape[2])
    fits = mask.ndim == 4 and all(size in (1, full) for size, full in zip(mask.shape, shape, strict=True))
    if mask.dtype != torch.bool or not fits:
        raise UserError(
            f"mask of {mask.dtype}, {tuple(mask.shape)}: expected torch.bool, (B, heads, N, M) = {shape} or 1 in place "
            "of any, True where a query may attend to a key: write mask[:, None, None] for (B, M), mask[None, None] "
            "for (N, M), mask == 0 for numbers that would be added"
        )


def allowed_pairs(n: int, m: int, mask: Tensor | None, causal: bool, device: torch.device) -> Tensor | None:
    """Which of the last n of m positions may attend to which of all m; None where all may.

    Returns:
        Boolean, broadcastable to (B, heads, n, m).
    """
    if not causal or n == 1:  # the newest token may look at all there is
        return mask
    past = torch.ones(n, m, dtype=torch.bool, device=device).tril(m - n)
    return past if mask is None else past & mask


def _logits(q: Tensor, k: Tensor, scale: float, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    """gain · scale · q kᵀ + bias, (B, heads, N, M); a bias of the keys is added within the product."""
    if q.shape[-2] > 1:  # heads are strided views of a projection: copied once here, else in every product
        q, k = (k.contiguous(),) * 2 if q is k else (q.contiguous(), k.contiguous())
    q = q * (scale if gain is None else (gain * scale).to(q.dtype))
    if bias is None:
        return q @ k.mT
    if bias.shape[-2] > 1:
        return q @ k.mT + bias
    batch, heads = q.shape[:2]
    if bias.shape[:-2].numel() > 1:
        bias = bias.expand(batch, heads, 1, -1)
    bias = bias.to(q.dtype).reshape(-1, 1, bias.shape[-1])
    return torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT).unflatten(0, (batch, heads))


def _softmax(logits: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """The map of these logits, (B, heads, N, M)."""
    n, m = logits.shape[-2:]
    allowed = allowed_pairs(n, m, mask, causal, logits.device)
    if allowed is None:
        return logits.softmax(-1)
    # a finite fill, so that a row without any key has no NaN in it or in its gradient
    weights = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min).softmax(-1)
    return weights if mask is None else weights.masked_fill(~allowed, 0.0)  # the past always has a key


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, min(number, MOST_PROPOSED) + 1) if number % d == 0)
