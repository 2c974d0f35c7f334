"""Writes the results of a run: result.json, history.csv, predictions.csv, and hyperparameters in TensorBoard."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from kvt.run.folder import best_checkpoint
from kvt.run.load_checkpoint import Checkpoint
from kvt.run.loggers import hyperparameters, when_best
from kvt.run.recorder import Recorder
from kvt.system.console import say
from kvt.system.files import read_json, write_atomically, write_csv
from kvt.system.hardware import environment
from kvt.system.quoting import one_line


def summary(task: Any, data: Any, recorder: Recorder, seed: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return the summary that a run prints at the end. The entries of the summary are the first of result.json."""
    return {
        **{"task": data.task_name, "attn": task.attn, "seed": seed},
        **metrics,
        **({} if (seen := data.seen_in_training) is None else {"seen_in_training": seen}),
        **({"largest_class": shares} if (shares := data.largest_class) else {}),
        "parameters": task.num_parameters,
        **{"seconds": recorder.seconds, f"{task.unit}_per_second": recorder.rate},
        **({"diverged": recorder.diverged} if recorder.diverged else {}),
    }


def save_results(
    summary: Mapping[str, Any],
    history: Sequence[Mapping[str, float]],
    config: Mapping[str, Any],
    started: datetime,
    trainer: L.Trainer,
    folder: Path | None,
) -> None:
    """Log the scores and the notes, and write result.json and history.csv.

    TensorBoard gets hyperparameters and scores in one call, because its table needs such a call.

    Args:
        summary: the return value of `summary`.
        history: a row for each step with logged metrics.
        config: the content of the run's config.yaml, which result.json repeats.
        started: the time at which the run started.
        trainer: the Trainer that trained.
        folder: the run's folder; None: no files are written.
    """
    task: Any = trainer.lightning_module
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    notes = {"notes": "; ".join(f"{name}: {note}" for name, note in task.metric_notes.items())}
    scores = {when_best(name): value for name, value in summary.items() if "/" in name}
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(hyperparameters(task, data, config) | notes, scores)
        else:
            logger.log_hyperparams(notes)
            logger.log_metrics(scores, trainer.global_step)
        logger.finalize("success")  # raises on a full disk; at the end of the process, the error would be lost
    if folder is not None:
        write_csv(folder / "history.csv", dict.fromkeys(name for row in history for name in row), history)
        details = {
            "started": started.isoformat(timespec="seconds"),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "precision": str(trainer.precision),
            "notes": task.metric_notes,
            "monitor": task.monitor,
            "better": {metric.name: metric.better for metric in task.metrics if metric.better},
            "content": data.content,
            "config": config,
        }
        write_json(folder / "result.json", {**summary, **environment(), **details})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2, default=str) + "\n")


def is_result_of(folder: Path, checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has the weights of best.ckpt, which result.json in the folder was measured with."""
    best = best_checkpoint(folder)
    return (folder / "result.json").is_file() and best.is_file() and checkpoint.digest == Checkpoint(best).digest


def keep_test(folder: Path, own: bool, scores: Mapping[str, float], measured: Mapping[str, Any]) -> Path | None:
    """Add the metrics of a test to a run's result.json, or write them to test-<checkpoint>-<hash>.json beside it.

    If the file cannot be written, the function prints a note and returns None.

    Args:
        folder: the run's folder.
        own: True: add the metrics to result.json. False: write a separate file.
        scores: the metrics of the test.
        measured: checkpoint, data and settings of the test. A hash of these is in the name of the separate file.

    Returns:
        The path of the written file.
    """
    path = folder / "result.json"
    content = {**(read_json(path) or {}), **scores} if own else {**scores, **measured}
    if not own:
        digest = hashlib.sha256(json.dumps(measured, sort_keys=True, default=str).encode()).hexdigest()
        path = folder / f"test-{Path(measured['checkpoint']).stem}-{digest[:8]}.json"
    try:
        write_json(path, content)
    except OSError as error:
        say(f"note: the metrics are not kept: {one_line(str(error))}")
        return None
    return path


def write_predictions(
    path: Path, batches: Sequence[Mapping[str, Tensor | list[str]]], names: Sequence[str] | None = None
) -> None:
    """Write a CSV with one line for each example. Numbers have four decimals, and a list of numbers fills one cell.

    Args:
        path: path of the CSV.
        batches: for each batch, a dict that maps the name of a column to the column.
        names: file names of the examples, for a column "file"; None: no such column.
    """
    predicted = {name: [cell for batch in batches for cell in _cells(batch[name])] for name in batches[0]}
    count = len(next(iter(predicted.values())))
    files = {} if names is None else {"file": names[:count]}
    columns: dict[str, Sequence[Any]] = {"example": range(count), **files, **predicted}
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    write_csv(path, columns, rows)


def _cells(column: Tensor | list[str]) -> list[Any]:
    if isinstance(column, list):
        return column
    cells: list[Any] = (column.double().round(decimals=4) if column.is_floating_point() else column).tolist()
    return cells
