"""Fast implementations of dropout, masked softmax and softmax(gain · scale · Q Kᵀ + bias) V.

Boolean masks are True where a query may attend to a key. If kv_heads < heads, the query heads i · group to
(i + 1) · group − 1 use key head i and value head i, where group = heads / kv_heads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvt import tune as hardware
from kvt.system import UserError

SMALL_MAP = {False: 96, True: 256}  # on CPUs, explicit maps are fastest up to so many tokens; key: `tune.fast_products`
ONE_QUERY = 4096  # with one query, a CPU's fused kernel is faster up to this many entries of the attention maps
_explicit = False


@contextmanager
def explicit_maps() -> Iterator[None]:
    """Context manager that replaces fused kernels by explicit attention maps, whose operations can be counted.

    Attention with a bias of shape (…, N, M), N > 1, still calls a fused kernel.
    """
    global _explicit
    before, _explicit = _explicit, True
    try:
        yield
    finally:
        _explicit = before


class Dropout(nn.Dropout):
    """Dropout as in torch, but three times as fast on a CPU.

    On a CPU, each random number of 64 bits gives four mask entries, and p is rounded to a multiple of 2⁻¹⁶ below 1.
    """

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training else x


def dropout(x: Tensor, p: float) -> Tensor:
    """Apply `Dropout` in training mode, with p in [0, 1)."""
    if x.device.type != "cpu":
        return F.dropout(x, p)
    dropped = min(round(p * 2**16), 2**16 - 1)
    if not dropped:
        return x
    bits = x.new_empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    # compare in place, which gives integers 0 and 1: making and converting booleans takes five times as long
    kept = bits.view(torch.int16)[: x.numel()].view(x.shape).ge_(dropped - 2**15)
    return x * kept.to(x.dtype).mul_(2**16 / (2**16 - dropped))


def repeat_groups(t: Tensor, heads: int) -> Tensor:
    """Repeat each key head, or value head, for the query heads of its group: (B, kv_heads, M, D) → (B, heads, M, D)."""
    return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], dim=1)


def product(x: Tensor, y: Tensor) -> Tensor:
    """Multiply (B, heads, N, D) by (B, kv_heads, D, M) without copies of shared heads; return (B, heads, N, M)."""
    heads, kv_heads = x.shape[1], y.shape[1]
    if heads == kv_heads:
        return x @ y
    rows = x.unflatten(1, (kv_heads, -1)).flatten(2, 3)  # (B, kv_heads, group · N, D)
    return (rows @ y).unflatten(2, (heads // kv_heads, -1)).flatten(1, 2)


def require_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> None:
    """Raise UserError unless the mask is None, or boolean of shape (B, heads, N, M), where any size may be 1."""
    if mask is None:
        return
    shape = (*q.shape[:3], k.shape[2])
    fits = mask.ndim == 4 and all(size in (1, full) for size, full in zip(mask.shape, shape, strict=True))
    if fits and not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise UserError(f"mask of {mask.dtype}: pass mask.bool(), which is True where a query may attend to a key")
    if mask.dtype != torch.bool or not fits:
        raise UserError(
            f"mask of {mask.dtype}, {tuple(mask.shape)}: expected torch.bool, (B, heads, N, M) = {shape}; any size "
            "may be 1; True where a query may attend to a key. Write mask[:, None, None] for a mask of shape (B, M), "
            "mask[None, None] for (N, M), and bias=mask for numbers to add to the logits"
        )


def split_mask(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Split an additive mask into booleans (False at −inf) and finite numbers. Any other mask gives (mask, None)."""
    if mask is None or mask.dtype == torch.bool:
        return mask, None
    allowed = mask > float("-inf")
    return allowed, mask.masked_fill(~allowed, 0.0)


def allowed_pairs(
    num_queries: int, num_keys: int, mask: Tensor | None, causal: bool, device: torch.device
) -> Tensor | None:
    """Return `mask`, combined with a causal mask if `causal`; None allows all pairs. Queries are the last tokens."""
    if not causal or num_queries == 1:  # a single query belongs to the last token, which may attend to all keys
        return mask
    past = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
    return past if mask is None else past & mask


def own_pairs(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Return a mask, (N, M), True where query and key are of the same token. Queries have the last N of M positions."""
    last = num_keys - num_queries
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(last).triu(last)


def without_self(num_queries: int, num_keys: int, mask: Tensor | None, causal: bool, device: torch.device) -> Tensor:
    """Return `allowed_pairs` without pairs of a query and its own token, except where `leave_out` keeps them."""
    own = own_pairs(num_queries, num_keys, device)
    allowed = allowed_pairs(num_queries, num_keys, mask, causal, device)
    return leave_out(own, torch.ones_like(own) if allowed is None else allowed)


def leave_out(own: Tensor, allowed: Tensor) -> Tensor:
    """Return `allowed`, (…, N, M), without pairs in `own`, except for queries that may attend to no other token."""
    others = allowed & ~own
    return others | (allowed & ~others.any(-1, keepdim=True))


def masked_softmax(logits: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Return the attention map of logits, (B, heads, N, M); `mask` may be additive. Rows without allowed keys are 0."""
    mask, added = split_mask(mask)
    logits = logits if added is None else logits + added.to(logits.dtype)
    allowed = allowed_pairs(logits.shape[-2], logits.shape[-1], mask, causal, logits.device)
    if allowed is None:
        return logits.softmax(-1)
    # a finite number: with −inf, the value and the gradient of a row without allowed keys would be NaN
    weights = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min).softmax(-1)
    # with only a causal mask, every row has an allowed key unless there are more queries than keys
    leaves_none = mask is not None or logits.shape[-2] > logits.shape[-1]
    return weights.masked_fill(~allowed, 0.0) if leaves_none else weights


def dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    attend_self: bool,
    *,
    scale: float,
    gain: Tensor | None,
    bias: Tensor | None,
    p: float,
) -> Tensor:
    """Return softmax(gain · scale · q kᵀ + bias) v, (B, heads, N, D), with dropout p, by the fastest implementation.

    Queries are (B, heads, N, D), keys and values (B, kv_heads, M, D). `mask` is boolean, or numbers that are added to
    the logits. With `causal`, a query attends only to its own token and to earlier tokens. If `attend_self` is False,
    the query's own token is excluded, as in `without_self`. `gain` is broadcastable to (B, heads, 1, 1), and `bias` to
    (B, heads, N, M). None means a gain of 1, or a bias of 0.
    """
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    mask, added = split_mask(mask)
    if added is not None:
        bias = added if bias is None else bias + added
    if not attend_self and causal and mask is None:
        return _earlier_tokens(q, k, v, scale=scale, gain=gain, bias=bias, p=p)
    if not attend_self:
        mask, causal = without_self(num_queries, num_keys, mask, causal, q.device), False
    pair_bias = bias is not None and bias.shape[-2] > 1
    on_cpu, grouped = q.device.type == "cpu", bool(k.shape[1] < q.shape[1])  # sizes are tensors in torch.jit.trace
    limit = SMALL_MAP[hardware.fast_products] if on_cpu else 0
    # `small` chooses the explicit map, for which `product` reads shared keys once for all heads of a group
    if _explicit:
        small = True
    elif num_queries == 1 and on_cpu:  # the explicit map has second derivatives: use it with gradients
        small = torch.is_grad_enabled() or q.shape[0] * q.shape[1] * num_keys > ONE_QUERY
        if bias is not None and not small:
            pair_bias, bias = True, bias.expand(*q.shape[:2], 1, num_keys)  # a bias with three dimensions is not fused
    else:
        small = (num_queries == 1 and grouped) or max(num_queries, num_keys) <= limit
    if small and not pair_bias:
        return product(dropout(masked_softmax(_key_bias_logits(q, k, scale, gain, bias), mask, causal), p), v)
    if grouped and not (on_cpu and (bias is None or pair_bias)):
        # some fused kernels of GPUs do not support groups; a bias (…, 1, M) can differ by head, and becomes part of k
        k, v, grouped = repeat_groups(k, q.shape[1]), repeat_groups(v, q.shape[1]), False
    fused = partial(F.scaled_dot_product_attention, dropout_p=p, scale=scale, enable_gqa=grouped)
    if gain is not None:
        q = q * gain.to(q.dtype)
    # the fused kernel's causal flag aligns the queries with the first keys, and cannot be combined with a mask
    kernel_causal = causal and mask is None and not pair_bias and bool(num_queries == num_keys)  # not a SymBool
    allowed = None if kernel_causal else allowed_pairs(num_queries, num_keys, mask, causal, q.device)
    if bias is None:
        output = fused(q, k, v, allowed, is_causal=kernel_causal)
    elif pair_bias:  # the fused kernel accepts the bias as its additive mask
        bias = bias.to(q.dtype)
        output = fused(q, k, v, bias if allowed is None else bias.masked_fill(~allowed, float("-inf")))
    else:
        # a bias (…, 1, M) becomes a channel of q and k: scale · q kᵀ + bias = scale · [q, 1/scale] · [k, bias]ᵀ;
        # v gets zeros to the same width; on a GPU, zeros pad k and v to a multiple of 8, as fused kernels require
        width = v.shape[-1]
        more = 1 if q.device.type == "cpu" else 8 - q.shape[-1] % 8
        q, v = F.pad(q, (0, more), value=1 / scale), F.pad(v, (0, more))
        k = torch.cat([k, F.pad(bias.to(q.dtype).mT, (0, more - 1)).expand(*k.shape[:-1], more)], dim=-1)
        output = fused(q, k, v, allowed, is_causal=kernel_causal)[..., :width]
    return output


def _earlier_tokens(q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None, p: float, **settings: Any) -> Tensor:
    """Return causal attention in which every token but the first attends only to earlier tokens.

    The first token attends to itself. The other queries get causal attention without the last key: the last query, at
    token n, is then aligned with the key of token n − 1.
    """
    first = int(q.shape[-2] == k.shape[-2])  # 1 if the first token is among the queries
    own = dropout(v.new_ones(*q.shape[:2], first, 1), p) * repeat_groups(v[..., :first, :], q.shape[1])
    if k.shape[-2] == 1:
        return own
    if bias is not None:
        bias = bias[..., first if bias.shape[-2] > 1 else 0 :, :-1]
    q, k, v = q[..., first:, :], k[..., :-1, :], v[..., :-1, :]
    others = dot_product_attention(q, k, v, None, True, True, bias=bias, p=p, **settings)
    return torch.cat([own, others], dim=-2)


def _key_bias_logits(q: Tensor, k: Tensor, scale: float, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return gain · scale · q kᵀ + bias, (B, heads, N, M), where `bias` is None or of shape (…, 1, M)."""
    if q.shape[-2] > 1:  # products would copy q and k, which are strided views: one copy here serves all
        q, k = (k.contiguous(),) * 2 if q is k else (q.contiguous(), k.contiguous())
    q = q * (scale if gain is None else (gain * scale).to(q.dtype))
    batch, heads = q.shape[:2]
    if bias is None:
        return product(q, k.mT)
    if k.shape[1] < heads:  # rows of one product belong to several heads, whose biases differ
        return product(q, k.mT) + bias.to(q.dtype)
    if bias.shape[:-2].numel() > 1:
        bias = bias.expand(batch, heads, 1, -1)
    bias = bias.to(q.dtype).reshape(-1, 1, bias.shape[-1])
    return torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT).unflatten(0, (batch, heads))
