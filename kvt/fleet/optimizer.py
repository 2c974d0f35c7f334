"""One optimiser for many models, each at its own rate, clipped by its own norm."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from kvt.system.errors import UserError

KNOWN = (Adam, AdamW, SGD)
"""Optimisers that treat every number alone and whose step is proportional to the rate."""
OWN = ("params", "lr", "initial_lr", "max_lr", "min_lr")
"""What may differ between the groups of two members."""
SHARED = "step"
"""The entry of an optimiser's state that all members have in common: the number of steps."""


def join_optimizers(members: Sequence[Optimizer], stacked: Mapping[nn.Parameter, nn.Parameter]) -> Optimizer:
    """An optimiser of the stacked parameters that is where its members are.

    Args:
        members: of one class and with the same settings, but for their rates.
        stacked: from each parameter of the first member to those of all.

    Raises:
        UserError: they differ, or are of a class that does not go together.
    """
    first = members[0]
    if type(first) not in KNOWN:
        raise UserError(f"--fleet: takes {', '.join(kind.__name__ for kind in KNOWN)}, not {type(first).__name__}")
    if any(_options(member) != _options(first) for member in members):
        raise UserError("--fleet: the members' optimisers differ in more than the rate")
    groups = [
        {**options, "params": [stacked[p] for p in group["params"]]}
        for options, group in zip(_options(first), first.param_groups, strict=True)
    ]
    joined = type(first)(groups)  # type: ignore[call-arg]
    for theirs in zip(*map(_parameters, members), strict=True):
        states = [member.state.get(p, {}) for member, p in zip(members, theirs, strict=True)]
        joined.state[stacked[theirs[0]]] = {
            name: torch.stack([state[name] for state in states]) if _is_own(name, value) else value
            for name, value in states[0].items()
        }
    return joined


def split_optimizer(joined: Optimizer, members: Sequence[Optimizer]) -> None:
    """Brings the states of the members to where the joined optimiser is."""
    for stacked, *theirs in zip(_parameters(joined), *map(_parameters, members), strict=True):
        for n, (member, p) in enumerate(zip(members, theirs, strict=True)):
            if state := joined.state.get(stacked):  # a frozen one has none
                member.state[p] = {
                    name: value[n].clone() if _is_own(name, value) else value for name, value in state.items()
                }


@contextmanager
def own_rates(joined: Optimizer, members: Sequence[Optimizer]) -> Iterator[None]:
    """Makes the step within one that each member takes at its own rate, as its schedule has it.

    A step of rate r is r times a step of rate 1:  p ← p + rᵢ (p' − p), with p' after a step of rate 1.
    """
    moves: list[tuple[Tensor, Tensor, Tensor]] = []
    for group, options, *theirs in zip(
        joined.param_groups, _options(members[0]), *(member.param_groups for member in members), strict=True
    ):
        rates = [their["lr"] for their in theirs]
        group |= options  # a schedule may move them too
        if len({*rates}) == 1:
            group["lr"] = rates[0]
            continue
        group["lr"] = 1.0
        for p in group["params"]:
            rate = torch.tensor(rates, dtype=p.dtype, device=p.device).view(-1, *[1] * (p.ndim - 1))
            moves.append((p, p.detach().clone(), rate))
    yield
    with torch.no_grad():
        for p, before, rate in moves:
            torch.lerp(before, p, rate, out=p)


def clip_norms(gradients: Sequence[Tensor], limit: float) -> None:
    """Scales each member's gradients, (N, …), down to a norm of `limit` where it is greater, as torch does alone."""
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)  # (N,)
    factor = (limit / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype).view(-1, *[1] * (gradient.ndim - 1)))


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name not in OWN} for group in optimizer.param_groups]


def _is_own(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and name != SHARED
