"""Layers, inputs and masks shared by tests of attention."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from kvt.attention import ATTENTION, Attention, AttentionFactory, KPos, QKVPos
from kvt.attention.latent import PRODUCTS
from kvt.attention.literal import LiteralKVPos, LiteralMap  # noqa: F401 (named in POSITIONED)

MAX_LEN = 12


class LiteralQKVPos(LiteralMap, QKVPos):
    """The oracle for "qkv+pos"."""


class LiteralKPos(LiteralMap, KPos):
    """The oracle for "k+pos"."""


POSITIONED = {f"{name}+pos": f"{__name__}.Literal{name.upper()}Pos" for name in ("kv", "qkv", "k")}
"""Each variant with positions, and the class that computes the paper's formula for it literally."""
VARIANTS = [(name, "sinusoid") for name in ATTENTION] + [(name, "learned") for name in POSITIONED]
MASKS = ["none", "causal", "padded", "causal+padded", "arbitrary"]
WITHOUT_LOGITS = {n for n, cls in ATTENTION.items() if cls.attention_weights is not Attention.attention_weights}
WITH_LOGITS = [(name, pos) for name, pos in VARIANTS if name not in WITHOUT_LOGITS]
kinds_of_mask = st.sampled_from(MASKS)


@dataclass(frozen=True)
class Case:
    """Sizes of a layer and its input; the seed decides the numbers."""

    heads: int
    group: int
    head_dim: int
    batch: int
    length: int
    seed: int

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_heads(self) -> int:
        return self.heads // self.group

    def layer(self, name: str, **setting: Any) -> nn.Module:
        """Return that attention in float64, with those of the settings that it takes."""
        torch.manual_seed(self.seed)
        setting = {"heads": self.heads, "kv_heads": self.kv_heads, "max_len": MAX_LEN, **setting}
        if name == "mla" and setting.get("score") not in PRODUCTS:
            setting.pop("score", None)
        if name in WITHOUT_LOGITS:
            setting.pop("attend_self", None)
        return AttentionFactory(name, **setting)(self.dim).double()

    def input(self, length: int | None = None) -> Tensor:
        """Return (batch, length, dim), large enough for attention maps that are far from uniform."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, self.length if length is None else length, self.dim)
        return 3 * torch.randn(shape, generator=generator, dtype=torch.float64)

    def mask(self, kind: str) -> dict[str, Any]:
        """Return the arguments of `forward` for one of `MASKS`; "arbitrary" may leave a query without any key."""
        generator = torch.Generator().manual_seed(self.seed)
        if kind == "arbitrary":
            shape = (self.batch, self.heads, self.length, self.length)
            return {"mask": torch.rand(shape, generator=generator) < 0.5}
        real = torch.randint(1, self.length + 1, (self.batch, 1, 1, 1), generator=generator)
        padding = {"mask": torch.arange(self.length) < real} if "padded" in kind else {}
        return {"causal": "causal" in kind, **padding}


SMALL = Case(heads=4, group=2, head_dim=4, batch=2, length=5, seed=0)
any_length, any_group = st.integers(1, 8), st.sampled_from([1, 2, 4])
even, any_head_dim = st.sampled_from([2, 4, 6, 8]), st.integers(1, 9)


def cases(
    lengths: st.SearchStrategy[int] = any_length,
    groups: st.SearchStrategy[int] = any_group,
    head_dims: st.SearchStrategy[int] = even,  # which every variant takes
) -> st.SearchStrategy[Case]:
    """Cases with 4 heads, and 4, 2 or 1 key-value heads."""
    sizes = {"head_dim": head_dims, "batch": st.integers(1, 3), "length": lengths}
    return st.builds(Case, heads=st.just(4), group=groups, **sizes, seed=st.integers(0, 2**31))


def gradients(output: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of a fixed weighted sum of the output."""
    weight = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view_as(output)
    return torch.autograd.grad((output * weight).sum(), of)
