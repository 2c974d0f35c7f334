"""Attention whose keys are rotated by an angle when they act as queries."""

from collections.abc import Callable
from math import isfinite, pi
from typing import Any, Self

import torch
from torch import Tensor, nn

from kvt.attention.base import Attention
from kvt.attention.rotary import rotate
from kvt.system.errors import UserError


class Phase(Attention):
    """Rotate keys by an angle φ when they act as queries.

    s_ij = k_iᵀ R(φ) k_j = cos φ · k_iᵀ k_j + sin φ · k_iᵀ J k_j

    where R turns each pair of channels, (a, b) → (a cos φ − b sin φ, a sin φ + b cos φ), and J = R(π/2). The first term
    is symmetric, as in `KV`; the second is skew, s_ij = −s_ji. φ = 0 is `KV`. A fixed angle has no parameter more than
    `KV`, and the same cache. See docs/symmetry.md.

    Args:
        phase: φ in radians; a list of several, which the heads have in turn; or "learned", an angle for each head and
            pair of channels, which starts at π/4.
    """

    def __init__(self, dim: int, heads: int, *, phase: float | str | list[float] = pi / 4, **kwargs: Any) -> None:
        super().__init__(dim, heads, **kwargs)
        learned = phase == "learned"
        angles = phase if isinstance(phase, list) else [pi / 4 if learned else phase]
        if any(isinstance(angle, str) or not isfinite(angle) for angle in angles):
            raise UserError(f"phase={phase}: expected an angle in radians, a list of them, or learned")
        if not angles or heads % len(angles):
            raise UserError(f"phase={phase}: {heads} heads cannot have {len(angles)} angles in turn")
        if self.head_dim % 2:
            raise UserError(f"heads={heads} leaves {self.head_dim} channels a head: a phase turns pairs of channels")
        times = 1 if len(angles) == 1 and not learned else heads // len(angles)  # one angle is of any number of heads
        self.fixed = None if learned else angles * times
        one_each = torch.tensor(angles, dtype=torch.get_default_dtype()).view(-1, 1, 1)
        of_pairs = one_each.repeat(times, 1, self.head_dim // 2)
        self.angles = nn.Parameter(of_pairs) if learned else nn.Buffer(of_pairs, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert the module; in float64, fixed angles have all of its digits."""
        super()._apply(fn, recurse)
        if self.fixed:
            exact = torch.tensor(self.fixed, dtype=torch.float64, device="cpu").view(-1, 1, 1)
            self.angles.copy_(exact.to(self.angles.dtype))
        return self

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x, context)
        q = self._repeat_query(q, k)
        self._require_heads("the phase", len(self.angles), q.shape[1])
        return rotate(q, -self.angles), k, v  # R(φ)ᵀ q
