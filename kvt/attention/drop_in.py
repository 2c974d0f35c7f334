"""Attention with the interface of `torch.nn.MultiheadAttention`."""

from typing import Any, Never

import torch
from torch import Tensor, nn

from kvt.attention.base import Attention
from kvt.attention.factory import AttentionFactory
from kvt.attention.hosts import FORMULA
from kvt.attention.scores import ScaledDot
from kvt.system.errors import UserError

INPUTS = ("query", "key", "value")
PAIRS = ((0, 1), (0, 2), (1, 2))  # torch.compile of torch 2.11 cannot trace itertools.combinations


class _NotAWeight:
    """A stand-in for torch's weights that prevents the fast path of nn.TransformerEncoder.

    The fast path would convert padded input to a nested tensor, and compute torch's attention instead of kvt's. The
    encoder does not use the fast path if a weight has a `__torch_function__`.
    """

    weight = bias = None

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Never:
        raise UserError("kvt.MultiheadAttention has no in_proj_weight: its weights are in attention.projection")

    def __getattr__(self, name: str) -> Never:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__torch_function__()


class MultiheadAttention(nn.Module):
    """Any attention of kvt with the interface of `torch.nn.MultiheadAttention`.

    >>> block = nn.TransformerEncoderLayer(8, nhead=2, batch_first=True)
    >>> block.self_attn = MultiheadAttention(8, 2, attn="kv", batch_first=True)
    >>> block(torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])

    Args:
        embed_dim, num_heads, dropout, bias, batch_first, device, dtype: as in torch.nn.MultiheadAttention.
        add_bias_kv, add_zero_attn, kdim, vdim: only torch's default values are supported.
        attn: a name in `ATTENTION`, or the import path of an attention class.
        max_len: length of the longest sequence, for attentions with positions.
        settings: further arguments of the attention class, such as score="cosine".

    Raises:
        UserError: add_bias_kv, add_zero_attn, kdim or vdim differs from torch's default value.
    """

    in_proj_weight = out_proj = _NotAWeight()
    in_proj_bias, _qkv_same_embed_dim = None, False  # prevent the fused inference path of nn.TransformerEncoderLayer
    bias_k, bias_v, add_zero_attn = None, None, False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        attn: str = "kv",
        max_len: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        for name, given in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if given:
                raise UserError(f"{name}=True is not supported: leave it out")
        for name, width in (("kdim", kdim), ("vdim", vdim)):
            if width not in (None, embed_dim):
                raise UserError(f"{name}={width} is not supported: keys and values have embed_dim={embed_dim} channels")
        self.embed_dim = self.kdim = self.vdim = embed_dim
        self.num_heads, self.dropout, self.batch_first, self.attn = num_heads, dropout, batch_first, attn
        self.attention = AttentionFactory(
            attn, settings, heads=num_heads, dropout=dropout, bias=bias, output_bias=bias, max_len=max_len
        )(embed_dim).to(device, dtype)
        self.head_dim = embed_dim // num_heads
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        """Initialise projections from U(±√(6 / (inputs + 3 outputs))) and biases with 0, as torch's layer does."""
        if not isinstance(self.attention, Attention):
            return
        for layer in (*self.attention.projection.values(), self.attention.output):
            if not isinstance(layer, nn.Linear):
                continue
            if layer is not self.attention.output:
                bound = (6 / (layer.in_features + 3 * layer.out_features)) ** 0.5
                nn.init.uniform_(layer.weight, -bound, bound)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        self.attention.after_initialisation()

    @classmethod
    def from_torch(cls, layer: nn.MultiheadAttention, attn: str = "qkv", **settings: Any) -> "MultiheadAttention":
        """Return a layer with the weights of a trained torch layer; with "qkv", both layers compute the same outputs.

        An attention with fewer projections takes only the weights of the projections that it has. For example, "kv"
        takes the key and value projections, and drops the query projection.

        Raises:
            UserError: the torch layer was made with kdim, vdim, add_bias_kv or add_zero_attn, or the attention `attn`
                has fewer key and value heads than query heads.
        """
        if layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn:
            raise UserError("from_torch does not support a layer with kdim, vdim, add_bias_kv or add_zero_attn")
        bias = layer.in_proj_bias is not None
        shape = {"batch_first": layer.batch_first, "attn": attn, **settings}
        made = cls(layer.embed_dim, layer.num_heads, layer.dropout, bias, **shape)
        if not isinstance(made.attention, Attention) or made.attention.kv_heads != layer.num_heads:
            raise UserError(f"attn {attn!r} with {settings} lacks torch's projections: use qkv without kv_heads")
        parts = {"weight": layer.in_proj_weight} | ({"bias": layer.in_proj_bias} if bias else {})
        theirs = {name: dict(zip("qkv", part.chunk(3), strict=True)) for name, part in parts.items()}
        made.to(layer.in_proj_weight)
        for role, projection in made.attention.projection.items():
            projection.load_state_dict({name: part[role] for name, part in theirs.items()})
        made.attention.output.load_state_dict(layer.out_proj.state_dict())
        return made.train(layer.training)

    def to_torch(self) -> nn.MultiheadAttention:
        """Return a torch.nn.MultiheadAttention that computes the same self-attention.

        With "qkv", the outputs of the two layers are also equal in cross-attention.

        Raises:
            UserError: the attention does more than share projections, has fewer key and value heads than query heads,
                or uses a setting that torch's layer does not have.
        """
        layer = self.attention
        if not isinstance(layer, Attention) or any(
            getattr(type(layer), name) is not getattr(Attention, name) for name in FORMULA
        ):
            raise UserError(f"attn {self.attn!r} does more than share projections: to_torch takes qkv, kv, q-kv and k")
        if layer.kv_heads != layer.heads or type(layer.score) is not ScaledDot:
            raise UserError("to_torch: torch's layer supports neither kv_heads nor a score other than scaled_dot")
        if layer.rotary.channels or not layer.attend_self:
            raise UserError("to_torch: torch's layer supports neither rope nor attend_self=False")
        states = [layer.projection[role].state_dict() for role in layer.projections]
        state = {f"in_proj_{name}": torch.cat([of_role[name] for of_role in states]) for name in states[0]}
        state |= {f"out_proj.{name}": part for name, part in layer.output.state_dict().items()}
        sizes = (self.embed_dim, self.num_heads, self.dropout, "in_proj_bias" in state)
        made = nn.MultiheadAttention(*sizes, batch_first=self.batch_first).to(state["in_proj_weight"])
        made.load_state_dict(state)
        return made.train(self.training)

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
        """Return the output, of the shape of `query`, and the attention weights, (B, N, M) or (B, heads, N, M).

        No dropout is applied to the returned weights. If two inputs share a projection, as query and key do in "kv",
        these two inputs must be equal. Their equality is not checked under torch.compile, torch.export and vmap. If
        query and key are equal, the call is self-attention, in which `rope` and `attend_self=False` take effect.

        Masks have the meaning that they have in torch. A boolean mask is True where a query may NOT attend. Other masks
        are numbers that are added to the logits. With `is_causal` and N = M, `attn_mask` is ignored and may be None.
        For a query that may attend to no key, the output is zero, not NaN. Inputs may also have no batch dimension:
        (N, embed_dim).
        """
        if query.is_nested:
            raise UserError("nested tensors are not supported: make the encoder with enable_nested_tensor=False")
        batch = 0 if self.batch_first or query.ndim == 2 else 1
        x, key, value = self._tokens(batch, query, key, value)
        (b, n, _), m = x.shape, key.shape[1]
        causal = is_causal and n == m  # if n != m, `Attention` aligns the last positions, torch the first
        if is_causal and not causal and attn_mask is None:
            raise UserError(f"is_causal with {n} queries and {m} keys: also pass an attn_mask")
        masks = []
        if key_padding_mask is not None:
            shape = (m,) if query.ndim == 2 else (b, m)
            masks.append(_checked("key_padding_mask", key_padding_mask, shape).view(b, 1, 1, m))
        if attn_mask is not None and not causal:
            pairs = _checked("attn_mask", attn_mask, (n, m), (b * self.num_heads, n, m))
            masks.append(pairs.view(b if pairs.ndim == 3 else 1, -1, n, m))  # (B or 1, heads or 1, N, M)
        if self._has_own_forward:  # an overridden forward may accept only boolean masks
            masks = [mask if mask.dtype == torch.bool else mask == float("-inf") for mask in masks]
        call = {"causal": causal, **_joined(masks), **self._sources(x, key, value)}
        output = self.attention(x, **call)
        weights = None
        if need_weights and isinstance(self.attention, Attention):
            weights = self.attention.weights(x, **call)
            weights = weights.mean(1) if average_attn_weights else weights
        if query.ndim == 2:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output.transpose(0, batch), weights

    @property
    def _has_own_forward(self) -> bool:
        return not isinstance(self.attention, Attention) or type(self.attention).forward is not Attention.forward

    def _tokens(self, batch: int, *inputs: Tensor) -> list[Tensor]:
        """Return query, key and value as (B, N or M, embed_dim)."""
        query, key, value = inputs
        for name, t in zip(INPUTS, inputs, strict=True):
            like = query.shape[batch : batch + 1] if query.ndim == 3 else ()  # (B,)
            fits = t.ndim == query.ndim and t.ndim in (2, 3) and t.shape[-1] == self.embed_dim
            if not fits or t.shape[batch : batch + len(like)] != like:
                size = ("B, N" if self.batch_first else "N, B") + f", {self.embed_dim}"
                raise UserError(f"{name} of shape {tuple(t.shape)}: expected ({size}), with the same B for all inputs")
        if value.shape != key.shape:
            raise UserError(f"value of shape {tuple(value.shape)}: expected the shape of the key, {tuple(key.shape)}")
        x, k, v = (t.unsqueeze(0) if t.ndim == 2 else t.transpose(0, batch) for t in inputs)
        k = x if key is query else k  # the same tensor object is projected once
        return [x, k, k if value is key else v]

    def _sources(self, x: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
        """Return the keyword arguments `context` and `key_value` for the call of the attention."""
        if key is x and value is x:
            return {}
        layer, inputs = self.attention, (x, key, value)
        if isinstance(layer, Attention) and not self._has_own_forward:
            for i, j in PAIRS:
                if layer.projections[i] == layer.projections[j] and _equal(inputs[i], inputs[j]) is False:
                    both = f"{INPUTS[i]} and {INPUTS[j]}"
                    shared = f"attn {self.attn!r} has one projection for {both}, so these inputs must be equal"
                    raise UserError(f"{shared}: use QKV, attn='qkv'")
            given: dict[str, Any] = {"key_value": (key, value)}
            needs_self = layer.rotary.channels or not layer.attend_self
            inherits = all(getattr(type(layer), name) is getattr(Attention, name) for name in ("project", "rotate"))
            if inherits and not needs_self:
                return given  # no context needed: self-attention and cross-attention give equal results
            equal = _equal(x, key)
            if equal is None and needs_self:
                raise UserError("rope or attend_self=False: in a compiled graph pass one tensor as query and key")
            return given | ({"context": key} if equal is False else {})
        equal = _equal(x, key)  # an overridden forward takes one context for keys and values
        if _equal(key, value) is False:
            raise UserError(f"attn {self.attn!r} has its own forward: pass the same tensor as key and value")
        if None in (equal, _equal(key, value)):
            raise UserError(f"attn {self.attn!r} has its own forward: in a compiled graph pass one tensor three times")
        return {} if equal else {"context": key}


def _equal(first: Tensor, second: Tensor) -> bool | None:
    """Return whether two inputs are equal, or None if code cannot read values, for instance under torch.compile."""
    if first is second or first.shape != second.shape:
        return first is second
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    try:
        return torch.equal(first, second)
    except RuntimeError:  # torch raises it under vmap, or for tensors on the device meta
        return None


def _checked(name: str, mask: Tensor, *shapes: tuple[int, ...]) -> Tensor:
    if mask.shape not in shapes:
        raise UserError(f"{name} of shape {tuple(mask.shape)}: expected {' or '.join(map(str, shapes))}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise UserError(f"{name} of {mask.dtype}: expected torch.bool, or numbers that are added to the logits")
    return mask


def _joined(masks: list[Tensor]) -> dict[str, Tensor]:
    """Convert torch's masks to the arguments `mask` (boolean, True where allowed) and `bias` of `Attention`."""
    joined: dict[str, Tensor] = {}
    for mask in masks:
        if mask.dtype == torch.bool:
            joined["mask"] = joined["mask"] & ~mask if "mask" in joined else ~mask
        else:
            joined["bias"] = joined["bias"] + mask if "bias" in joined else mask
    return joined
