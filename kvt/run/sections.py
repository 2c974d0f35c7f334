"""The sections of a run's settings, and Trainer settings that may change a result. The module imports no torch."""

from collections.abc import Mapping
from datetime import timedelta
from enum import Enum
from typing import Any

from kvt.system.errors import UserError

Sections = dict[str, Any]
"""Settings by section, as plain data: {"model": {"lr": 0.001}, "trainer": {"max_epochs": 2}, "seed_everything": 1}."""

BUILT = ("model", "data")
"""The sections with the classes that every run builds: "model" is the task, "data" the data."""
GROUPS = (*BUILT, "trainer")
"""The sections whose settings have a short flag, such as --lr for --model.lr."""
PARTS = (*BUILT, "optimizer")
"""The sections that name a class. A run may lack the section "optimizer"."""
REMOVED = {"teacher": None, "teacher_temperature": 1.0, "teacher_weight": 1.0}
"""Settings of version 0.1, with the values in runs that did not use them."""
OTHERS = ("seed_everything", "compile", "threads", "optimizer", "ckpt_path")
"""The settings and sections of a configuration that `GROUPS` lacks."""
GIVEN = {"spec", "seed"}
"""Arguments of task and data that the run sets, not the user: the data's `spec` and the run's seed."""
RUN_FLAGS = {
    "--config": "name of a task, such as cifar10, or path of a YAML file; a second file overrides the first",
    "--ckpt_path": "path to a checkpoint to measure, or to continue training from in a new run",
    "--resume": "folder of a stopped run to resume; the result is the same as that of a run without the stop",
    "--model": "import path of your task class, such as my_task.MyTask",
    "--data": "import path of your data class, such as my_task.MyData",
}
"""The flags that choose a task, a checkpoint or a run, with their help texts."""

TRAINER_DEFAULTS = {"num_sanity_val_steps": 0, "enable_model_summary": False, "log_every_n_steps": 20}
"""The Trainer settings for which kvt has other defaults than Lightning."""
KEPT = (
    *("accumulate_grad_batches", "check_val_every_n_epoch", "gradient_clip_algorithm", "gradient_clip_val"),
    *("limit_test_batches", "limit_train_batches", "limit_val_batches", "log_every_n_steps", "max_epochs", "max_steps"),
    *("max_time", "min_epochs", "min_steps", "overfit_batches", "precision", "val_check_interval"),
)
"""The Trainer settings that checkpoints keep: length of training, limits, precision and gradient clipping."""
TRAINER = {
    **{"trainer.accelerator": "auto", "trainer.precision": None, "trainer.callbacks": None},
    **{"trainer.max_epochs": None, "trainer.min_epochs": None, "trainer.max_steps": -1, "trainer.min_steps": None},
    **{"trainer.max_time": None, "trainer.limit_train_batches": None, "trainer.limit_val_batches": None},
    **{"trainer.limit_test_batches": None, "trainer.overfit_batches": 0.0, "trainer.val_check_interval": None},
    **{"trainer.check_val_every_n_epoch": 1, "trainer.log_every_n_steps": 20, "trainer.accumulate_grad_batches": 1},
    **{"trainer.gradient_clip_val": None, "trainer.gradient_clip_algorithm": None, "trainer.deterministic": None},
    **{"trainer.benchmark": None, "trainer.detect_anomaly": False, "trainer.reload_dataloaders_every_n_epochs": 0},
}
"""Defaults of Trainer settings that may change a result. Other settings concern processes, output and folders."""


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (name, value in `ours`, value in `theirs`) of each differing setting, by name; a missing value is None."""
    names = sorted(ours.keys() | theirs.keys())
    return [(name, ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)]


def plain(value: Any) -> Any:
    """Return a copy for YAML and JSON, made of numbers, strings, lists and mappings.

    NumPy numbers and arrays become Python numbers and lists. An `Enum` member becomes its value, a function or class
    its import path, and a `Path` a string. Raises UserError for any other object, and for a function in a function.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, timedelta):
        return {unit: number for unit in ("days", "seconds", "microseconds") if (number := getattr(value, unit))}
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(part) for part in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if callable(value) and (name := getattr(value, "__qualname__", None)):
        if "<" in name:
            raise UserError(f"{name}: a configuration names a function by its import path: define it in a module")
        return f"{value.__module__}.{name}"
    if type(value).__repr__ is object.__repr__:
        remedy = "name its class_path and init_args, or pass a callback as kvt.train(config, callbacks=[…])"
        raise UserError(f"a configuration holds plain data, no object of {type(value).__name__}: {remedy}")
    return next((kind(value) for kind in (str, int, float) if isinstance(value, kind)), str(value))


def without_removed(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a configuration without unused settings of version 0.1."""
    return {name: value for name, value in sections.items() if name not in REMOVED or value != REMOVED[name]}
