"""What runs must have in common to be trained as one."""

from collections.abc import Callable, Mapping, Sequence
from inspect import isfunction
from typing import Any, Protocol

import lightning as L
from lightning.pytorch.core.hooks import DataHooks, ModelHooks
from torch import Tensor

from kvt.data.loader import Batches
from kvt.system.errors import UserError
from kvt.tasks import Task, TaskData
from kvt.training.callbacks import History

OWN = ("lr", "spec")
"""Settings of a model in which members may differ: what a spec makes of the model is compared there."""
BY_ITS_TRAINER = {
    *("prepare_data", "setup", "teardown", "configure_model", "configure_sharded_model", "configure_optimizers"),
    *("on_fit_start", "on_fit_end", "on_train_end", "train_dataloader", "val_dataloader", "test_dataloader"),
    "forward",
}
"""What a task may do its own way, besides to predict: its own Trainer calls it, or its `compute_metrics` does."""
HOOKS = sorted(
    name
    for base in (ModelHooks, DataHooks, L.LightningModule)
    for name, method in vars(base).items()
    if isfunction(method) and not name.startswith("_") and "predict" not in name and name not in BY_ITS_TRAINER
)
"""What a task may not do its own way: of its methods a fleet calls `compute_metrics` and `num_predictions`."""


class Member(Protocol):
    """A run that has come to the beginning of its training, as a fleet sees it."""

    model: Task
    datamodule: TaskData
    trainer: L.Trainer
    history: History

    @property
    def trainer_settings(self) -> dict[str, Any]: ...

    @property
    def to_test(self) -> bool: ...

    def record(self, means: Mapping[str, float | Tensor], step: int) -> None: ...

    def notify(self, hook: str) -> None: ...

    def take_test(self, means: dict[str, float]) -> None: ...


def require_alike(members: Sequence[Member]) -> None:
    """Makes sure that members can be trained as one.

    Raises:
        UserError: they cannot; it says why.
    """
    task = members[0].model
    if own := own_hooks(type(task)):
        raise UserError(f"--fleet: {type(task).__name__} does more than to measure ({own[0]}): run it alone")
    if any(member.trainer_settings["callbacks"] for member in members):
        raise UserError(
            "--fleet: the configuration's trainer.callbacks would hear of no step: leave out one of the two"
        )
    _require_same("--model", members, lambda member: type(member.model).__name__)
    _require_same("--data", members, lambda member: type(member.datamodule).__name__)
    for name in [name for name in task.hparams if name not in OWN]:
        _require_same(f"--{name}", members, lambda member, name=name: member.model.hparams.get(name))  # type: ignore[misc]
    _require_same("the shapes of the weights", members, lambda member: _shapes(member.model.named_parameters()))
    _require_same("the shapes of the buffers", members, lambda member: _shapes(member.model.named_buffers()))
    for split in members[0].datamodule.splits:
        _require_same(f"the {split} data", members, lambda member, s=split: _sizes(member.datamodule, s))  # type: ignore[misc]
    for name in members[0].trainer_settings:
        _require_same(f"--{name}", members, lambda member, name=name: member.trainer_settings[name])  # type: ignore[misc]


def require_one_device(trainer: L.Trainer) -> None:
    """Makes sure that a fleet can be trained so.

    Raises:
        UserError: on several devices, or in float16, whose one scaling factor all members would have to share.
    """
    if trainer.num_devices * trainer.num_nodes > 1:
        raise UserError("--fleet trains on one device: --devices 1")
    if str(trainer.precision).startswith("16"):
        raise UserError("--fleet: --precision 16 scales all losses alike: choose bf16-mixed or 32")


def own_hooks(task: type) -> list[str]:
    """What a class of tasks does its own way in a step, which keeps it out of fleets."""
    return [name for name in HOOKS if overrides(task, name, Task)]


def overrides(found: type, name: str, base: type) -> bool:
    """Whether a class has a method of its own in place of that of a base class.

    >>> overrides(bool, "__add__", int), overrides(bool, "__and__", int)
    (False, True)
    """
    return getattr(found, name, None) is not getattr(base, name, None)


def _require_same(what: str, members: Sequence[Member], of: Callable[[Member], Any]) -> None:
    first = of(members[0])
    for member in members:
        if (other := of(member)) != first:
            raise UserError(f"--fleet: members must share {what}: {first!s:.100} and {other!s:.100}")


def _shapes(named: Any) -> Mapping[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in named}


def _sizes(data: Any, split: str) -> tuple[Any, ...]:
    """Of the batches of a split: how many, of how many rows, and the shapes of a row."""
    rows: Batches = data.make_batches(*data.splits[split], batch_size=data.batch_size, seed=data.seed)
    shapes = [(tuple(tensor.shape[1:]), tensor.dtype) for tensor in rows.tensors]
    return (data.batch_size, rows.rows, *shapes)
