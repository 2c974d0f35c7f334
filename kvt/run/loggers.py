"""Creates loggers by name, logs hyperparameters, and lets a resumed run continue its entries in loggers."""

import csv
import json
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
from kvt.system.files import read_json, write_atomically

ABSENT = float("nan")
"""The value of a score that a run lacks. TensorBoard's table still has a column for the score."""
IDS = "loggers.json"
"""The file in a run's folder that keeps the id of the run in W&B and in MLflow."""
OF_TRAINER = ("max_epochs", "max_steps", "precision")
"""The Trainer settings that loggers show as hyperparameters. Notes show limits on batches and early stopping."""


def make_loggers(setting: Any, run: Path, purge_step: int | None = None) -> list[Logger]:
    """Return the loggers that `--logger` asks for.

    Args:
        setting: a name in `kvt.run.settings.LOGGERS`, a Lightning logger as {"class_path": …}, or a list of such
            names and loggers; True or None is "tensorboard".
        run: the run's folder, lightning_logs/<task>/<attn>/version_N.
        purge_step: the first step that a resumed run logs again. From this step on, TensorBoard hides the events that
            the run logged before, and the CSV loses the rows. None: the run is new.

    Raises:
        ModuleNotFoundError: the package of wandb, trackio or mlflow is not installed.
    """
    setting = trainer_objects({"logger": setting}).get("logger", setting)
    setting = "tensorboard" if setting in (None, True) else "none" if setting is False else setting
    asked: Sequence[Any] = setting if isinstance(setting, list) else [setting]
    ids = read_json(run / IDS) or {}
    return [_make(one, run, purge_step, ids) for one in asked if one != "none"]


def keep_ids(loggers: Sequence[Logger], run: Path) -> None:
    """Write a run's ids in W&B and MLflow to its folder, so that a resumed run continues under these ids."""
    ids = {}
    for logger in loggers:
        match logger:
            case WandbLogger():
                ids["wandb"] = logger.version
            case MLFlowLogger():
                ids[_mlflow_place(run) or "mlflow"] = logger.run_id
    if ids:
        write_atomically(run / IDS, json.dumps(ids))


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


def end_runs(loggers: Sequence[Logger], run: Path) -> None:
    """End a run in W&B, Trackio and MLflow, so that the next run in this process logs under its own name.

    The function keeps a W&B run that the user has started, and an MLFLOW_TRACKING_URI that the user has set.
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

                    nowhere: Any = None  # MLflow accepts None, although it declares str
                    mlflow.set_tracking_uri(nowhere)  # Lightning has set the address for the entire process


class TrackioLogger(Logger):
    """A logger that writes runs to Trackio on this machine. `trackio show --project kvt` shows the runs."""

    def __init__(self, name: str, project: str, group: str, resume: str = "never") -> None:
        import trackio

        self.trackio: Any = trackio
        self.hparams: dict[str, Any] = {}
        self._names = {"name": name, "project": project, "group": group, "resume": resume}

    @property
    def name(self) -> str:
        return self._names["project"]

    @property
    def version(self) -> str:
        return self._names["name"]

    @cached_property
    def experiment(self) -> Any:
        """Trackio's run. The first access starts the run with all hyperparameters that are logged so far."""
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
        """End Trackio's run, and wait until Trackio has written all metrics."""
        if "experiment" in vars(self):
            with redirect_stdout(sys.stderr):
                self.trackio.finish()


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


def _title(run: Path) -> str:
    return "/".join(run.parts[-3:])


def _database(run: Path) -> str:
    return f"sqlite:///{run / 'mlflow.db'}"


def _mlflow_place(run: Path) -> str | None:
    """Return the user's MLFLOW_TRACKING_URI; None if the run logs to a database in the run's folder."""
    place = os.environ.get("MLFLOW_TRACKING_URI")
    return None if place == _database(run) else place


def _make(one: Logger | str, run: Path, purge_step: int | None, ids: Mapping[str, str]) -> Logger:
    title, task_and_attn = _title(run), "/".join(run.parts[-3:-1])
    match one:
        case "tensorboard":
            # TensorBoardLogger's folder is save_dir / name / version
            return _TensorBoard(run.parent, "", run.name, default_hp_metric=False, purge_step=purge_step)
        case "csv":
            return _CSV(run, purge_step)
        case "wandb":  # WandbLogger passes resume="allow"
            return WandbLogger(title, save_dir=run, id=ids.get("wandb"), project="kvt", group=task_and_attn)
        case "trackio":
            resume = "never" if purge_step is None else "allow"
            return TrackioLogger(title, project="kvt", group=task_and_attn, resume=resume)
        case "mlflow" if place := _mlflow_place(run):
            return MLFlowLogger("kvt", title, place, run_id=ids.get(place))
        case "mlflow":
            own: dict[str, Any] = {"artifact_location": (run / "mlruns").as_uri(), "run_id": ids.get("mlflow")}
            return MLFlowLogger("kvt", title, _database(run), **own)
        case Logger():
            return one
    raise AssertionError(f"unknown logger {one!r}")
