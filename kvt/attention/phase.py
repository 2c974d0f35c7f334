"""The base class of `KVPhase` and `KPhase`."""

from collections.abc import Callable
from math import isfinite, pi
from typing import Any, Self

import torch
from torch import Tensor, nn

from kvt.attention.base import Attention
from kvt.attention.rotary import rotate
from kvt.system import UserError


class Phase(Attention):
    """Attention in which a key that acts as query is rotated by −φ.

    s_ij / α = k_iᵀ R(φ) k_j = cos φ · k_iᵀ k_j + sin φ · k_iᵀ J k_j,  for a dot-product score with scale α

    R rotates each pair of channels, (a, b) → (a cos φ − b sin φ, a sin φ + b cos φ), and J = R(π/2). The first term is
    symmetric, as in `KV`. The second term is skew-symmetric. See docs/symmetry.md.

    Args:
        phase: the angle φ in radians; or a list of angles, which is repeated until each head has an angle; or "learned"
            for a trained angle for each head and pair of channels, with initial value π/4.
    """

    def __init__(self, dim: int, heads: int, *, phase: float | str | list[float] = pi / 4, **kwargs: Any) -> None:
        super().__init__(dim, heads, **kwargs)
        learned = phase == "learned"
        angles = phase if isinstance(phase, list) else [pi / 4 if learned else phase]
        if any(isinstance(angle, str) or not isfinite(angle) for angle in angles):
            raise UserError(f"phase={phase}: expected an angle in radians, a list of angles, or learned")
        if not angles or heads % len(angles):
            raise UserError(f"phase={phase}: the number of angles, {len(angles)}, must divide heads={heads}")
        if self.head_dim % 2:
            raise UserError(f"heads={heads} gives {self.head_dim} channels per head: a phase needs an even number")
        times = 1 if len(angles) == 1 and not learned else heads // len(angles)  # a single fixed angle serves all heads
        self.fixed = None if learned else angles * times
        one_each = torch.tensor(angles, dtype=torch.get_default_dtype()).view(-1, 1, 1)
        of_pairs = one_each.repeat(times, 1, self.head_dim // 2)
        self.angles = nn.Parameter(of_pairs) if learned else nn.Buffer(of_pairs, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert the module; set fixed angles anew, because conversion keeps the rounding of the earlier dtype."""
        super()._apply(fn, recurse)
        if self.fixed:
            for of_head, angle in zip(self.angles, self.fixed, strict=True):
                of_head.fill_(angle)  # not copied from a CPU tensor, which makes torch's fake tensors crash
        return self

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x, context)
        return rotate(self._repeat_groups(q), -self.angles), k, v  # R(φ)ᵀ q
