"""Fixed positional encodings: of a sequence, and of an attention map."""

import math

import torch
from torch import Tensor

from kvt.system.errors import UserError


def sinusoid(length: int, dim: int) -> Tensor:
    """The sinusoidal encoding of positions 0 … length − 1, sine and cosine interleaved.

    P[p, 2i] = sin(p / 10000^(2i/dim)),  P[p, 2i+1] = cos(p / 10000^(2i/dim))   (Vaswani et al. 2017, §3.5)

    Returns:
        Tensor (length, dim), float32.

    Raises:
        UserError: `dim` is odd: every frequency needs its sine and its cosine.
    """
    if dim % 2:
        raise UserError(f"dim={dim} must be even: sinusoidal positions pair a sine with a cosine")
    frequency = torch.exp(torch.arange(0, dim, 2, dtype=torch.float64) * (-math.log(10_000.0) / dim))
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency  # (N, D/2)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).float()  # (N, D)


def map_channels(channels: int) -> tuple[int, int]:
    """How the 2-D encoding divides its channels: (those of the row, those of the column).

    Raises:
        UserError: there is no column channel, so the encoding would cancel in the softmax.

    >>> map_channels(10), map_channels(20), map_channels(50)
    ((6, 4), (10, 10), (26, 24))
    """
    rows = 2 * math.ceil(channels / 4)
    if channels <= rows:
        raise UserError(f"pos_dim={channels} must be at least 3: fewer channels encode only the rows of the map")
    return rows, channels - rows


def column_sinusoid(length: int, channels: int) -> Tensor:
    """The column half of the 2-D sinusoid of an attention map (`PositionalEncoding2D` of positional-encodings).

    With (r, c) = `map_channels(channels)`, the encoding of cell (i, j) is S[i] (r channels) followed by
    S[j, :c], where S = sinusoid(length, r): no channel depends on both i and j. This returns S[:, :c].

    Returns:
        Tensor (length, c), float32.
    """
    rows, columns = map_channels(channels)
    return sinusoid(length, rows)[:, :columns]
