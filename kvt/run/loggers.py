"""Creates the loggers of a run, and lists the hyperparameters that they show."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from kvt.run.sections import TRAINER

OF_TRAINER = ("max_epochs", "max_steps", "precision")
"""The Trainer settings that loggers show as hyperparameters. Notes show limits on batches and early stopping."""


def make_loggers(setting: Any, run: Path, purge_step: int | None = None) -> list[Logger]:
    """Return the loggers that `--logger` asks for.

    Args:
        setting: a name in `kvt.run.parser.LOGGERS`, a Lightning logger, or a list of such names and loggers; True or
            None is "tensorboard".
        run: the run's folder, lightning_logs/<task>/<attn>/version_N.
        purge_step: the first step that a resumed run logs again. From this step on, TensorBoard hides the events that
            the run logged before. None: the run is new.
    """
    made: list[Logger] = []
    for one in setting if isinstance(setting, list) else [setting]:
        if one in ("tensorboard", True, None):  # the folder of this logger is save_dir / name / version
            made.append(TensorBoardLogger(run.parent, "", run.name, default_hp_metric=False, purge_step=purge_step))
        elif one == "csv":
            made.append(CSVLogger(run, name="", version=""))
        elif isinstance(one, Logger):
            made.append(one)
    return made


def hyperparameters(task: Any, data: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters that loggers show. All runs of a task have the same names of hyperparameters.

    A mapping becomes text, because TensorBoard's table shows the entries of a mapping only for a single run.

    Args:
        task: the run's `Task`.
        data: the run's `TaskData`.
        config: the content of the run's config.yaml.
    """
    trainer = {name: config["trainer"].get(name, TRAINER[f"trainer.{name}"]) for name in OF_TRAINER}
    hparams = {**trainer, **task.hparams, **data.hparams, "seed": config["seed_everything"]}
    hparams["optimizer"] = config["optimizer"]
    left_out = ("spec", *data.path_settings)  # a `spec` may hold a whole vocabulary
    shown = {name: value for name, value in hparams.items() if name not in left_out}
    return {name: str(value) if isinstance(value, Mapping) else value for name, value in shown.items()}


def when_best(name: str) -> str:
    """Return the name for a metric of the best checkpoint, which TensorBoard sorts behind curves of train and val.

    >>> when_best("val/loss")
    'when_best/val_loss'
    """
    return f"when_best/{name.replace('/', '_')}"
