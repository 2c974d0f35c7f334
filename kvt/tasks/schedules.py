"""Learning-rate schedules that move with every step."""

import math
import warnings
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from kvt.system.errors import UserError
from kvt.tasks.base import Task, make_optimizer


def every_step(optimizer: Optimizer, schedule: LRScheduler) -> OptimizerLRScheduler:
    """Return the result of `configure_optimizers` for a schedule that moves with every step, not with every epoch."""
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def total_steps(task: Task) -> int:
    """Return the number of optimiser steps of the run; raise UserError if the run has no end."""
    steps = task.trainer.estimated_stepping_batches
    if not 0 < steps < math.inf:
        flags = "--max_steps, --max_epochs, --limit_train_batches"
        raise UserError(f"the schedule needs at least one step: check {flags}")
    return int(steps)


def with_cosine(task: Task) -> OptimizerLRScheduler:
    """Return the run's optimiser at the task's `lr`, times `cosine_warmup` over all steps of the run."""
    optimizer = make_optimizer(task)
    return every_step(optimizer, LambdaLR(optimizer, cosine_warmup(task.warmup, total_steps(task))))


def cosine_warmup(warmup: int, total: int) -> Callable[[int], float]:
    """Half a cosine from 1 to 0 over `total` steps, times a linear warm-up of `warmup` steps.

    factor(t) = ½ (1 + cos(π t / total)) · min(1, t / warmup)   (Borji 2023, §3.1: CosineWarmupScheduler, warm-up 5)

    >>> [round(cosine_warmup(2, 4)(t), 3) for t in range(5)]
    [0.0, 0.427, 0.5, 0.146, 0.0]
    """
    return lambda step: 0.5 * (1 + math.cos(math.pi * step / total)) * min(1.0, step / warmup)


def cosine_after_warmup(warmup: int, total: int, floor: float) -> Callable[[int], float]:
    """A linear warm-up from 0 to 1, then half a cosine from there to `floor`, as language models are trained.

    factor(t) = t / warmup, then floor + (1 − floor) ½ (1 + cos(π (t − warmup) / (total − warmup)))

    >>> [round(cosine_after_warmup(2, 6, 0.1)(t), 3) for t in range(7)]
    [0.0, 0.5, 1.0, 0.868, 0.55, 0.232, 0.1]
    """

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        part = min(1.0, (step - warmup) / max(1, total - warmup))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * part))

    return factor


def inverse_square_root(dim: int, warmup: int) -> Callable[[int], float]:
    """A linear rise over `warmup` steps, then a fall with the square root of the step.

    factor(t) = dim^−½ · min((t + 1)^−½, (t + 1) · warmup^−1.5)   (Vaswani et al. 2017, eq. 3; Borji 2023, §3.5)

    >>> [round(inverse_square_root(4, 4)(t), 4) for t in (0, 3, 15)]
    [0.0625, 0.25, 0.125]
    """
    return lambda step: dim**-0.5 * min((step + 1) ** -0.5, (step + 1) * warmup**-1.5)


class OneCycle(OneCycleLR):
    """torch's one-cycle schedule; in a run that goes on with more steps it keeps its own length, as others do."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the step; raise UserError if the cycle has fewer."""
        if (step := state_dict["last_epoch"]) > self.total_steps:
            cycle = f"the run has taken {step} steps, its learning-rate cycle has {self.total_steps}"
            raise UserError(f"{cycle}: raise --max_epochs or --max_steps")
        own = {name: value for name, value in self.state_dict().items() if name in ("total_steps", "_schedule_phases")}
        super().load_state_dict({**state_dict, **own})


def jump(schedule: LRScheduler) -> tuple[float, float] | None:
    """Return the rate that a schedule was restored with, and its own at that step; None if they are equal.

    They differ where a schedule that spans the whole run goes on in a run of another length. Those of other classes
    than LambdaLR and OneCycleLR do not depend on the length.
    """
    if not isinstance(schedule, LambdaLR | OneCycleLR):
        return None
    with warnings.catch_warnings(action="ignore"):  # torch would have it called while it makes a step
        before, after = float(schedule.get_last_lr()[0]), float(schedule.get_lr()[0])
    return None if math.isclose(before, after) else (before, after)
