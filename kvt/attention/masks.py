"""Boolean attention masks: True where a query may attend to a key."""

import torch
from torch import Tensor

from kvt.system.errors import UserError


def require_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> None:
    """Raise UserError unless the mask is boolean and fits queries (B, heads, N, D) and keys (B, heads, M, D)."""
    if mask is None:
        return
    shape = (*q.shape[:3], k.shape[2])
    fits = mask.ndim == 4 and all(size in (1, full) for size, full in zip(mask.shape, shape, strict=True))
    if mask.dtype != torch.bool or not fits:
        raise UserError(
            f"mask of {mask.dtype}, {tuple(mask.shape)}: expected torch.bool, (B, heads, N, M) = {shape} or 1 in place "
            "of any, True where a query may attend to a key: write mask[:, None, None] for (B, M), mask[None, None] "
            "for (N, M), mask == 0 for a mask of numbers that would be added to the logits"
        )


def allowed_pairs(
    num_queries: int, num_keys: int, mask: Tensor | None, causal: bool, device: torch.device
) -> Tensor | None:
    """Return which queries may attend to which keys, broadcastable to (B, heads, N, M); None where all may.

    The queries are the last `num_queries` of the `num_keys` positions.
    """
    if not causal or num_queries == 1:  # the newest token may attend to every key
        return mask
    past = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
    return past if mask is None else past & mask


def masked_softmax(logits: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Return the attention map of logits (B, heads, N, M); the row of a query without any allowed key is zero."""
    allowed = allowed_pairs(logits.shape[-2], logits.shape[-1], mask, causal, logits.device)
    if allowed is None:
        return logits.softmax(-1)
    # a finite fill: −inf would give a row without any key NaN, in its value and gradient
    weights = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min).softmax(-1)
    return weights if mask is None else weights.masked_fill(~allowed, 0.0)  # a causal mask alone leaves every row a key
