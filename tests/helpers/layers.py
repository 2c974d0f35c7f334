"""The layers, inputs and masks that tests share."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from kvt.attention import ATTENTION, AttentionFactory

MAX_LEN = 12
POSITIONED = {"kv+pos": "kkv", "qkv+pos": "qkv", "k+pos": "kkk"}  # and who plays query, key and value
VARIANTS = [(name, "sinusoid") for name in ATTENTION] + [(name, "learned") for name in POSITIONED]
MASKS = ["none", "causal", "padded", "causal+padded", "arbitrary"]


@dataclass(frozen=True)
class Case:
    """The sizes of one layer and its input; the same seed makes the same numbers."""

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
        """The attention of that name in float64; it is made without the settings it has no use for."""
        torch.manual_seed(self.seed)
        setting = {"heads": self.heads, "kv_heads": self.kv_heads, "max_len": MAX_LEN, **setting}
        return AttentionFactory(name, **setting)(self.dim).double()

    def input(self, length: int | None = None) -> Tensor:
        """(batch, length, dim), large enough for attention maps that are far from uniform."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, self.length if length is None else length, self.dim)
        return 3 * torch.randn(shape, generator=generator, dtype=torch.float64)

    def mask(self, kind: str) -> dict[str, Any]:
        """What `forward` is told for one of the `MASKS`; the arbitrary one may leave a query without any key."""
        generator = torch.Generator().manual_seed(self.seed)
        if kind == "arbitrary":
            shape = (self.batch, self.heads, self.length, self.length)
            return {"mask": torch.rand(shape, generator=generator) < 0.5}
        real = torch.randint(1, self.length + 1, (self.batch, 1, 1, 1), generator=generator)
        padding = {"mask": torch.arange(self.length) < real} if "padded" in kind else {}
        return {"causal": "causal" in kind, **padding}


any_length, any_group = st.integers(1, 8), st.sampled_from([1, 2, 4])


def cases(
    lengths: st.SearchStrategy[int] = any_length, groups: st.SearchStrategy[int] = any_group
) -> st.SearchStrategy[Case]:
    """Cases of 4 heads, which 4, 2 or 1 key-value heads serve."""
    return st.builds(
        Case,
        heads=st.just(4),
        group=groups,
        head_dim=st.integers(1, 9),
        batch=st.integers(1, 3),
        length=lengths,
        seed=st.integers(0, 2**31),
    )


def gradients(output: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    """Of a fixed but uneven function of the output."""
    weight = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view_as(output)
    return torch.autograd.grad((output * weight).sum(), of)
