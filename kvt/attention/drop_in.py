"""Attention with the interface of `torch.nn.MultiheadAttention`."""

from typing import Any

import torch
from torch import Tensor, nn

from kvt.attention.base import Attention
from kvt.attention.factory import AttentionFactory
from kvt.system.errors import UserError


class _NotAWeight:
    """A stand-in for torch's weights that keeps nn.TransformerEncoder from its fast path.

    That path would convert padded input to a nested tensor, and compute torch's attention. The encoder does not take it
    if a weight has a `__torch_function__`.
    """

    weight = bias = __torch_function__ = None


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

    in_proj_weight = out_proj = _NotAWeight()
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

    @classmethod
    def from_torch(cls, layer: nn.MultiheadAttention, attn: str = "qkv", **settings: Any) -> "MultiheadAttention":
        """Return a layer with the weights of a trained layer of torch; with "qkv" it computes the same.

        Another attention gets the projections that it has: "kv" keeps those of keys and values, and drops the queries.

        Raises:
            UserError: if the layer has key or value widths of its own, bias_kv or zero_attn.
        """
        if layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn:
            raise UserError("a MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn has no equal here")
        bias = layer.in_proj_bias is not None
        shape = {"batch_first": layer.batch_first, "attn": attn, **settings}
        made = cls(layer.embed_dim, layer.num_heads, layer.dropout, bias, **shape)
        if not isinstance(made.attention, Attention) or made.attention.kv_heads != layer.num_heads:
            raise UserError(f"attn {attn!r} with {settings} has other projections than torch's: take one of all heads")
        parts = {"weight": layer.in_proj_weight} | ({"bias": layer.in_proj_bias} if bias else {})
        theirs = {name: dict(zip("qkv", part.chunk(3), strict=True)) for name, part in parts.items()}
        made.to(layer.in_proj_weight)
        for role, projection in made.attention.projection.items():
            projection.load_state_dict({name: part[role] for name, part in theirs.items()})
        made.attention.output.load_state_dict(layer.out_proj.state_dict())
        return made.train(layer.training)

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

        Masks mean what they mean in torch: True, or −inf in place of 0, where a query may NOT attend. With `is_causal`
        and N = M, `attn_mask` is not read and may be None. A query that may attend to no key gets zeros, not NaN.
        """
        if key is not value:
            raise UserError("key and value must be the same tensor: the key and value projections have one input")
        if query.is_nested:
            raise UserError("nested tensors are not supported: make the encoder with enable_nested_tensor=False")
        batch = 0 if self.batch_first else 1
        for name, t in (("query", query), ("key", key)):
            if t.ndim != 3 or (t.shape[batch], t.shape[2]) != (query.shape[batch], self.embed_dim):
                size = ("B, N" if self.batch_first else "N, B") + f", {self.embed_dim}"
                raise UserError(f"{name} of shape {tuple(t.shape)}: expected ({size}), with one B for query and key")
        x, context = query.transpose(0, batch), None if key is query else key.transpose(0, batch)
        (b, n, _), m = x.shape, key.shape[1 - batch]
        causal = is_causal and n == m  # else `Attention` would align the last query with the last key, torch the first
        if is_causal and not causal and attn_mask is None:
            raise UserError(f"is_causal with {n} queries and {m} keys: pass an attn_mask, too")
        mask = None
        if key_padding_mask is not None:
            mask = _allowed("key_padding_mask", key_padding_mask, (b, m))[:, None, None]  # (B, 1, 1, M)
        if attn_mask is not None and not causal:
            pairs = _allowed("attn_mask", attn_mask, (n, m), (b * self.num_heads, n, m))
            pairs = pairs.view(b if pairs.ndim == 3 else 1, -1, n, m)  # (B or 1, heads or 1, N, M)
            mask = pairs if mask is None else mask & pairs
        output = self.attention(x, context, mask=mask, causal=causal).transpose(0, batch)
        if not (need_weights and isinstance(self.attention, Attention)):
            return output, None
        weights = self.attention.weights(x, context, mask=mask, causal=causal)
        return output, weights.mean(1) if average_attn_weights else weights


def _allowed(name: str, mask: Tensor, *shapes: tuple[int, ...]) -> Tensor:
    """Return a mask of torch's as a boolean one, True where a query may attend."""
    if mask.shape not in shapes:
        raise UserError(f"{name} of shape {tuple(mask.shape)}: expected {' or '.join(map(str, shapes))}")
    if mask.dtype == torch.bool:
        return ~mask
    if not ((mask == 0) | (mask == float("-inf"))).all():
        raise UserError("a mask of numbers may only hold 0 and -inf: add other biases by overriding gain_and_bias")
    return mask == 0
