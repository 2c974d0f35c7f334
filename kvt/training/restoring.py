"""The state of training in a checkpoint, compared with what such a run keeps.

Lightning and torch take any, and fail with it later: in the middle of a step, or by computing something else.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import Optimizer

from kvt.system.errors import UserError
from kvt.tasks import Task, TaskData
from kvt.training.load_checkpoint import MAX_COUNT, Checkpoint

LOADERS = "combined_loader"


class UnlikeError(Exception):
    """Says what is of another kind than it is in this run."""


def require_progress(source: Checkpoint, trainer: L.Trainer, task: Task, data: TaskData) -> None:
    """Makes sure of all in a checkpoint that says how far training has come, but for what `Restoring` looks at.

    Args:
        source: the checkpoint.
        trainer: that is to go on from it.
        task: that it trains.
        data: that it trains on, set up.

    Raises:
        UserError: something is not what this run would keep.
    """
    checkpoint, served = source.content, data.train_dataloader()
    loops = trainer.fit_loop.state_dict()
    try:
        theirs = checkpoint["loops"]["fit_loop"]
        if LOADERS in theirs["state_dict"]:
            loops["state_dict"] = {LOADERS: [served.state_dict()]}
        _require_like(theirs, loops, "progress")
        _require_like(checkpoint[type(data).__qualname__], served.state_dict(), "place in the data")
        if checkpoint[type(data).__qualname__]["batch"] > len(served):
            raise UnlikeError("place in the data")
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if (state := checkpoint["callbacks"].get(callback.state_key)) is not None:
                _require_callback(state, callback)
        _require_history(checkpoint, task)
    except (UnlikeError, AttributeError, KeyError, TypeError) as error:
        raise _broken(source.path, error) from error


class Restoring(L.Callback):
    """Looks at what a checkpoint keeps for optimizers and schedules once they are made, before they are given it.

    Args:
        path: of the checkpoint.

    Raises:
        UserError: it is not what they would keep.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self._checkpoint: dict[str, Any] | None = None

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keeps it until then."""
        self._checkpoint = checkpoint

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Looks."""
        if self._checkpoint is None:
            return
        schedules = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
        plugin = trainer.precision_plugin
        try:
            _require_like(self._checkpoint["lr_schedulers"], schedules, "learning rate")
            states = self._checkpoint["optimizer_states"]
            if len(states) != len(trainer.optimizers):
                raise UnlikeError("optimizers")
            for state, optimizer in zip(states, trainer.optimizers, strict=True):
                _require_optimizer(state, optimizer)
            if plugin.state_dict():
                _require_like(self._checkpoint[type(plugin).__qualname__], plugin.state_dict(), "precision")
        except (UnlikeError, AttributeError, KeyError, TypeError) as error:
            raise _broken(self.path, error) from error
        self._checkpoint = None


def _broken(path: str | Path, error: Exception) -> UserError:
    return UserError(f"--ckpt_path {path}: training cannot go on from it: not what such a run keeps: {error}")


def _require_callback(state: Mapping[str, Any], callback: L.Callback) -> None:
    name = type(callback).__qualname__
    if isinstance(callback, ModelCheckpoint):
        score = state["best_model_score"]
        paths = [value for value in (*state.values(), *state["best_k_models"]) if isinstance(value, str)]
        if any(".." in Path(path).parts or "://" in path for path in paths):  # it deletes what was best before
            raise UnlikeError(name)
        if not (score is None or (isinstance(score, Tensor) and not score.ndim and not score.is_complex())):
            raise UnlikeError(name)
    elif type(callback).__module__.startswith("kvt."):
        _require_like(state, callback.state_dict(), name)


def _require_history(checkpoint: Mapping[str, Any], task: Task) -> None:
    if not isinstance(checkpoint.get("diverged"), str | None):
        raise UnlikeError("diverged")
    for row in checkpoint.get("history", ()):
        if not {"step", "seconds"} <= row.keys() or not all(isinstance(value, int | float) for value in row.values()):
            raise UnlikeError("history")
        _require_like(row["step"], 0, "history")
    weights = dict(task.named_parameters())
    for process in checkpoint.get("processes", ()):
        for name, sums in process["running"].items():
            metric = task.metrics[f"train/{name}"]
            _require_like(sums, metric.metric_state, f"mean of {name}")
        for name, gradient in process["gradients"].items():
            _require_like(gradient, weights[name], f"gradient of {name}")


def _require_optimizer(state: Mapping[str, Any], optimizer: Optimizer) -> None:
    ours = optimizer.state_dict()
    groups = [{key: group[key] for key in group if key in ours["param_groups"][0]} for group in state["param_groups"]]
    _require_like(groups, ours["param_groups"], "optimizer")  # another version of torch may know more
    numbers = [number for group in groups for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if sorted(numbers) != list(range(len(parameters))) or not state["state"].keys() <= {*numbers}:
        raise UnlikeError("optimizer")
    kept = _kept(optimizer)
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in state["state"]:
            forms = {name: parameter if whole else value for name, (value, whole) in kept.items()}
            _require_like(state["state"][number], forms, "optimizer")


def _kept(optimizer: Optimizer) -> dict[str, tuple[Any, bool]]:
    """What an optimizer keeps for a parameter: each by its name, and whether it is of the parameter's shape."""
    first = optimizer.param_groups[0]
    toy = nn.Parameter(torch.zeros(3, device=first["params"][0].device))
    toy.grad = torch.zeros_like(toy)
    twin = copy.copy(optimizer)
    twin.state, twin.param_groups = defaultdict(dict), [{**first, "params": [toy]}]
    type(optimizer).step(twin)
    return {
        name: (value, isinstance(value, Tensor) and value.shape == toy.shape) for name, value in twin.state[toy].items()
    }


def _require_like(theirs: Any, ours: Any, where: str) -> None:
    """Makes sure that a value has the type of another; a mapping also its keys, but for what is off where it is new."""
    if isinstance(ours, Mapping):
        off = {key for key, value in ours.items() if value is None or value is False}
        if not isinstance(theirs, Mapping) or not ours.keys() - off <= theirs.keys() <= ours.keys():
            raise UnlikeError(where)
        for key, value in theirs.items():
            _require_like(value, ours[key], where)
    elif isinstance(ours, list | tuple):
        if type(theirs) is not type(ours) or len(theirs) != len(ours):
            raise UnlikeError(where)
        for value, other in zip(theirs, ours, strict=True):
            _require_like(value, other, where)
    elif not _is_like(theirs, ours):
        raise UnlikeError(where)


def _is_like(theirs: Any, ours: Any) -> bool:
    if isinstance(ours, Tensor):
        return isinstance(theirs, Tensor) and theirs.shape == ours.shape
    if type(ours) is int:
        return type(theirs) is int and 0 <= theirs < MAX_COUNT
    return type(theirs) is type(ours) or (type(ours) is float and type(theirs) is int)
