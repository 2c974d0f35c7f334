"""From a name, or the import path of anyone's class, to attention layers."""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from kvt.attention.variants import KV, QKV, Identity, K, KPos, KVPos, QKVPos, QSharedKV
from kvt.system.errors import UserError, unknown
from kvt.system.signatures import argument_types

ATTENTION: dict[str, type[nn.Module]] = {
    "qkv": QKV,
    "kv": KV,
    "kv+pos": KVPos,
    "qkv+pos": QKVPos,
    "q-kv": QSharedKV,
    "k": K,
    "k+pos": KPos,
    "identity": Identity,
}


Scalar = bool | int | float | str | None
AttentionSettings = dict[str, Scalar | list[Scalar]]
"""Keyword arguments of an attention: plain values, so that a parser instantiates no class from them."""

FIXED = {"heads", "max_len"}
"""What only the model can say."""


class AttentionFactory:
    """Makes the attention layers of a model: `factory(dim)`, and `factory.cross(dim)` for cross-attention.

    Args:
        attn: a name in `ATTENTION`, or the import path of a class, "my_package.my_module.MyAttention".
        attn_kwargs: what the user asks of this attention; every key must be one that its class takes.
        called_with: the keyword arguments of `forward` that the model calls its layers with: mask, causal, cache.
        setting: what the model says to any attention (heads, bias, max_len, pos_dim …); a class that has
            no use for one of them is made without it.

    Raises:
        UserError: no such attention, a key in `attn_kwargs` that it does not take, a class that cannot be made so, or
            not be called so.
    """

    def __init__(
        self,
        attn: str,
        attn_kwargs: Mapping[str, Any] | None = None,
        *,
        called_with: Sequence[str] = (),
        **setting: Any,
    ) -> None:
        self.attention_class = find_attention(attn)
        _require_callable(attn, self.attention_class, called_with)
        self.attn, self.setting = attn, setting
        takes = keyword_arguments(self.attention_class)
        for key in attn_kwargs or {}:
            if key in FIXED:
                raise UserError(f"attn_kwargs: {key} is the model's to say, leave it out here")
            if key not in takes:
                raise unknown(f"key in attn_kwargs of {attn}", key, sorted(takes - FIXED))
        self.kwargs = {k: v for k, v in setting.items() if k in takes} | dict(attn_kwargs or {})

    def __call__(self, dim: int) -> nn.Module:
        """A self-attention layer of width `dim`."""
        try:
            return self.attention_class(dim, **self.kwargs)
        except TypeError as error:
            raise UserError(f"attn {self.attn!r} cannot be made with dim={dim} and {self.kwargs}: {error}") from error

    def cross(self, dim: int) -> QKV:
        """A cross-attention layer of width `dim`: it keeps its query in every variant (Borji 2023, §2)."""
        takes = keyword_arguments(QKV)
        return QKV(dim, **{k: v for k, v in self.setting.items() if k in takes})


def find_attention(attn: str) -> type[nn.Module]:
    """The attention class of that registered name or import path.

    Raises:
        UserError: there is no such name, module or class.
    """
    if attn in ATTENTION:
        return ATTENTION[attn]
    if not isinstance(attn, str):
        raise unknown("attn", attn, ATTENTION)
    module_name, _, class_name = attn.rpartition(".")
    if not module_name or attn.startswith("."):
        raise unknown("attn", attn, [*ATTENTION, "my_package.my_module.MyAttention"])
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the user's module was found; something that it imports was not
        raise UserError(f"attn {attn!r}: there is no module {error.name!r} here or in the environment") from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise UserError(f"attn {attn!r}: {module_name} has no torch.nn.Module called {class_name!r}")
    return found


def _require_callable(attn: str, cls: type[nn.Module], called_with: Sequence[str]) -> None:
    parameters = inspect.signature(cls.forward).parameters.values()
    takes = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    if not (any(p.kind is p.VAR_KEYWORD for p in parameters) or takes.issuperset(called_with)):
        raise UserError(
            f"attn {attn!r}: this model calls it as forward(x, {', '.join(f'{name}=…' for name in called_with)}): take "
            "these, or derive the class from kvt.attention.Attention, whose forward says what they are"
        )


def keyword_arguments(cls: type) -> set[str]:
    """The names that `cls(dim, **kwargs)` takes, following **kwargs up to its base classes."""
    return argument_types(cls).keys() - {"dim"}
