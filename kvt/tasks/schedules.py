"""Learning-rate schedules by name."""

import math
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiStepLR, OneCycleLR

from kvt.system import UserError, require_choice, require_positive

Factor = Callable[[int], float]  # from the index of a training step to a factor of the learning rate


def total_steps(task: L.LightningModule) -> int:
    """Return the number of optimiser steps of the run; raise UserError if the run has no fixed length."""
    steps = task.trainer.estimated_stepping_batches
    if steps == math.inf:
        remedy = "give the Trainer max_epochs or max_steps (max_time may still end the run), or use schedule=constant"
        raise UserError(f"max_epochs=-1: schedule={task.schedule} spans all steps of the run: {remedy}")
    return max(1, int(steps))  # a run without a step fails later, with another error


def cosine_warmup(warmup: int, total: int) -> Factor:
    """Return the factor of a cosine decay from 1 to 0 over `total` steps, times a linear warm-up of `warmup` steps.

    factor(t) = ½ (1 + cos(π t / total)) · min(1, t / warmup)   (Borji 2023, §3.1: CosineWarmupScheduler, warm-up 5)

    >>> [round(cosine_warmup(2, 4)(t), 3) for t in range(5)]
    [0.0, 0.427, 0.5, 0.146, 0.0]
    """
    return lambda step: 0.5 * (1 + math.cos(math.pi * step / total)) * (min(1.0, step / warmup) if warmup else 1.0)


def cosine_after_warmup(warmup: int, total: int, floor: float) -> Factor:
    """Return the factor of a linear warm-up from 0 to 1, followed by a cosine decay from 1 to `floor`.

    factor(t) = t / warmup for t < warmup, then floor + (1 − floor) ½ (1 + cos(π (t − warmup) / (total − warmup)))

    >>> [round(cosine_after_warmup(2, 6, 0.1)(t), 3) for t in range(7)]
    [0.0, 0.5, 1.0, 0.868, 0.55, 0.232, 0.1]
    """

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        part = min(1.0, (step - warmup) / max(1, total - warmup))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * part))

    return factor


def constant_after_warmup(warmup: int) -> Factor:
    """Return the factor of a linear warm-up to 1: factor(t) = min(1, (t + 1) / warmup)."""
    return lambda step: min(1.0, (step + 1) / warmup)


def inverse_square_root(warmup: int) -> Factor:
    """Return the factor of a linear warm-up to 1 over `warmup` steps, followed by a decay with 1/√step.

    factor(t) = min((warmup / (t + 1))^½, (t + 1) / warmup)

    >>> [round(inverse_square_root(4)(t), 4) for t in (0, 3, 15)]
    [0.25, 1.0, 0.5]
    """
    return lambda step: min((warmup / (step + 1)) ** 0.5, (step + 1) / warmup)


def noam(dim: int, warmup: int) -> Factor:
    """Return the factor of `inverse_square_root`, scaled to a peak of (dim · warmup)^−½.

    factor(t) = dim^−½ · min((t + 1)^−½, (t + 1) · warmup^−1.5)   (Vaswani et al. 2017, eq. 3; Borji 2023, §3.3)

    >>> [round(noam(4, 4)(t), 4) for t in (0, 3, 15)]
    [0.0625, 0.25, 0.125]
    """
    return lambda step: dim**-0.5 * min((step + 1) ** -0.5, (step + 1) * warmup**-1.5)


class OneCycle(OneCycleLR):
    """torch's one-cycle schedule, which a resumed run may stretch or shrink to another number of steps."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore all but the schedule's length; raise UserError if the run has already taken more steps than that."""
        if (step := state_dict["last_epoch"]) > self.total_steps:
            cycle = f"the run has taken {step} steps, but its one_cycle schedule has {self.total_steps}"
            raise UserError(f"{cycle}: raise max_epochs or max_steps")
        own = {name: value for name, value in self.state_dict().items() if name in ("total_steps", "_schedule_phases")}
        super().load_state_dict({**state_dict, **own})


def one_cycle(task: Any, optimizer: Optimizer) -> LRScheduler:
    """Return a one-cycle schedule, which also varies momentum or the first beta, unless `--optimizer` sets it."""
    named = task.optimizer_config or {}
    has_momentum = "betas" in optimizer.defaults or optimizer.defaults.get("momentum")
    cycles = bool(has_momentum) and named.get("init_args", {}).keys().isdisjoint(("betas", "momentum"))
    schedule = OneCycle(optimizer, task.lr, total_steps=total_steps(task), cycle_momentum=cycles)
    if named and cycles:
        task.metric_notes["momentum"] = "one_cycle: momentum (Adam: the first beta) falls from 0.95 to 0.85, then rises"
    return schedule


def by_factor(make: Callable[[Any], Factor]) -> Callable[[Any, Optimizer], LRScheduler]:
    """Return a function that makes a schedule from a task and its optimiser; `make` maps the task to the factor."""
    return lambda task, optimizer: LambdaLR(optimizer, make(task))


SCHEDULES: dict[str, Callable[[Any, Optimizer], LRScheduler]] = {
    "cosine": by_factor(lambda task: cosine_warmup(task.warmup, total_steps(task))),
    "cosine_to_tenth": by_factor(lambda task: cosine_after_warmup(task.warmup, total_steps(task), floor=0.1)),
    "one_cycle": one_cycle,
    "inverse_sqrt": by_factor(lambda task: inverse_square_root(task.warmup)),
    "noam": by_factor(lambda task: noam(task.dim, task.warmup)),
    "constant": by_factor(lambda task: constant_after_warmup(task.warmup)),
    "multistep": lambda task, optimizer: MultiStepLR(optimizer, task.milestones, gamma=0.1),
}
NEEDS = {"noam": "dim", "multistep": "milestones"}  # schedule → attribute that a task must have to use it
NO_WARMUP = ("one_cycle", "multistep")
WARMUP = ("inverse_sqrt", "noam")


def require_schedule(task: L.LightningModule, schedule: str, warmup: int) -> None:
    """Raise UserError if the task has no schedule of this name, or if the schedule does not allow this warm-up."""
    known = [name for name in SCHEDULES if hasattr(task, NEEDS.get(name, "lr"))]
    require_choice("schedule", schedule, known)
    if schedule in WARMUP:
        require_positive(warmup=warmup)
    if warmup < 0:
        raise UserError(f"warmup={warmup} must be 0 or more")
    if warmup and schedule in NO_WARMUP:
        raise UserError(f"schedule={schedule} has no warm-up: pass warmup=0, or choose another schedule")


def warmup_note(task: Any) -> dict[str, str]:
    """Return {"warmup": note} if the run ended in its warm-up, or always had less than half the full learning rate.

    Return {} otherwise, and if there was no warm-up or no training step. The full learning rate is the optimiser's
    base rate; with noam, it is the rate at the end of the warm-up.
    """
    schedule, steps = task.lr_schedulers(), task.trainer.global_step
    if not (isinstance(schedule, LambdaLR) and task.warmup and steps):
        return {}
    factor, lr = schedule.lr_lambdas[0], schedule.base_lrs[0]
    full = lr * (factor(task.warmup - 1) if task.schedule == "noam" else 1)
    highest = lr * max(map(factor, range(steps)))
    if steps >= task.warmup and highest >= full / 2:
        return {}
    reached = f"the learning rate reached at most {highest:.3g}, {highest / full:.0%} of {full:.3g}"
    return {"warmup": f"{task.warmup} steps in a run of {steps}: {reached}"}


def with_schedule(task: Any, optimizer: Optimizer) -> OptimizerLRScheduler:
    """Return the result of `configure_optimizers`: the optimiser and, unless the rate is constant, its schedule."""
    if task.schedule == "constant" and not task.warmup:
        return optimizer
    schedule = SCHEDULES[task.schedule](task, optimizer)
    interval = "epoch" if task.schedule == "multistep" else "step"
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": interval}}
