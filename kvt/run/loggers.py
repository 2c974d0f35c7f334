"""Loggers by name: Lightning's and one for Trackio; what they are told, and how a run ends for them."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from kvt.run.sections import TRAINER
from kvt.run.settings import trainer_objects

ABSENT = float("nan")
"""A score that a run does not have, but others of its task may: a column of TensorBoard's table."""
OF_TRAINER = ("max_epochs", "max_steps", "precision")
"""The Trainer's settings among the hyperparameters; notes name the others that make a run a shorter one."""


def make_loggers(setting: Any, run: Path, purge_step: int | None = None) -> list[Logger]:
    """Return the loggers that `--logger` asks for.

    Args:
        setting: a name among `kvt.run.settings.LOGGERS`, a class of Lightning's, {"class_path": …}, or a list of
            these; true or None: tensorboard.
        run: the run's folder, lightning_logs/<task>/<attn>/version_N.
        purge_step: TensorBoard hides events from this step on, of a process that was killed.

    Raises:
        ModuleNotFoundError: the package of wandb, trackio or mlflow is not installed.
    """
    setting = trainer_objects({"logger": setting}).get("logger", setting)
    setting = "tensorboard" if setting in (None, True) else "none" if setting is False else setting
    asked: Sequence[Any] = setting if isinstance(setting, list) else [setting]
    return [_make(one, run, purge_step) for one in asked if one != "none"]


def hyperparameters(task: Any, data: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that loggers show: of the same names in all runs of a task.

    Args:
        task: the run's.
        data: likewise.
        config: what its config.yaml holds.
    """
    trainer = {name: config["trainer"].get(name, TRAINER[f"trainer.{name}"]) for name in OF_TRAINER}
    hparams = {**trainer, **task.hparams, **data.hparams, "seed": config["seed_everything"]}
    left_out = ("spec", *data.path_settings)  # a `spec` may hold a whole vocabulary
    hparams = {name: value for name, value in hparams.items() if name not in left_out}
    return {**hparams, "optimizer": config["optimizer"]}


def score_names(task: Any, data: Any) -> list[str]:
    """Return the scores that a run of a task may have, without those of single bins, as `when_best` names them."""
    stages = [stage for stage in ("val", "test") if stage in data.splits]
    of_stages = [f"{stage}/{m.name}" for stage in stages for m in task.metrics if stage in m.stages]
    return [when_best(name) for name in of_stages if "{" not in name]


def when_best(name: str) -> str:
    """Return the name of a metric of the best checkpoint: TensorBoard, which sorts, shows the curves before it.

    >>> when_best("val/loss")
    'when_best/val_loss'
    """
    return f"when_best/{name.replace('/', '_')}"


def end_runs(loggers: Sequence[Logger], run: Path) -> None:
    """End for the loggers what was begun for a run: the next one in this process begins anew.

    A run of W&B's or a place of MLflow's that the user has chosen stays.
    """
    for logger in loggers:
        with suppress(OSError):  # the disk may be full
            match logger:
                case WandbLogger():
                    import wandb

                    if wandb.run and wandb.run.name == _title(run):
                        wandb.finish()
                case TrackioLogger():
                    logger.end()
                case MLFlowLogger() if os.environ.get("MLFLOW_TRACKING_URI") == _database(run):
                    import mlflow

                    nowhere: Any = None  # which it takes, whatever its type says
                    mlflow.set_tracking_uri(nowhere)  # Lightning has set it for the whole process


class TrackioLogger(Logger):
    """Logs to Trackio as `WandbLogger` to W&B, on this machine: `trackio show --project kvt` shows it."""

    def __init__(self, name: str, project: str, group: str) -> None:
        import trackio

        self.trackio: Any = trackio
        self.hparams: dict[str, Any] = {}
        self._names = {"name": name, "project": project, "group": group}

    @property
    def name(self) -> str:
        return self._names["project"]

    @property
    def version(self) -> str:
        return self._names["name"]

    @cached_property
    def experiment(self) -> Any:
        """Trackio's run, begun at the first call; it keeps the hyperparameters that are logged until then."""
        with redirect_stdout(sys.stderr):
            return self.trackio.init(**self._names, config=self.hparams, embed=False)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.hparams |= params

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.experiment.log({**metrics}, step)

    def log_image(self, key: str, images: Sequence[np.ndarray], step: int | None = None) -> None:
        self.log_metrics({key: self.trackio.Image(images[0])}, step)

    def log_text(self, key: str, columns: Sequence[str], data: Sequence[Sequence[str]], step: int | None) -> None:
        self.log_metrics({key: self.trackio.Markdown(data[0][0])}, step)

    def end(self) -> None:
        """End Trackio's run, and wait until it is written."""
        if "experiment" in vars(self):
            with redirect_stdout(sys.stderr):
                self.trackio.finish()


class _TensorBoard(TensorBoardLogger):
    """Leaves out the number of the epoch, whose chart would come before all curves, and scores that are absent."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        shown = {name: value for name, value in metrics.items() if name != "epoch" and value is not ABSENT}
        super().log_metrics(shown, step)

    def log_hyperparams(self, params: Any, metrics: Any = None, step: int | None = None) -> None:
        """Log a mapping as one text: of its parts, TensorBoard would show those that one run has."""
        texts = {name: str(value) if isinstance(value, Mapping) else value for name, value in params.items()}
        super().log_hyperparams(texts, metrics, step)


def _title(run: Path) -> str:
    return "/".join(run.parts[-3:])


def _database(run: Path) -> str:
    return f"sqlite:///{run / 'mlflow.db'}"


def _make(one: Logger | str, run: Path, purge_step: int | None) -> Logger:
    title, task_and_attn = _title(run), "/".join(run.parts[-3:-1])
    match one:
        case "tensorboard":
            # its version is the last part of the path
            return _TensorBoard(run.parent, "", run.name, default_hp_metric=False, purge_step=purge_step)
        case "csv":
            return CSVLogger(run, name="", version="")
        case "wandb":
            return WandbLogger(title, save_dir=run, project="kvt", group=task_and_attn)
        case "trackio":
            return TrackioLogger(title, project="kvt", group=task_and_attn)
        case "mlflow" if place := os.environ.get("MLFLOW_TRACKING_URI"):
            return MLFlowLogger("kvt", title, place)
        case "mlflow":
            return MLFlowLogger("kvt", title, _database(run), artifact_location=(run / "mlruns").as_uri())
        case Logger():
            return one
    raise AssertionError(f"unknown logger {one!r}")
