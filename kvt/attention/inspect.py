"""The attention maps of a model, and numbers that describe a map."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvt.attention.base import Attention


class AttentionMap(NamedTuple):
    """The attention map of one layer in one forward pass."""

    layer: str  # its name in the model
    weights: Tensor  # the map, (B, heads, N, M)
    scores: Tensor | None  # its logits before any mask, (B, heads, N, M); None if it is not a softmax of logits
    cross: bool  # whether the layer attended to a context


@contextmanager
def record_maps(model: nn.Module) -> Iterator[list[AttentionMap]]:
    """Context manager: a list to which every forward pass adds one `AttentionMap` per `Attention` layer.

    >>> layer = Attention(8, 2)
    >>> with record_maps(layer) as maps:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> maps[0].weights.shape
    torch.Size([1, 2, 3, 3])
    """
    maps: list[AttentionMap] = []
    layers = {module: name for name, module in model.named_modules() if isinstance(module, Attention)}

    @torch.no_grad()
    def record(layer: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        unmasked = {name: value for name, value in kwargs.items() if name not in ("mask", "causal")}
        scores = layer.scores(*args, **unmasked) if layer.has_logits else None
        cross = len(args) > 1 or kwargs.get("context") is not None
        maps.append(AttentionMap(layers[layer], layer.weights(*args, **kwargs), scores, cross))

    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    try:
        yield maps
    finally:
        for hook in hooks:
            hook.remove()


def asymmetry(scores: Tensor) -> Tensor:
    """Return ‖A − Aᵀ‖ / ‖A‖ in the Frobenius norm, from 0 (symmetric, or all zeros) to 2: (…, N, N) → (…)."""
    norm = torch.linalg.matrix_norm(scores)
    return torch.linalg.matrix_norm(scores - scores.mT) / norm.clamp_min(torch.finfo(norm.dtype).tiny)


def row_entropy(weights: Tensor) -> Tensor:
    """Return the mean over rows of −Σ_j A_ij ln A_ij, in nats, from 0 (one key each) to ln M: (…, N, M) → (…)."""
    return torch.special.entr(weights).sum(-1).mean(-1)
