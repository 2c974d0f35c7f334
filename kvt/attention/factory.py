"""Make attention layers from a registered name or from the import path of a class."""

import re
from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from kvt.attention import latent, shared_keys  # noqa: F401  (importing the modules registers their classes)
from kvt.attention.base import ATTENTION, Attention
from kvt.attention.variants import QKV
from kvt.system import UserError, arguments, import_class, parse_settings, unknown

Scalar = bool | int | float | str | None
AttentionSettings = dict[str, Scalar | list[Scalar]]  # with values of type Any, the CLI would instantiate classes
FIXED = {"heads", "max_len"}  # arguments that only the model may set
FORMULAS = "; ".join(f"{name}: {cls.formula}" for name, cls in ATTENTION.items())  # for `--help`


def make_attention(attn: str, dim: int, *, heads: int, max_len: int | None = None, **settings: Any) -> Attention:
    """Return an attention layer: `layer(x, context=None, *, mask=None, causal=False, cache=None, bias=None)`.

    `Attention.forward` documents the arguments of `layer`. Of the attentions in `ATTENTION`, only "qkv", "q-kv" and
    "mla" accept a context.

    >>> import torch
    >>> layer = make_attention("kv+pos", dim=64, heads=4, max_len=128)
    >>> layer(torch.zeros(2, 10, 64), causal=True).shape
    torch.Size([2, 10, 64])

    Args:
        attn: a name in `ATTENTION`, or the import path of a class, "my_package.my_module.MyAttention".
        dim: model width, a multiple of `heads`, the number of heads.
        max_len: length of the longest sequence, required by "kv+pos", "k+pos" and "qkv+pos".
        settings: further arguments of the attention class, such as kv_heads=1 or score="cosine".
    """
    return cast(Attention, AttentionFactory(attn, settings, heads=heads, max_len=max_len)(dim))


class AttentionFactory:
    """Factory of a model's attention layers: `factory(dim)`, and `factory.cross(dim)` for cross-attention.

    Args:
        attn: a name in `ATTENTION`, or the import path of a class, "my_package.my_module.MyAttention".
        attn_kwargs: arguments that the user sets. The constructor raises UserError if the class lacks an argument,
            if an argument is in `FIXED`, or if only the value or only the default of an argument is boolean.
        setting: arguments that the model sets, such as `heads`; ignored if they are None or if the class lacks them.
    """

    def __init__(self, attn: str, attn_kwargs: Mapping[str, Any] | None = None, **setting: Any) -> None:
        cls: Any = find_attention(attn)
        self.attn, self.attention_class = attn, cls
        self.setting = {key: value for key, value in setting.items() if value is not None}
        takes, defaults = keyword_arguments(cls), arguments(cls)
        for key, value in (attn_kwargs or {}).items():
            if key in FIXED:
                raise UserError(f"attn_kwargs: {key} is set by the model: remove {key} from attn_kwargs")
            if key not in takes:
                raise unknown(f"key in attn_kwargs of {attn}", key, sorted(takes - FIXED))
            if isinstance(value, bool) != isinstance(defaults[key], bool):  # "no" would act as True, and True as 1
                raise UserError(f"attn_kwargs: {key}={value!r} must be of the type of {defaults[key]!r}, the default")
        self.kwargs = {k: v for k, v in self.setting.items() if k in takes} | dict(attn_kwargs or {})

    def __call__(self, dim: int) -> nn.Module:
        """Return a self-attention layer of width `dim`; raise UserError if the class rejects its arguments."""
        try:
            return self.attention_class(dim, **self.kwargs)
        except TypeError as error:
            if "max_len" in keyword_arguments(self.attention_class) - self.kwargs.keys():
                raise UserError(f"{self.attn} needs max_len, the length of the longest sequence") from error
            raise UserError(f"attn {self.attn!r} cannot be made with dim={dim} and {self.kwargs}: {error}") from error

    def cross(self, dim: int) -> QKV:
        """Return a cross-attention layer of width `dim`: always `QKV`, without `attn_kwargs` (Borji 2023, §2)."""
        takes = keyword_arguments(QKV)
        return QKV(dim, **{k: v for k, v in self.setting.items() if k in takes})


def parse_attention(words: str) -> tuple[str, dict[str, Any]]:
    """Split a value such as "qkv,kv_heads=1", of a grid or of `kvt bench --attn`, into name and arguments."""
    name, *arguments = re.split(r",(?=\w+=)", words)
    return name, parse_settings(arguments, f"--attn {name}")


def find_attention(attn: str) -> type[nn.Module]:
    """Return the attention class with a registered name or import path; raise UserError if there is no such class."""
    if attn in ATTENTION:
        return ATTENTION[attn]
    return import_class(attn, "attn", nn.Module, [*ATTENTION, "my_package.my_module.MyAttention"])


def keyword_arguments(cls: type) -> set[str]:
    """Return the names of the keyword arguments of `cls(dim, **kwargs)`, including arguments of base classes."""
    return set(arguments(cls)) - {"dim"}
