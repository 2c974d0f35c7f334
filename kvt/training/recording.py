"""What a run leaves of its numbers: result.json, history.csv, and its row among TensorBoard's hyperparameters."""

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from kvt.tasks import Task, TaskData
from kvt.training import results


class TrainingSummary(NamedTuple):
    """What training has come to. A test restores the task as it was at the best checkpoint: this is taken before.

    Attributes:
        started: when it began.
        metrics: of the best checkpoint.
        speed: the seconds of training, and predictions a second.
        history: of the task.
        diverged: likewise.
    """

    started: datetime
    metrics: dict[str, float]
    speed: Mapping[str, float]
    history: Sequence[Mapping[str, float]]
    diverged: str | None


def record(
    outcome: TrainingSummary,
    task: Task,
    data: TaskData,
    trainer: L.Trainer,
    settings: Mapping[str, Any],
    run: str | None,
) -> dict[str, Any]:
    """Writes what a run leaves behind; returns what there is to show of it.

    Args:
        outcome: with the metrics of the test, if there was one.
        task: the trained one.
        data: that it was trained on.
        trainer: that trained it.
        settings: of the run, for whoever reads the result.
        run: its folder; None where nothing is to be written.
    """
    rows: dict[str, Any] = {
        "task": data.task_name,
        "attn": task.hparams["attn"],
        "seed": settings["seed_everything"],
        **outcome.metrics,
        "seen_in_training": data.seen_in_training,
        "parameters": sum(p.numel() for p in task.parameters()),
        **outcome.speed,
        **({"diverged": outcome.diverged} if outcome.diverged else {}),
    }
    if isinstance(trainer.logger, TensorBoardLogger):
        hparams = {**task.hparams, **data.hparams, **task.notes}
        for name in ("spec", *data.path_settings):  # a `spec` may hold a whole vocabulary
            hparams.pop(name, None)
        best = {f"best/{name.replace('/', '_')}": value for name, value in outcome.metrics.items()}
        trainer.logger.log_hyperparams(hparams, best)
        trainer.logger.finalize("success")  # what it has not written yet, it would lose without a word
    if run:
        details = {
            "started": outcome.started.isoformat(timespec="seconds"),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "precision": str(trainer.precision),
            "notes": task.notes,
            **results.environment(),
            "config": settings,
        }
        results.write_history(Path(run) / "history.csv", outcome.history)
        results.write_json(Path(run) / "result.json", rows | details)
        rows["run"] = os.path.relpath(run)
    return rows
