"""Whether a model sees what it is to predict: an attention of the user's own may forget what it is told to hide.

>>> knows_the_next, knows_its_own = lambda tokens: tokens.roll(-1, 1).float(), lambda tokens: tokens.float()
>>> leaks_future(knows_the_next, torch.arange(6)), leaks_future(knows_its_own, torch.arange(6))
(True, False)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

ROUNDING = 1e-3
"""What differs by less, of the largest output, is the same, whatever the kernel; but for halves, which round more."""
FEW = 16
"""Tokens of which each is a large part of whatever looks at all."""


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Lets a model be tried out as it evaluates, and leaves it as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def leaks_future(predict: Callable[[Tensor], Tensor], tokens: Tensor) -> bool:
    """Whether what is predicted behind a token changes with the tokens after it, of these or of the first few.

    Args:
        predict: int64 (B, N) → (B, N, …).
        tokens: int64 (N), neighbours different.
    """
    return any(_leaks_future(predict, tokens[:length]) for length in {min(FEW, len(tokens)), len(tokens)})


def _leaks_future(predict: Callable[[Tensor], Tensor], tokens: Tensor) -> bool:
    ends = torch.tensor([1, len(tokens) // 2, len(tokens) - 1], device=tokens.device).unsqueeze(1)
    later = torch.arange(len(tokens), device=tokens.device) >= ends  # in each row, all from its end on
    before = tokens.expand(later.shape)
    after = torch.where(later, before.roll(1, 1), before)
    return differ(predict(before)[~later], predict(after)[~later])


def differ(outputs: Tensor, others: Tensor) -> bool:
    """Whether a model's outputs are others, up to rounding; what is no number is left to those who look for that."""
    rounding = max(ROUNDING, 4 * torch.finfo(outputs.dtype).eps)
    return bool((outputs - others).abs().max() > rounding * outputs.abs().max())
