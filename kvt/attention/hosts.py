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
"""Methods that an attention may not override: transformers' models have the projections, and kvt only assigns roles."""
UNKNOWN = ("softcap", "position_bias", "s_aux")
"""Arguments by which some models of transformers change the formula; they raise UserError."""


def register_with_transformers(attn: str, *, attend_self: bool = True) -> str:
    """Register an attention with transformers; return the name to pass as `attn_implementation`.

        name = register_with_transformers("kv")
        model = AutoModelForCausalLM.from_pretrained("gpt2", attn_implementation=name)

    The model keeps its projections and its caches. The attention only chooses which projections act as query, key and
    value: "kv" computes softmax(α K Kᵀ) V, "q-kv" softmax(α Q Kᵀ) K, and "k" softmax(α K Kᵀ) K. An unused projection
    gets no gradient. With rotary positions, a key that acts as value is rotated.

    Args:
        attn: a name in `ATTENTION`, or the import path of an attention class.
        attend_self: as in `Attention`.

    Raises:
        UserError: the attention does more than share projections, such as "kv+pos". The model's forward pass raises
            UserError for a model with cross-attention, for a mask that is not boolean, and for a formula with more
            terms, such as Gemma 2's soft cap.
    """
    cls = find_attention(attn)
    if not issubclass(cls, Attention) or any(getattr(cls, name) is not getattr(Attention, name) for name in FORMULA):
        raise UserError(f"attn {attn!r} does more than share projections: transformers' models take qkv, kv, q-kv or k")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise UserError('there is no transformers 5: pip install "kvt[decoding]"') from error
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
            raise UserError(f"an attention mask of {attention_mask.dtype}: pass a boolean one, True where to attend")
        (heads, n, d), m = query.shape[1:], key.shape[2]
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal and attention_mask is None and 1 < n < m:  # a prompt in a static cache, which is empty after it
            key, value, m = key[:, :, :n], value[:, :, :n], n
        given = {"q": query, "k": key, "v": value}
        q, k, v = (given[role] for role in roles)
        mask, with_self = attention_mask, attend_self
        if mask is None or n == m:
            q = q[:, :, -n:]  # if keys act as queries: the last n keys belong to the queries' tokens
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
    """Return the position of each query's own key, the last key that the mask allows: (B, 1, N, M) → int64 (B, 1, N).

    In a static cache the last positions are still empty, so the own key comes before them.
    """
    return mask.shape[-1] - 1 - mask.flip(-1).int().argmax(-1)


def _at(keys: Tensor, places: Tensor) -> Tensor:
    """Return the keys at given positions: (B, kv_heads, M, D), (B or 1, 1, N) → (B, kv_heads, N, D)."""
    b, heads, _, d = keys.shape
    return keys.gather(2, places.unsqueeze(-1).expand(b, heads, -1, d))


class _Made(type):
    """Metaclass of the classes that `timm_attention` returns; such a class is pickled as the arguments of that call."""


class TimmAttention(nn.Module, metaclass=_Made):
    """Base of the attention classes that timm's `Block` and `VisionTransformer` accept as `attn_layer`.

    `timm_attention("kv")` returns such a class. A mask is boolean, True where a token may attend, or is added to the
    logits.
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
            raise UserError("qk_norm and scale_norm are not supported: leave them out, or take score='cosine'")
        biases = {"bias": qkv_bias, "output_bias": proj_bias}
        make = AttentionFactory(
            self.attn, self.settings, heads=num_heads, dropout=attn_drop, max_len=self.max_len, **biases
        )
        self.attention = make(dim).to(device, dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    @property
    def proj(self) -> nn.Module:
        """The output projection under timm's name, by which some models scale its initial weight."""
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
        max_len: number of tokens (patches and class tokens), for variants with positions.
        settings: further arguments of the variant, such as attend_self=False.
    """
    made: Any = _Made("TimmAttention", (TimmAttention,), {"attn": attn, "max_len": max_len, "settings": settings})
    return made


def _arguments(cls: Any) -> Any:
    if cls is TimmAttention:
        return cls.__qualname__
    return partial(timm_attention, cls.attn, max_len=cls.max_len, **cls.settings), ()


copyreg.pickle(_Made, _arguments)
