"""Checks that a model does not use the tokens that it must predict: a user's own attention may ignore the causal flag.

>>> copies_next, copies_own = lambda tokens: tokens.roll(-1, 1).float(), lambda tokens: tokens.float()
>>> leaks_future(copies_next, torch.arange(6)), leaks_future(copies_own, torch.arange(6))
(True, False)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kvt.system.errors import UserError

TOLERANCE = 1e-3  # relative to the largest output: smaller differences are rounding
SHORT = 16  # length of a second sequence, in which each token has much weight in an average over all


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Context manager: eval mode, no gradients, no compilation; restores the mode of each module."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True


def leaks_future(predict: Callable[[Tensor], Tensor], tokens: Tensor) -> bool:
    """Return whether the output of `predict`, int64 (B, N) → (B, N, …), at position i depends on tokens after i.

    Adjacent `tokens`, int64 (N,), must differ; the first `SHORT` of them are tried as well.
    """
    for length in {min(SHORT, len(tokens)), len(tokens)}:
        starts = torch.tensor([1, length // 2, length - 1], device=tokens.device).unsqueeze(1)  # (3, 1)
        later = torch.arange(length, device=tokens.device) >= starts  # (3, N), in row r all from its start on
        original = tokens[:length].expand(later.shape)
        changed = torch.where(later, original.roll(1, 1), original)
        if outputs_differ(predict(original)[~later], predict(changed)[~later]):
            return True
    return False


def require_causal(attn: str, model: nn.Module, predict: Callable[[Tensor], Tensor], length: int, symbols: int) -> None:
    """Raise UserError, naming --attn, if an output of `predict`, which calls the model, depends on a later symbol.

    Sequences of `length` are tried, and short ones, of so many different `symbols`.
    """
    tokens = torch.arange(length, device=next(model.parameters()).device) % symbols
    with eval_mode(model):
        if leaks_future(predict, tokens):
            raise UserError(f"--attn {attn}: attends to later tokens: make it respect `causal`")


def outputs_differ(outputs: Tensor, others: Tensor) -> bool:
    """Return whether outputs differ by more than rounding; NaN counts as equal, `Task` detects divergence."""
    tolerance = max(TOLERANCE, 4 * torch.finfo(outputs.dtype).eps)
    return bool((outputs - others).abs().max() > tolerance * outputs.abs().max())
