"""Attention with the interface of `torch.nn.MultiheadAttention`."""

from typing import Any, Never

import torch
from torch import Tensor, nn

from kvt.attention.base import Attention
from kvt.attention.factory import AttentionFactory
from kvt.system import UserError


class MultiheadAttention(nn.Module):
    """Any attention of kvt with the interface of `torch.nn.MultiheadAttention`.

    >>> block = nn.TransformerEncoderLayer(8, nhead=2, batch_first=True)
    >>> block.self_attn = MultiheadAttention(8, 2, attn="kv", batch_first=True)
    >>> block(torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])

    Args:
        embed_dim, num_heads, dropout, bias, batch_first: as in torch.nn.MultiheadAttention.
        attn: a name in `ATTENTION`, or the import path of an attention class.
        max_len: length of the longest sequence, required if the class is a `MapPosition`, such as "kv+pos".
        settings: further arguments of the attention class, such as score="cosine".
    """

    in_proj_bias, _qkv_same_embed_dim = None, False  # torch's encoder layer then calls `forward`, not its fused kernel

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
        self.embed_dim, self.num_heads, self.batch_first, self.attn = embed_dim, num_heads, batch_first, attn
        given = {"heads": num_heads, "dropout": dropout, "bias": bias, "output_bias": bias, "max_len": max_len}
        self.attention = AttentionFactory(attn, settings, **given)(embed_dim)

    @property
    def in_proj_weight(self) -> Never:
        """Raise UserError. An encoder made before `self_attn` was replaced reads this in eval mode for padded input."""
        remedy = "replace self_attn before you make nn.TransformerEncoder, or pass enable_nested_tensor=False"
        raise UserError(f"kvt.MultiheadAttention has no in_proj_weight: {remedy}")

    @classmethod
    def from_torch(cls, layer: nn.MultiheadAttention, attn: str = "qkv", **settings: Any) -> "MultiheadAttention":
        """Return a layer with the weights of a trained torch layer.

        With "qkv" and no `settings`, both layers compute the same outputs. The weights of a projection that the
        attention lacks are dropped: "kv" drops the query projection. Raises UserError for a `layer` with `add_bias_kv`,
        `add_zero_attn`, or a `kdim` or `vdim` other than `embed_dim`. Also raises UserError unless the attention has
        only query, key and value projections with `embed_dim` outputs: "mla" and `kv_heads` < `num_heads` are errors.
        """
        bias, width = layer.in_proj_bias is not None, layer.embed_dim
        sizes = width, layer.num_heads, layer.dropout, bias
        made = cls(*sizes, batch_first=layer.batch_first, attn=attn, **settings).to(layer.out_proj.weight)
        roles = getattr(made.attention, "projection", {})
        fits = roles and all(name in "qkv" and part.out_features == width for name, part in roles.items())
        if not fits or layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn:
            raise UserError("from_torch takes query, key and value of embed_dim channels: use attn='qkv', 'kv' or 'k'")
        parts = {"weight": layer.in_proj_weight} | ({"bias": layer.in_proj_bias} if bias else {})
        for name, projection in roles.items():
            projection.load_state_dict({part: t.chunk(3)["qkv".index(name)] for part, t in parts.items()})
        made.attention.get_submodule("output").load_state_dict(layer.out_proj.state_dict())
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
        """Return the output, of the shape of `query`, and the attention weights.

        The weights, without dropout, are (B, N, M), averaged over heads, or (B, heads, N, M) if `average_attn_weights`
        is False. They are None if `need_weights` is False, or if the attention class is not derived from `Attention`.
        If `query` and `key` are the same tensor, the layer computes self-attention. Otherwise, it computes
        cross-attention, which ignores `rope` and `attend_self`; the attention must then accept a context. `value` must
        be `key`.

        `key_padding_mask` is (B, M), and `attn_mask` is (N, M). A boolean mask is True where a query may NOT attend. A
        floating-point mask acts as `bias` of `Attention.forward`, which the attention class must not override. With
        `is_causal`, `attn_mask` is ignored if N = M, and required if not. If a query may attend to no key, its weights
        are zero, not NaN. Raises UserError for inputs that break these rules, for unbatched or nested tensors, and if
        weights are needed but the attention has no map (see `Attention.weights`).
        """
        if query.is_nested or query.ndim != 3 or key.ndim != 3 or value is not key:
            raise UserError("kvt.MultiheadAttention takes batches of three dimensions, and one tensor as key and value")
        x, context = (query, key) if self.batch_first else (query.transpose(0, 1), key.transpose(0, 1))
        (b, n, _), m = x.shape, context.shape[1]
        if not x.shape[::2] == context.shape[::2] == (b, self.embed_dim):
            shapes = f"query of shape {tuple(query.shape)} and key of shape {tuple(key.shape)}"
            raise UserError(f"{shapes}: expected the same batch, and {self.embed_dim} channels")
        causal = is_causal and n == m  # if n != m, `Attention` aligns the last positions, torch the first
        if is_causal and not causal and attn_mask is None:
            raise UserError(f"is_causal with {n} queries and {m} keys: also pass an attn_mask")
        call: dict[str, Any] = {"causal": causal} | ({} if key is query else {"context": context})
        masks = {"key_padding_mask": (key_padding_mask, (b, m)), "attn_mask": (None if causal else attn_mask, (n, m))}
        for name, (given, shape) in masks.items():
            if given is None:
                continue
            if given.shape != shape or not (given.dtype == torch.bool or given.is_floating_point()):
                raise UserError(f"{name}: expected numbers or booleans of shape {shape}, not {tuple(given.shape)}")
            t = given.view(-1, 1, n if name == "attn_mask" else 1, m)  # (B or 1, 1, N or 1, M)
            if t.dtype == torch.bool:
                call["mask"] = ~t & call.get("mask", ~t)
            elif type(self.attention).forward is Attention.forward:
                call["bias"] = t + call.get("bias", 0)
            else:
                raise UserError(f"attn {self.attn!r} has its own forward, which takes only boolean masks")
        output, weights = self.attention(x, **call), None
        if need_weights and isinstance(self.attention, Attention):
            weights = self.attention.weights(x, **call)
            weights = weights.mean(1) if average_attn_weights else weights
        return output if self.batch_first else output.transpose(0, 1), weights
