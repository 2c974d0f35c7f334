"""Creates the loggers of a run, and lists the hyperparameters and scores that they show."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from kvt.run.sections import TRAINER

ABSENT = float("nan")
"""The value of a score that a run lacks. TensorBoard's table still has a column for the score."""
OF_TRAINER = ("max_epochs", "max_steps", "precision")
"""The Trainer settings that loggers show as hyperparameters. Notes show limits on batches and early stopping."""


def make_loggers(setting: Any, run: Path, purge_step: int | None = None) -> list[Logger]:
    """Return the loggers that `--logger` asks for.

    Args:
        setting: a name in `kvt.run.parser.LOGGERS`, a Lightning logger, or a list of such names and loggers; True or
            None is "tensorboard".
        run: the run's folder, lightning_logs/<task>/<attn>/version_N.
        purge_step: the first step that a resumed run logs again. From this step on, TensorBoard hides the events that
            the run logged before, and the CSV loses the rows. None: the run is new.
    """
    setting = "tensorboard" if setting in (None, True) else "none" if setting is False else setting
    asked: Sequence[Any] = setting if isinstance(setting, list) else [setting]
    return [_make(one, run, purge_step) for one in asked if one != "none"]


def hyperparameters(task: Any, data: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters that loggers show. All runs of a task have the same names of hyperparameters.

    Args:
        task: the run's `Task`.
        data: the run's `TaskData`.
        config: the content of the run's config.yaml.
    """
    trainer = {name: config["trainer"].get(name, TRAINER[f"trainer.{name}"]) for name in OF_TRAINER}
    hparams = {**trainer, **task.hparams, **data.hparams, "seed": config["seed_everything"]}
    left_out = ("spec", *data.path_settings)  # a `spec` may hold a whole vocabulary
    hparams = {name: value for name, value in hparams.items() if name not in left_out}
    return {**hparams, "optimizer": config["optimizer"]}


def score_names(task: Any, data: Any) -> list[str]:
    """Return the names of all scores that a run of a task may have, in the form of `when_best`.

    The list has no metrics with several values, whose names contain {}.
    """
    stages = [stage for stage in ("val", "test") if stage in data.splits]
    of_stages = [f"{stage}/{m.name}" for stage in stages for m in task.metrics if stage in m.stages]
    return [when_best(name) for name in of_stages if "{" not in name]


def when_best(name: str) -> str:
    """Return the name for a metric of the best checkpoint, which TensorBoard sorts behind curves of train and val.

    >>> when_best("val/loss")
    'when_best/val_loss'
    """
    return f"when_best/{name.replace('/', '_')}"


class _TensorBoard(TensorBoardLogger):
    """A TensorBoard logger without a chart of the epoch number, and without the scores that are `ABSENT`."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        shown = {name: value for name, value in metrics.items() if name != "epoch" and value is not ABSENT}
        super().log_metrics(shown, step)

    def log_hyperparams(self, params: Any, metrics: Any = None, step: int | None = None) -> None:
        """Log a mapping as one text, because TensorBoard's table shows entries of a mapping only for a single run."""
        texts = {name: str(value) if isinstance(value, Mapping) else value for name, value in params.items()}
        super().log_hyperparams(texts, metrics, step)


class _CSV(CSVLogger):
    """A CSV logger that keeps a resumed run's earlier rows. Lightning's logger deletes these rows."""

    def __init__(self, run: Path, purge_step: int | None) -> None:
        super().__init__(run, name="", version="")
        path = run / "metrics.csv"
        if purge_step is not None and path.exists():
            with path.open(encoding="utf-8", newline="") as file:
                rows = [{name: cell for name, cell in row.items() if cell} for row in csv.DictReader(file)]
            self.experiment.metrics += [row for row in rows if int(row.get("step", purge_step)) < purge_step]
            self.save()


def _make(one: Logger | str, run: Path, purge_step: int | None) -> Logger:
    match one:
        case "tensorboard":
            # TensorBoardLogger's folder is save_dir / name / version
            return _TensorBoard(run.parent, "", run.name, default_hp_metric=False, purge_step=purge_step)
        case "csv":
            return _CSV(run, purge_step)
        case Logger():
            return one
    raise AssertionError(f"unknown logger {one!r}")
