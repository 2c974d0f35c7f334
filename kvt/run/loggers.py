"""Loggers by name: Lightning's and one for Trackio; what they record, and how a run ends or is resumed for them."""

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
"""A score that a run does not have, but others of its task may: a column of TensorBoard's table."""
IDS = "loggers.json"
"""The file in a run's folder with the id by which each logger knows the run."""
OF_TRAINER = ("max_epochs", "max_steps", "precision")
"""The Trainer's settings among the hyperparameters; notes name the others that make a run a shorter one."""


def make_loggers(setting: Any, run: Path, purge_step: int | None = None) -> list[Logger]:
    """Return the loggers that `--logger` asks for.

    Args:
        setting: a name among `kvt.run.settings.LOGGERS`, a class of Lightning's, {"class_path": …}, or a list of
            these; true or None: tensorboard.
        run: the run's folder, lightning_logs/<task>/<attn>/version_N.
        purge_step: of a resumed run, the first step that it logs again: TensorBoard hides its events from this step on,
            and the CSV loses its rows. None: the run is new.

    Raises:
        ModuleNotFoundError: the package of wandb, trackio or mlflow is not installed.
    """
    setting = trainer_objects({"logger": setting}).get("logger", setting)
    setting = "tensorboard" if setting in (None, True) else "none" if setting is False else setting
    asked: Sequence[Any] = setting if isinstance(setting, list) else [setting]
    ids = read_json(run / IDS) or {}
    return [_make(one, run, purge_step, ids) for one in asked if one != "none"]


def keep_ids(loggers: Sequence[Logger], run: Path) -> None:
    """Write the ids by which W&B and MLflow know a run into its folder: a resumed run goes on with them."""
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
    """Return the settings of a run that loggers show: of the same names in all runs of a task.

    Args:
        task: the run's.
        data: the run's.
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
        """Log a mapping as one text: of its parts, TensorBoard would show only the parts that one run has."""
        texts = {name: str(value) if isinstance(value, Mapping) else value for name, value in params.items()}
        super().log_hyperparams(texts, metrics, step)


class _CSV(CSVLogger):
    """Keeps what was logged before a run was resumed; Lightning's removes it."""

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
    """Return the place of MLflow that the user has chosen; None: the run's own database, which a run sets itself."""
    place = os.environ.get("MLFLOW_TRACKING_URI")
    return None if place == _database(run) else place


def _make(one: Logger | str, run: Path, purge_step: int | None, ids: Mapping[str, str]) -> Logger:
    title, task_and_attn = _title(run), "/".join(run.parts[-3:-1])
    match one:
        case "tensorboard":
            # its version is the last part of the path
            return _TensorBoard(run.parent, "", run.name, default_hp_metric=False, purge_step=purge_step)
        case "csv":
            return _CSV(run, purge_step)
        case "wandb":  # its `resume` is "allow"
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
