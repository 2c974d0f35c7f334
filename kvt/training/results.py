"""The results of a run: result.json, history.csv, predictions.csv, TensorBoard's hyperparameters, a printed table."""

import csv
import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from kvt.system.files import atomically
from kvt.system.hardware import environment
from kvt.tasks import Task, TaskData


class TrainingSummary(NamedTuple):
    """Metrics, speed and history of a finished fit.

    Attributes:
        started: when it began.
        metrics: of the best checkpoint.
        speed: seconds of training, and predictions per second.
        history: rows of metrics by step.
        diverged: which loss was not finite, and when; None if all were.
    """

    started: datetime
    metrics: dict[str, float]
    speed: Mapping[str, float]
    history: Sequence[Mapping[str, float]]
    diverged: str | None


def save_results(
    summary: TrainingSummary,
    task: Task,
    data: TaskData,
    trainer: L.Trainer,
    settings: Mapping[str, Any],
    run: str | None,
) -> dict[str, Any]:
    """Write result.json and history.csv, log hyperparameters; return the rows of the table to print.

    Args:
        summary: of the fit, with the metrics of the test if there was one.
        task: the trained task.
        data: that it was trained on.
        trainer: that trained it.
        settings: of the run, for result.json.
        run: its folder; None to write nothing.
    """
    rows: dict[str, Any] = {
        "task": data.task_name,
        "attn": task.hparams["attn"],
        "seed": settings["seed_everything"],
        **summary.metrics,
        "seen_in_training": data.seen_in_training,
        "parameters": sum(p.numel() for p in task.parameters()),
        **summary.speed,
        **({"diverged": summary.diverged} if summary.diverged else {}),
    }
    if isinstance(trainer.logger, TensorBoardLogger):
        hparams = {**task.hparams, **data.hparams, **task.notes}
        for name in ("spec", *data.path_settings):  # a `spec` may hold a whole vocabulary
            hparams.pop(name, None)
        best = {f"best/{name.replace('/', '_')}": value for name, value in summary.metrics.items()}
        trainer.logger.log_hyperparams(hparams, best)
        trainer.logger.finalize("success")  # a full disk shows here, not silently at the end of the process
    if run:
        details = {
            "started": summary.started.isoformat(timespec="seconds"),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "precision": str(trainer.precision),
            "notes": task.notes,
            **environment(),
            "config": settings,
        }
        write_history(Path(run) / "history.csv", summary.history)
        write_json(Path(run) / "result.json", rows | details)
        rows["run"] = os.path.relpath(run)
    return rows


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    with atomically(path) as part:
        part.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, None if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def write_history(path: Path, history: Sequence[Mapping[str, float]]) -> None:
    """Write a CSV with one line for each logged step, one column for each metric."""
    columns = dict.fromkeys(name for row in history for name in row)
    with atomically(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(history)


def write_predictions(path: Path, batches: Sequence[Mapping[str, Tensor | list[str]]]) -> None:
    """Write a CSV with one line for each prediction; numbers have four decimals, lists of numbers share a cell."""
    columns = {}
    for name in batches[0]:
        columns[name] = [cell for batch in batches for cell in _cells(batch[name])]
    with atomically(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["example", *columns])
        writer.writerows([example, *row] for example, row in enumerate(zip(*columns.values(), strict=True)))


def _cells(column: Tensor | list[str]) -> list[Any]:
    if isinstance(column, list):
        return column
    cells: list[Any] = (column.double().round(decimals=4) if column.is_floating_point() else column).tolist()
    return cells


def table(rows: Mapping[str, Any]) -> str:
    """Return names and values in two columns.

    >>> print(table({"test/acc": 0.98765, "parameters": 12345}))
    test/acc    0.9877
    parameters  12,345
    """
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {_readable(value)}" for name, value in rows.items())


def _readable(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 100 else f"{value:,.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_readable(part)}" for name, part in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)
