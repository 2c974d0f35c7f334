"""Conditions for training runs as one fleet."""

from collections.abc import Sequence
from inspect import isfunction
from itertools import product
from typing import Any

import lightning as L
from lightning.pytorch.core.hooks import DataHooks, ModelHooks

from kvt.fleet.member import FleetRun
from kvt.system.errors import UserError
from kvt.tasks import Task

CALLED_FOR_EACH_RUN = {
    *("prepare_data", "setup", "teardown", "configure_model", "configure_sharded_model", "configure_optimizers"),
    *("on_fit_start", "on_fit_end", "on_train_end", "train_dataloader", "val_dataloader", "test_dataloader"),
    "forward",
}
"""Methods that a task in a fleet may override: the run's own Trainer calls them, or `compute_metrics` does."""
HOOKS = sorted(
    name
    for base in (ModelHooks, DataHooks, L.LightningModule)
    for name, method in vars(base).items()
    if isfunction(method) and not name.startswith("_") and "predict" not in name and name not in CALLED_FOR_EACH_RUN
)
"""Methods that a task in a fleet may not override, since a fleet does not call them."""


def require_alike(members: Sequence[FleetRun]) -> None:
    """Raise UserError if members cannot be trained as one; the message names the first difference."""
    task = type(members[0].model)
    if hooks := own_hooks(task):
        raise UserError(f"--fleet: a fleet does not call {task.__name__}.{hooks[0]}: run it alone")
    if any(member.trainer_settings["callbacks"] for member in members):
        raise UserError("--fleet: a fleet does not call the trainer.callbacks of the configuration: leave out one")
    first, *others = map(_shared, members)
    for other, (name, value) in product(others, first.items()):
        if other.get(name) != value:
            raise UserError(f"--fleet: members must share {name}: {value!s:.100} and {other.get(name)!s:.100}")


def own_hooks(task: type) -> list[str]:
    """Return the methods that keep a class of tasks out of fleets: overridden ones that a fleet does not call."""
    return [name for name in HOOKS if getattr(task, name, None) is not getattr(Task, name, None)]


def _shared(member: FleetRun) -> dict[str, Any]:
    """Return what all members must share, by its name in a message; in place of `spec`, the shapes that follow."""
    model, data = member.model, member.datamodule
    return {
        "--model": type(model).__name__,
        "--data": type(data).__name__,
        **{f"--{name}": value for name, value in model.hparams.items() if name not in ("lr", "spec")},
        "the shapes of the weights": {name: tuple(weight.shape) for name, weight in model.named_parameters()},
        "the shapes of the buffers": {name: tuple(buffer.shape) for name, buffer in model.named_buffers()},
        "the batch size": data.batch_size,
        **{f"the {split} data": [(tuple(t.shape), t.dtype) for t in data.splits[split]] for split in data.splits},
        **{f"--{name}": value for name, value in member.trainer_settings.items()},
    }
