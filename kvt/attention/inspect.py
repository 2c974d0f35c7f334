"""Attention maps of a whole model, on request, and what one number can say of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvt.attention.base import Attention


class AttentionMap(NamedTuple):
    """What one layer looked at in one forward pass.

    Args:
        layer: its name in the model.
        weights: the maps, (B, heads, N, M).
        scores: what they are a softmax of, before any mask, (B, heads, N, M); None where they are not made so.
        cross: whether the layer looked at something else than its own input.
    """

    layer: str
    weights: Tensor
    scores: Tensor | None
    cross: bool


@contextmanager
def record_maps(model: nn.Module) -> Iterator[list[AttentionMap]]:
    """While open, every forward pass adds its attention maps to the list, one `AttentionMap` a layer.

    Layers that are not a `kvt.attention.Attention` are passed over.

    >>> from kvt.attention import QKV
    >>> layer = QKV(8, 2)
    >>> with record_maps(layer) as maps:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> maps[0].weights.shape
    torch.Size([1, 2, 3, 3])
    """
    maps: list[AttentionMap] = []
    layers = {module: name for name, module in model.named_modules() if isinstance(module, Attention)}

    @torch.no_grad()
    def record(layer: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen = {name: value for name, value in kwargs.items() if name not in ("mask", "causal")}
        scores = layer.scores(*args, **seen) if layer.has_logits else None
        cross = len(args) > 1 or kwargs.get("context") is not None
        maps.append(AttentionMap(layers[layer], layer.weights(*args, **kwargs), scores, cross))

    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    try:
        yield maps
    finally:
        for hook in hooks:
            hook.remove()


def asymmetry(scores: Tensor) -> Tensor:
    """‖A − Aᵀ‖ / ‖A‖ in the Frobenius norm, from 0 (symmetric) to 2 (antisymmetric): (…, N, N) → (…).

    Scores of all zeros are symmetric.
    """
    norm = torch.linalg.matrix_norm(scores)
    return torch.linalg.matrix_norm(scores - scores.mT) / norm.clamp_min(torch.finfo(norm.dtype).tiny)


def row_entropy(weights: Tensor) -> Tensor:
    """The mean over the rows of −Σ_j A_ij ln A_ij, in nats, from 0 (one token each) to ln M: (…, N, M) → (…)."""
    return torch.special.entr(weights).sum(-1).mean(-1)
