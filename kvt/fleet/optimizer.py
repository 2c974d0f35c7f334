"""One optimiser for stacked models, each with its own learning rate and its own gradient norm."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from kvt.system.errors import UserError

ELEMENTWISE = (Adam, AdamW, SGD)  # they update every number by itself, in proportion to the learning rate
MAY_DIFFER = ("params", "lr", "initial_lr", "max_lr", "min_lr")  # options of a parameter group


def join_optimizers(members: Sequence[Optimizer], stacked: Mapping[nn.Parameter, nn.Parameter]) -> Optimizer:
    """Return an optimiser that continues the members' optimisers, which may differ in the learning rate alone.

    `stacked` maps the parameters of the first member to the stacked ones.
    """
    first = members[0]
    if type(first) not in ELEMENTWISE:
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise UserError(f"--fleet: takes {names}, not {type(first).__name__}")
    if any(_options(member) != _options(first) for member in members):
        raise UserError("--fleet: the members' optimisers differ in more than the rate")
    parts = zip(_options(first), first.param_groups, strict=True)
    groups = [{**options, "params": [stacked[p] for p in group["params"]]} for options, group in parts]
    joined = type(first)(groups)  # type: ignore[call-arg]
    for parameters in zip(*map(_parameters, members), strict=True):
        states = [member.state.get(p, {}) for member, p in zip(members, parameters, strict=True)]
        joined.state[stacked[parameters[0]]] = {
            k: torch.stack([state[k] for state in states]) if _is_stacked(k, v) else v for k, v in states[0].items()
        }
    return joined


def split_optimizer(joined: Optimizer, members: Sequence[Optimizer]) -> None:
    for stacked, *parameters in zip(_parameters(joined), *map(_parameters, members), strict=True):
        if state := joined.state.get(stacked):  # a frozen parameter has none
            for n, (member, p) in enumerate(zip(members, parameters, strict=True)):
                member.state[p] = {k: v[n].clone() if _is_stacked(k, v) else v for k, v in state.items()}


@contextmanager
def own_rates(joined: Optimizer, members: Sequence[Optimizer]) -> Iterator[None]:
    """Context manager: a step of the joined optimiser has each member's current learning rate rᵢ.

    If they differ, it takes a step of rate 1, from p to p', of which member i keeps a share:  pᵢ + rᵢ (p'ᵢ − pᵢ).
    """
    moves: list[tuple[Tensor, Tensor, Tensor]] = []
    groups = zip(joined.param_groups, _options(members[0]), *(member.param_groups for member in members), strict=True)
    for group, options, *own in groups:
        rates = [each["lr"] for each in own]
        group |= options  # a schedule may change them, too
        group["lr"] = rates[0] if len({*rates}) == 1 else 1.0
        for p in group["params"] if len({*rates}) > 1 else ():
            rate = torch.tensor(rates, dtype=p.dtype, device=p.device).view(-1, *[1] * (p.ndim - 1))
            moves.append((p, p.detach().clone(), rate))
    yield
    with torch.no_grad():
        for p, before, rate in moves:
            torch.lerp(before, p, rate, out=p)


def clip_norms(gradients: Sequence[Tensor], limit: float) -> None:
    """Scale each member's gradients, (N, …), to a norm of at most `limit`, as `clip_grad_norm_` does for one model."""
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)  # (N,)
    factor = (limit / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype).view(-1, *[1] * (gradient.ndim - 1)))


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k not in MAY_DIFFER} for group in optimizer.param_groups]


def _is_stacked(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and name != "step"  # which all members share
