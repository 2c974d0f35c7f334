"""Checks that a causal model does not use later tokens.

>>> copies_next, copies_own = lambda tokens: tokens.roll(-1, 1).float(), lambda tokens: tokens.float()
>>> leaks_future(copies_next, torch.arange(6)), leaks_future(copies_own, torch.arange(6))
(True, False)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kvt.system import UserError

TOLERANCE = 1e-3  # smaller differences, relative to the largest output, are rounding errors
SHORT = 16  # length of the shorter test sequence: in a long one, one token hardly changes an average over all tokens


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Context manager for eval mode, without gradients and compilation; the exit restores the mode of each module."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True


def leaks_future(predict: Callable[[Tensor], Tensor], tokens: Tensor) -> bool:
    """Return whether an output of `predict` at a position changes if later tokens change.

    `predict` maps tokens, int64 (B, N), to outputs, (B, N, …). `tokens`, int64 (N,), must have no equal neighbours,
    because each later token is replaced by its predecessor. A second test uses only the first `SHORT` tokens.
    """
    for length in {min(SHORT, len(tokens)), len(tokens)}:
        starts = torch.tensor([1, length // 2, length - 1], device=tokens.device).unsqueeze(1)  # (3, 1)
        later = torch.arange(length, device=tokens.device) >= starts  # (3, N), True from the row's start on
        original = tokens[:length].expand(later.shape)
        changed = torch.where(later, original.roll(1, 1), original)
        if outputs_differ(predict(original)[~later], predict(changed)[~later]):
            return True
    return False


def require_causal(attn: str, model: nn.Module, predict: Callable[[Tensor], Tensor], length: int, symbols: int) -> None:
    """Raise UserError if an output of `predict`, which calls `model`, depends on a later symbol.

    Test sequences have at most `length` symbols, numbers from 0 to `symbols` − 1.
    """
    tokens = torch.arange(length, device=next(model.parameters()).device) % symbols
    with eval_mode(model):
        if leaks_future(predict, tokens):
            raise UserError(f"attn={attn} attends to later tokens: make the attention respect `causal`")


def outputs_differ(outputs: Tensor, others: Tensor) -> bool:
    """Return whether a model's outputs differ by more than rounding errors; outputs with NaN count as equal."""
    tolerance = max(TOLERANCE, 4 * torch.finfo(outputs.dtype).eps)
    return bool((outputs - others).abs().max() > tolerance * outputs.abs().max())
