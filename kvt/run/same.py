"""Checks that compare settings and data with those of the run that saved a checkpoint. A user may change:

* to resume (--resume): the paths of the data, and the settings in `TO_RESUME`.
* to continue (fit --ckpt_path): the paths of the data, and the Trainer's settings. The data and the settings of task,
  optimiser and data must be the same.
* to begin from weights without an optimiser (fit --ckpt_path of the zoo or kvt convert): everything except the data's
  `spec`, such as the vocabulary, and the shapes of the weights.
* to measure (validate, test, predict): the paths of the data, and the settings in `TO_MEASURE`. `test` and `predict`
  also accept other data that the model can read. `validate` accepts other data only if it measures all examples,
  because their validation split may contain training data of the run.
"""

from collections.abc import Collection, Mapping
from inspect import signature
from typing import Any

from kvt.run.load_checkpoint import Checkpoint
from kvt.run.sections import differing
from kvt.system.errors import UserError, argument_types
from kvt.tasks import Task, TaskData

TO_RESUME = ("enable_progress_bar",)
TO_MEASURE = ("batch_size", "optimizer")
OWN_CONFIG = "pass the run's own config.yaml"
OTHER_DATA = "name the run's own data, or start a new run"


def load_data(checkpoint: Checkpoint, **given: Any) -> TaskData:
    """Return the data of a checkpoint's run, set up for validation. `given` replaces settings in the checkpoint.

    Raises UserError if the data, or settings of the data, differ from those of the run.
    """
    with checkpoint.add_checkpoint_path():
        cls = checkpoint.class_of("data")
        if strange := given.keys() - argument_types(cls).keys():
            raise UserError(f"{cls.__name__} takes no {min(strange)}: drop --{min(strange)}")
        data: TaskData = checkpoint.build(cls, checkpoint.settings("data", cls) | given)
        data.prepare_data()
        data.setup("validate")
        require_same(checkpoint, data)
        require_same_content(checkpoint, data)
    return data


def require_same(
    checkpoint: Checkpoint,
    data: TaskData,
    task: Task | None = None,
    free: Collection[str] = (),
    remedy: str = OWN_CONFIG,
) -> None:
    """Raise UserError unless task, optimiser, data and their `spec` have the settings of a checkpoint's run.

    Paths and the settings in `free` may differ. If a later version of kvt has added a setting of the data, it is not
    compared. If a later version has added a setting of the task, the setting is compared with its default.
    """
    model, saved = checkpoint.hparams.values()
    if task is not None:
        name = str(checkpoint.saved.get("model_class") or type(task).__name__)
        arguments = signature(type(task)).parameters
        model = {name: arguments[name].default for name in task.hparams if name in arguments} | {**model}
        if name.rpartition(".")[2] != type(task).__name__ or model.keys() != task.hparams.keys():
            raise checkpoint.error(f"contains another task than {type(task).__name__}: {OWN_CONFIG}")
        ours = {**task.hparams, "optimizer": task.optimizer_config}
        theirs = {**model, "optimizer": checkpoint.saved.get("optimizer")}
        _require_equal(checkpoint, ours, theirs, OWN_CONFIG, ("spec", *free))
    require_same_spec(checkpoint, data)
    may_differ = ("content", *data.path_settings, *free)
    _require_equal(checkpoint, {name: data.hparams.get(name) for name in saved}, saved, remedy, may_differ)


def require_same_spec(checkpoint: Checkpoint, data: TaskData) -> None:
    """Raise UserError if the data's `spec`, such as the vocabulary, differs from the `spec` of a checkpoint's model."""
    _require_equal(checkpoint, data.spec, data.spec if checkpoint.spec is None else checkpoint.spec, OTHER_DATA, ())


def _require_equal(
    checkpoint: Checkpoint, here: Mapping[str, Any], there: Mapping[str, Any], remedy: str, free: Collection[str]
) -> None:
    for name, ours, theirs in differing(here, there):
        if name not in free:
            short = max(len(str(ours)), len(str(theirs))) <= 60
            made_with = f"{name}={theirs}, not {ours}" if short else f"another {name}"
            raise checkpoint.error(f"made with {made_with}: {remedy}")


def require_same_content(checkpoint: Checkpoint, data: TaskData) -> None:
    """Raise UserError if the data, after `setup`, differ from the training data of a checkpoint's run."""
    if checkpoint.trained_on not in (None, data.content):
        raise checkpoint.error(f"its run was trained on other data: {OTHER_DATA}")
