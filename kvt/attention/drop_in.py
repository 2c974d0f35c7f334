"""Attention with the interface of `torch.nn.MultiheadAttention`."""

from typing import Any

import torch
from torch import Tensor, nn

from kvt.attention.base import Attention
from kvt.attention.factory import AttentionFactory
from kvt.system.errors import UserError


class MultiheadAttention(nn.Module):
    """Any attention of this package in place of `torch.nn.MultiheadAttention`.

    >>> block = nn.TransformerEncoderLayer(8, nhead=2, batch_first=True)
    >>> block.self_attn = MultiheadAttention(8, 2, attn="kv", batch_first=True)
    >>> block(torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])

    Args:
        embed_dim, num_heads, dropout, bias, batch_first: as in torch.
        attn: variant, a name in `ATTENTION` or an import path.
        max_len: length of the longest sequence, for variants with positions.
        settings: further arguments of the variant, such as score="cosine".
    """

    in_proj_bias, _qkv_same_embed_dim = None, False  # keep nn.TransformerEncoderLayer from its fused inference path

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        batch_first: bool = False,
        attn: str = "kv",
        max_len: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        self.attention = AttentionFactory(
            attn, settings, heads=num_heads, dropout=dropout, bias=bias, output_bias=bias, max_len=max_len
        )(embed_dim)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, like `query`, and the attention weights without dropout, (B, N, M) or (B, heads, N, M).

        Masks mean what they mean in torch: True, or −inf in place of 0, where a query may NOT attend. With `is_causal`,
        `attn_mask` is not read. A query that may attend to no key gets zeros, not NaN.
        """
        if key is not value:
            raise UserError("key and value must be the same tensor: the key and value projections have one input")
        x, context = query, None if key is query else key
        if not self.batch_first:
            x, context = x.transpose(0, 1), None if context is None else context.transpose(0, 1)
        mask = None if key_padding_mask is None else _allowed(key_padding_mask)[:, None, None]  # (B, 1, 1, M)
        if attn_mask is not None and not is_causal:
            pairs = _allowed(attn_mask)  # (N, M) or (B · heads, N, M)
            pairs = pairs[None, None] if pairs.ndim == 2 else pairs.unflatten(0, (-1, self.num_heads))
            mask = pairs if mask is None else mask & pairs
        output = self.attention(x, context, mask=mask, causal=is_causal)
        output = output if self.batch_first else output.transpose(0, 1)
        if not (need_weights and isinstance(self.attention, Attention)):
            return output, None
        weights = self.attention.weights(x, context, mask=mask, causal=is_causal)
        return output, weights.mean(1) if average_attn_weights else weights


def _allowed(mask: Tensor) -> Tensor:
    """Return a mask of torch's as a boolean one, True where a query may attend."""
    if mask.dtype == torch.bool:
        return ~mask
    if not ((mask == 0) | (mask == float("-inf"))).all():
        raise UserError("a mask of numbers may only hold 0 and -inf: add other biases by overriding gain_and_bias")
    return mask == 0
