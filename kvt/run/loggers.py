"""Lightning's loggers by name: they write into the run's folder; MLflow into a database of all runs."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from kvt.run.settings import trainer_objects


def make_loggers(setting: Any, run: Path, purge_step: int | None = None) -> list[Logger]:
    """Return the loggers that `--logger` asks for.

    Args:
        setting: a name among `kvt.run.settings.LOGGERS`, a class of Lightning's, {"class_path": …}, or a list of
            these; true or None: tensorboard.
        run: the run's folder, lightning_logs/<task>/<attn>/version_N.
        purge_step: TensorBoard hides events from this step on, of a process that was killed.

    Raises:
        ModuleNotFoundError: the package of wandb or mlflow is not installed.
    """
    setting = trainer_objects({"logger": setting}).get("logger", setting)
    setting = "tensorboard" if setting in (None, True) else "none" if setting is False else setting
    asked: Sequence[Any] = setting if isinstance(setting, list) else [setting]
    return [_make(one, run, purge_step) for one in asked if one != "none"]


class _TensorBoard(TensorBoardLogger):
    """Leaves out the number of the epoch, whose chart would come before all curves."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        super().log_metrics({name: value for name, value in metrics.items() if name != "epoch"}, step)


def _make(one: Logger | str, run: Path, purge_step: int | None) -> Logger:
    task_and_attn = "/".join(run.parts[-3:-1])
    match one:
        case "tensorboard":
            # its version is the last part of the path
            return _TensorBoard(run.parent, "", run.name, default_hp_metric=False, purge_step=purge_step)
        case "csv":
            return CSVLogger(run, name="", version="")
        case "wandb":
            return WandbLogger(f"{task_and_attn}/{run.name}", save_dir=run, project="kvt", group=task_and_attn)
        case "mlflow":
            place = os.environ.get("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")  # MLflow's own default
            return MLFlowLogger("kvt", f"{task_and_attn}/{run.name}", tracking_uri=place)
        case Logger():
            return one
    raise AssertionError(f"unknown logger {one!r}")
