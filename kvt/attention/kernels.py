"""Fast ways to compute softmax(gain · scale · Q Kᵀ + bias) V, equal to the formula of `Attention` up to rounding."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvt.attention.dropout import dropout
from kvt.attention.masks import allowed_pairs, masked_softmax

SMALL_MAP = {"highest": 96, "high": 256, "medium": 256}
"""The most queries and keys for which a CPU computes the map explicitly, by `torch.get_float32_matmul_precision()`.

Up to there, matrix products are faster than the fused kernel (docs/performance.md).
"""


def dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    gain: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    dropout_p: float,
) -> Tensor:
    """Return softmax(gain · scale · q kᵀ + bias) v, (B, heads, N, head_dim), by the fastest kernel for its size.

    Args:
        q: (B, heads, N, head_dim); k and v: (B, heads, M, head_dim).
        gain: broadcastable to (B, heads, 1, 1).
        bias: broadcastable to (B, heads, N, M); (…, 1, M) is a bias of the keys alone.
    """
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    pair_bias = bias is not None and bias.shape[-2] > 1
    limit = SMALL_MAP[torch.get_float32_matmul_precision()]
    if not pair_bias and q.device.type == "cpu" and (num_queries == 1 or max(num_queries, num_keys) <= limit):
        weights = masked_softmax(key_bias_logits(q, k, scale, gain, bias), mask, causal)
        return dropout(weights, dropout_p) @ v
    if gain is not None:
        q = q * gain.to(q.dtype)
    if bias is not None and pair_bias:
        return fused_pair_bias(q, k, v, scale, bias, mask, causal, dropout_p)
    return fused_key_bias(q, k, v, scale, bias, mask, causal, dropout_p)


def key_bias_logits(q: Tensor, k: Tensor, scale: float, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return gain · scale · q kᵀ + bias, (B, heads, N, M), adding the bias of the keys within the matrix product."""
    if q.shape[-2] > 1:  # heads are strided views of a projection: copied once here, else in every product
        q, k = (k.contiguous(),) * 2 if q is k else (q.contiguous(), k.contiguous())
    q = q * (scale if gain is None else (gain * scale).to(q.dtype))
    if bias is None:
        return q @ k.mT
    batch, heads = q.shape[:2]
    if bias.shape[:-2].numel() > 1:
        bias = bias.expand(batch, heads, 1, -1)
    bias = bias.to(q.dtype).reshape(-1, 1, bias.shape[-1])
    return torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT).unflatten(0, (batch, heads))


def fused_key_bias(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None, causal: bool, p: float
) -> Tensor:
    """Return softmax(scale · q kᵀ + bias) v through torch's fused kernel, which never stores the map.

    The bias of the keys, (…, 1, M), becomes one more channel: scale · q kᵀ + bias = scale · [q, 1/scale] · [k, bias]ᵀ.
    """
    # the kernel's own causal flag aligns queries with the first keys, and excludes a mask
    kernel_causal = causal and mask is None and q.shape[-2] == k.shape[-2]
    allowed = None if kernel_causal else allowed_pairs(q.shape[-2], k.shape[-2], mask, causal, q.device)
    if bias is None:
        return F.scaled_dot_product_attention(q, k, v, allowed, p, is_causal=kernel_causal, scale=scale)
    head_dim = q.shape[-1]
    # on a GPU up to a multiple of 8 channels, which the fused kernels require there
    more = 1 if q.device.type == "cpu" else 8 - head_dim % 8
    q, v = F.pad(q, (0, more), value=1 / scale), F.pad(v, (0, more))
    k = torch.cat([k, F.pad(bias.to(q.dtype).mT, (0, more - 1)).expand(*k.shape[:-1], more)], dim=-1)
    output = F.scaled_dot_product_attention(q, k, v, allowed, p, is_causal=kernel_causal, scale=scale)
    return output[..., :head_dim]


def fused_pair_bias(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor, mask: Tensor | None, causal: bool, p: float
) -> Tensor:
    """Return softmax(scale · q kᵀ + bias) v with a bias of pairs, (…, N, M), as the fused kernel's additive mask."""
    bias = bias.to(q.dtype)
    allowed = allowed_pairs(q.shape[-2], k.shape[-2], mask, causal, q.device)
    bias = bias if allowed is None else bias.masked_fill(~allowed, float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, bias, p, scale=scale)
