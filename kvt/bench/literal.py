"""The paper's formula as it stands, to compare with: slow on purpose."""

import torch
from torch import Tensor

from kvt.attention import KVPos
from kvt.attention.positions import map_channels, sinusoid


class LiteralKVPos(KVPos):
    """`KVPos` the way the paper writes it: softmax(Linear_{m→1}(score · 1_m + P)) V  (Borji 2023, §2).

    Every head of every example makes an (n, n, m) tensor of scores and positions. The parameters and the numbers are
    those of `KVPos`, the cost is not: a training step keeps tensors of batch · heads · n² · m numbers.

    Args:
        dim: width of the model.
        heads: number of attention maps.
        max_len: the longest sequence.
        pos_dim: m, the number of channels.
        kv_heads: number of key and value heads; default: `heads`.
    """

    def __init__(self, dim: int, heads: int, *, max_len: int, pos_dim: int = 10, kv_heads: int | None = None) -> None:
        super().__init__(dim, heads, max_len=max_len, pos_dim=pos_dim, kv_heads=kv_heads)
        self.register_buffer("encoding", map_sinusoid(max_len, pos_dim), persistent=False)

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """Linear_{m→1}(score · 1_m + P), (B, heads, N, M)."""
        n, m = q.shape[-2], k.shape[-2]
        encoding = self.get_buffer("encoding")[m - n : m, :m]
        channels = self.score(q, k).unsqueeze(-1) + encoding  # (B, H, N, M, m)
        logits: Tensor = self.to_logit(channels)
        return logits.squeeze(-1)


def map_sinusoid(length: int, channels: int) -> Tensor:
    """The whole 2-D sinusoid P of an attention map, (length, length, channels): see `column_sinusoid`."""
    row_channels, column_channels = map_channels(channels)
    positions = sinusoid(length, row_channels)  # (N, r)
    rows = positions[:, None].expand(-1, length, -1)
    columns = positions[None, :, :column_channels].expand(length, -1, -1)
    return torch.cat([rows, columns], dim=-1)
