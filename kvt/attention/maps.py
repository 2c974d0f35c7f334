"""Attention maps of a whole model, on request."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvt.attention.base import Attention


@contextmanager
def record_maps(model: nn.Module) -> Iterator[list[Tensor]]:
    """While open, every forward pass adds its attention maps to the list, one (B, heads, N, M) a layer.

    Layers that are not a `kvt.attention.Attention` are passed over.

    >>> from kvt.attention import QKV
    >>> layer = QKV(8, 2)
    >>> with record_maps(layer) as maps:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> maps[0].shape
    torch.Size([1, 2, 3, 3])
    """
    maps: list[Tensor] = []

    @torch.no_grad()
    def record(layer: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        maps.append(layer.weights(*args, **kwargs))

    layers = [m for m in model.modules() if isinstance(m, Attention)]
    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    try:
        yield maps
    finally:
        for hook in hooks:
            hook.remove()
