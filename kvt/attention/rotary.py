"""Rotary position embeddings (RoPE)."""

from math import ceil

import torch
from torch import Tensor

from kvt.system import UserError, require_positive


class Rotary:
    """Rotary position embedding of queries and keys (Su et al. 2021, "RoFormer", §3.2.2).

    At position p, R_p rotates pair i of the first r channels, (a, b) → (a cos θ − b sin θ, a sin θ + b cos θ), by the
    angle θ = p · base^(−2i/r). The other channels are unchanged. The product (R_p q)·(R_s k) = q·(R_(s−p) k) depends on
    the positions p and s only through s − p.

    Args:
        share: fraction of the channels to rotate, r / head_dim, from 0 to 1; r must be even.
        head_dim: number of channels of a head.
        base: base of the rotation frequencies; the slowest pair has a wavelength of 2π · base^(1 − 2/r) tokens.
    """

    def __init__(self, share: float, head_dim: int, base: float) -> None:
        require_positive(rope_base=base)
        if not 0 <= share <= 1:
            raise UserError(f"rope={share} must be from 0 to 1: rope is the fraction of a head's channels to rotate")
        channels = share * head_dim
        self.channels, self.base = 2 * round(channels / 2), base
        if abs(self.channels - channels) > 1e-3:  # tolerate a rounded share, such as 0.3333
            pairs = [n / head_dim for n in range(0, head_dim + 1, 2) if abs(n - channels) < 2]
            choice = " or ".join(f"{pair:g}" for pair in pairs)
            count = f"rope={share:g} of a head's {head_dim} channels is {channels:g}"
            raise UserError(f"{count}, but channels are rotated in pairs: choose rope={choice}")

    def __call__(self, x: Tensor, start: int) -> Tensor:
        """Rotate x, (…, N, head_dim), whose first token has position `start`."""
        return self._turn(x, start, 1)

    def back(self, x: Tensor, start: int) -> Tensor:
        """Undo the rotation that `__call__` applies with the same `start`."""
        return self._turn(x, start, -1)

    def _turn(self, x: Tensor, start: int, sign: int) -> Tensor:
        if not self.channels:
            return x
        dtype = torch.promote_types(x.dtype, torch.float32)  # half precision is too coarse for large angles
        position = torch.arange(start, start + x.shape[-2], device=x.device, dtype=dtype)
        pair = torch.arange(0, self.channels, 2, device=x.device, dtype=dtype)
        angle = sign * position[:, None] * self.base ** (-pair / self.channels)  # (N, r / 2)
        return rotate(x, angle).to(x.dtype)


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate the first P pairs of channels of x, (…, D), by `angle` in radians, (…, P)."""
    channels = 2 * angle.shape[-1]
    a, b = x[..., :channels].unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    return turned if channels == x.shape[-1] else torch.cat([turned, x[..., channels:]], dim=-1)


def whole_pairs(share: float, dim: int, heads: int) -> float:
    """Return `share`, a fraction of a head's channels, rounded up to whole pairs of channels, but at most 1.

    >>> whole_pairs(1 / 8, dim=64, heads=1), whole_pairs(1 / 8, dim=64, heads=16)
    (0.125, 0.5)
    """
    head_dim = max(1, dim // max(1, heads))  # `Attention` raises UserError for impossible sizes
    return min(1.0, 2 * ceil(share * head_dim / 2) / head_dim)
