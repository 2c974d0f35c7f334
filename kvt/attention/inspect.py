"""Record the attention maps of a model, and compute numbers that describe an attention map."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvt.attention.base import Attention


class AttentionMap(NamedTuple):
    """The attention maps of one layer in one forward pass."""

    layer: str  # name of the layer in the model
    weights: Tensor  # the attention maps without dropout, (B, heads, N, M)
    scores: Tensor | None  # unmasked logits, (B, heads, N, M); None in cross-attention or if the layer lacks logits


@contextmanager
def record_maps(model: nn.Module) -> Iterator[list[AttentionMap]]:
    """Context manager that yields a list, to which each forward pass of an `Attention` layer adds an `AttentionMap`.

    The forward pass of a layer whose `has_map` is False raises UserError.

    >>> layer = Attention(8, 2)
    >>> with record_maps(layer) as maps:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> maps[0].weights.shape
    torch.Size([1, 2, 3, 3])
    """
    maps: list[AttentionMap] = []
    layers = {module: name for name, module in model.named_modules() if isinstance(module, Attention)}

    @torch.no_grad()
    def record(layer: Attention, x: Tensor, context: Tensor | None = None, **options: Any) -> None:
        scores = layer.scores(x, cache=options.get("cache")) if layer.has_logits and context is None else None
        maps.append(AttentionMap(layers[layer], layer.weights(x, context, **options), scores))

    def before(layer: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record(layer, *args, **kwargs)

    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    try:
        yield maps
    finally:
        for hook in hooks:
            hook.remove()


def asymmetry(scores: Tensor) -> Tensor:
    """Return ‖A − Aᵀ‖ / ‖A‖ in the Frobenius norm, from 0 if A is symmetric to 2 if skew-symmetric: (…, N, N) → (…)."""
    norm = torch.linalg.matrix_norm(scores)
    return torch.linalg.matrix_norm(scores - scores.mT) / norm.clamp_min(torch.finfo(norm.dtype).tiny)


def row_entropy(weights: Tensor) -> Tensor:
    """Return the mean over rows i of the entropy −Σ_j A_ij ln A_ij, from 0 to ln M nats: maps A, (…, N, M) → (…)."""
    return torch.special.entr(weights).sum(-1).mean(-1)


def eigenvalues(weights: Tensor) -> Tensor:
    """Return the eigenvalues of attention maps, in no particular order: (…, N, N) → complex128 (…, N).

    If weights are not negative and rows sum to 1, 1 is an eigenvalue, and no other has a greater absolute value. The
    softmax of symmetric scores has real eigenvalues; see docs/symmetry.md.
    """
    return torch.linalg.eigvals(weights.double())


def looked_at(scores: Tensor) -> Tensor:
    """Return the column of the largest off-diagonal entry of each row: (…, N, N) → int64 (…, N), for N ≥ 2."""
    diagonal = torch.eye(scores.shape[-1], dtype=torch.bool, device=scores.device)
    return scores.masked_fill(diagonal, float("-inf")).argmax(-1)


def cycle_lengths(successor: Tensor) -> list[int]:
    """Return, in ascending order, the lengths of the cycles of i → successor[i]. `successor` is int64 (N).

    >>> cycle_lengths(torch.tensor([1, 0, 3, 4, 2, 2]))
    [2, 3]
    """
    seen: dict[int, int] = {}  # index → number of indices that were visited before it
    lengths = []
    for place in range(len(successor)):
        start = len(seen)
        while place not in seen:
            seen[place] = len(seen)
            place = int(successor[place])
        if seen[place] >= start:  # this walk has found a new cycle, and not met an earlier walk
            lengths.append(len(seen) - seen[place])
    return sorted(lengths)


@torch.no_grad()
def symmetric_share(layer: Attention) -> Tensor:
    """Return ‖½ (M + Mᵀ)‖² / ‖M‖² for each head, (heads), where M = W_Qᵀ W_K defines the scores s_ij = x_iᵀ M x_j.

    The result is 1 if M is symmetric, as in `KV`; 0 if M is skew-symmetric; and about ½ if W_Q and W_K are independent
    random weights. M omits biases, positions, and the weights or norms of a score other than a dot product. The result
    is NaN if another layer computes the keys, or if queries or keys are not an affine function of the token, for
    instance because of a norm.
    """
    weight = next(layer.projection.parameters())
    none = torch.full((layer.heads,), torch.nan, dtype=weight.dtype, device=weight.device)
    if layer.borrows_keys:
        return none
    unit = torch.eye(layer.output.in_features, dtype=weight.dtype, device=weight.device)[None]  # tokens: unit vectors

    def directions(tokens: Tensor) -> list[Tensor]:
        return [layer._repeat_groups(part) for part in layer.project(tokens)[:2]]

    biases = directions(torch.zeros_like(unit))
    q, k = (part - bias for part, bias in zip(directions(unit), biases, strict=True))
    twice = [part - bias for part, bias in zip(directions(2 * unit), biases, strict=True)]
    if not all(torch.allclose(2 * one, two, rtol=1e-3, atol=1e-6) for one, two in zip((q, k), twice, strict=True)):
        return none
    product = (q @ k.mT)[0]  # (heads, dim, dim)
    symmetric = (product + product.mT) / 2
    return torch.linalg.matrix_norm(symmetric) ** 2 / torch.linalg.matrix_norm(product) ** 2
