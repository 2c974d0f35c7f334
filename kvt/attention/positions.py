"""Fixed sinusoidal encodings of the positions in a sequence, and of the cells of an attention map."""

import math

import torch
from torch import Tensor

from kvt.system import UserError


def sinusoid(length: int, dim: int) -> Tensor:
    """Return the sinusoidal encoding of positions 0 … length − 1, (length, dim); raise UserError if `dim` is odd.

    P[p, 2i] = sin(p / 10000^(2i/dim)),  P[p, 2i+1] = cos(p / 10000^(2i/dim))   (Vaswani et al. 2017, §3.5)
    """
    if dim % 2:
        raise UserError(f"dim={dim} must be even: sinusoidal positions pair a sine with a cosine")
    frequency = torch.exp(torch.arange(0, dim, 2, dtype=torch.float64) * (-math.log(10_000.0) / dim))
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency  # (N, D/2)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).float()  # (N, D)


def map_sinusoids(length: int, channels: int) -> tuple[Tensor, Tensor]:
    """Return a 2-D sinusoidal encoding of an attention map as two tensors: rows, (length, r), and columns, (length, c).

    The encoding of cell (i, j) is rows[i] followed by columns[j], with r + c = channels, as in `PositionalEncoding2D`
    of the package positional-encodings. Raises UserError if `channels` is less than 3.

    >>> [tuple(part.shape) for part in map_sinusoids(7, channels=50)]
    [(7, 26), (7, 24)]
    """
    row_channels = 2 * math.ceil(channels / 4)
    if channels <= row_channels:  # an encoding of rows alone would cancel in the softmax
        raise UserError(f"pos_dim={channels} must be at least 3: fewer channels encode only the rows of the map")
    rows = sinusoid(length, row_channels)
    return rows, rows[:, : channels - row_channels]
