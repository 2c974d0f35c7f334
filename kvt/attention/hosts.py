"""Use kvt's attentions in models of Hugging Face transformers and of timm."""

import copyreg
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvt.attention.base import Attention
from kvt.attention.factory import AttentionFactory, find_attention
from kvt.attention.kernels import dot_product_attention, leave_out, repeat_groups
from kvt.system.errors import UserError

FORMULA = ("project", "query", "rotate", "merge", "gain_and_bias", "logits", "attention_weights", "attend", "forward")
"""Methods that an attention for transformers may not override, because the model computes projections and output."""
UNKNOWN = ("softcap", "position_bias", "s_aux")
"""Arguments by which some models of transformers change the formula of attention. kvt raises UserError for them."""


def register_with_transformers(attn: str, *, attend_self: bool = True) -> str:
    """Register an attention with transformers; return the name to pass as `attn_implementation`.

        name = register_with_transformers("kv")
        model = AutoModelForCausalLM.from_pretrained("gpt2", attn_implementation=name)

    The model keeps its projections and caches. The attention only chooses which projections act as query, key and
    value: "kv" computes softmax(α K Kᵀ) V, "q-kv" computes softmax(α Q Kᵀ) K, and "k" computes softmax(α K Kᵀ) K. An
    unused projection gets no gradient. If the model has rotary positions, a key that acts as value is rotated.

    Args:
        attn: a name in `ATTENTION`, or the import path of an attention class.
        attend_self: False excludes each token itself from its softmax, as in `Attention`.

    Raises:
        UserError: the attention does more than share projections, such as "kv+pos". Later, the forward pass of the
            model raises UserError if the model has cross-attention, if a mask is not boolean, or if the attention of
            the model has more terms, such as the soft cap of Gemma 2.
    """
    cls = find_attention(attn)
    if not issubclass(cls, Attention) or any(getattr(cls, name) is not getattr(Attention, name) for name in FORMULA):
        raise UserError(f"attn {attn!r} does more than share projections: transformers' models take qkv, kv, q-kv or k")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise UserError('transformers 5 is not installed: pip install "kvt[decoding]"') from error
    name = f"kvt-{attn}" + "-without-self" * (not attend_self)
    AttentionInterface.register(name, _as_transformers_call(cls.projections, attend_self))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def _as_transformers_call(roles: str, attend_self: bool) -> Callable[..., tuple[Tensor, None]]:
    def attend(
        module: nn.Module,
        query: Tensor,  # (B, heads, N, D)
        key: Tensor,  # (B, kv_heads, M, D), including cached keys
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        if more := [name for name in UNKNOWN if others.get(name) is not None]:
            raise UserError(f"{type(module).__name__} has {more[0]}, which kvt's attentions do not support")
        config = getattr(module, "config", None)
        if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
            raise UserError(f"{type(module).__name__} belongs to a model with cross-attention, which is not supported")
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            raise UserError(f"an attention mask of {attention_mask.dtype}: pass a boolean mask, True where to attend")
        (heads, n, d), m = query.shape[1:], key.shape[2]
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal and attention_mask is None and 1 < n < m:  # the static cache is empty after the n prompt tokens
            key, value, m = key[:, :, :n], value[:, :, :n], n
        given = {"q": query, "k": key, "v": value}
        q, k, v = (given[role] for role in roles)
        mask, with_self = attention_mask, attend_self
        if mask is None or n == m:
            q = q[:, :, -n:]  # if keys act as queries, the last n keys belong to the tokens that attend
        else:
            own = _last_allowed(mask)
            q = q if roles[0] == "q" else _at(q, own)
            if not attend_self:
                mask, with_self = leave_out(F.one_hot(own, m).bool(), mask), True
        q = repeat_groups(q, heads)
        scale = d**-0.5 if scaling is None else scaling
        settings: dict[str, Any] = {"scale": scale, "gain": None, "bias": None, "p": dropout}
        output = dot_product_attention(q, k, v, mask, causal and mask is None, with_self, **settings)
        return output.transpose(1, 2).contiguous(), None

    return attend


def _last_allowed(mask: Tensor) -> Tensor:
    """Return the last key position that the mask allows for each query: (B, 1, N, M) → int64 (B, 1, N).

    This is the position of the query's own token. In a static cache, empty positions follow this token.
    """
    return mask.shape[-1] - 1 - mask.flip(-1).int().argmax(-1)


def _at(keys: Tensor, places: Tensor) -> Tensor:
    """Return the keys at given positions: (B, kv_heads, M, D), (B or 1, 1, N) → (B, kv_heads, N, D)."""
    b, heads, _, d = keys.shape
    return keys.gather(2, places.unsqueeze(-1).expand(b, heads, -1, d))


class _Made(type):
    """Metaclass of the classes that `timm_attention` returns; such a class is pickled as the arguments of the call."""


class TimmAttention(nn.Module, metaclass=_Made):
    """Base of the attention classes that timm's `Block` and `VisionTransformer` accept as `attn_layer`.

    `timm_attention("kv")` returns a subclass. A boolean mask is True where a token may attend; the numbers of any other
    mask are added to the logits.
    """

    attn: str
    max_len: int | None
    settings: dict[str, Any]

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: type[nn.Module] | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if qk_norm or scale_norm:
            raise UserError("qk_norm and scale_norm are not supported: remove these arguments, or pass score='cosine'")
        biases = {"bias": qkv_bias, "output_bias": proj_bias}
        make = AttentionFactory(
            self.attn, self.settings, heads=num_heads, dropout=attn_drop, max_len=self.max_len, **biases
        )
        self.attention = make(dim).to(device, dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    @property
    def proj(self) -> nn.Module:
        """The output projection. Some models of timm read `proj` to scale the initial weight."""
        return self.attention.get_submodule("output")

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Apply the attention and dropout: (B, N, dim) → (B, N, dim)."""
        masks = {}
        if attn_mask is not None:
            masks["mask" if attn_mask.dtype == torch.bool else "bias"] = attn_mask[(None,) * (4 - attn_mask.ndim)]
        return self.proj_drop(self.attention(x, causal=is_causal, **masks))


def timm_attention(attn: str = "kv", *, max_len: int | None = None, **settings: Any) -> type[TimmAttention]:
    """Return a class of attention layers for timm's models.

        timm.create_model("vit_tiny_patch16_224", attn_layer=timm_attention("kv"))

    Args:
        attn: a name in `ATTENTION`, or the import path of an attention class.
        max_len: number of tokens (patches and class tokens), for attentions with positions.
        settings: further arguments of the attention class, such as attend_self=False.
    """
    made: Any = _Made("TimmAttention", (TimmAttention,), {"attn": attn, "max_len": max_len, "settings": settings})
    return made


def _arguments(cls: Any) -> Any:
    if cls is TimmAttention:
        return cls.__qualname__
    return partial(timm_attention, cls.attn, max_len=cls.max_len, **cls.settings), ()


copyreg.pickle(_Made, _arguments)
