"""Writes the results of a run: result.json, history.csv, predictions.csv, and settings and scores in loggers."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from kvt.run.callbacks import RunCallback
from kvt.run.cli import KvtCLI
from kvt.run.config import RunConfig, bare, in_short
from kvt.run.load_checkpoint import Checkpoint
from kvt.system import write_atomically, write_csv
from kvt.tune import environment


def hyperparameters(cli: KvtCLI) -> dict[str, Any]:
    """Return the settings that loggers show. Their names are the same in all runs of a task.

    Mappings and lists become text: each entry would be a column in TensorBoard, whose table has one run's columns only.
    """
    stated = RunConfig(**cli.content).stated
    named = {name: value for name, value in stated.items() if not name.startswith("optimizer.")}
    shown = {bare(name): str(value) if isinstance(value, Mapping | list) else value for name, value in named.items()}
    return {**shown, "optimizer": in_short(cli.content["optimizer"])}


def save_results(
    cli: KvtCLI,
    run: RunCallback,
    metrics: Mapping[str, float],
    best: Checkpoint | None,
    started: datetime,
    trainer: L.Trainer,
) -> dict[str, Any]:
    """Log scores and notes, write result.json and history.csv if the run has a folder, and return the run's summary.

    TensorBoard also gets the settings, because its table needs settings and scores from the same call.
    """
    task, data = cli.model, cli.datamodule
    summary: dict[str, Any] = {
        **{"task": data.task_name, "attn": task.attn, "seed": cli.content["seed_everything"]},
        **metrics,
        **({"best_epoch": best.saved["epoch"], "best_step": best.saved["global_step"]} if best else {}),
        **({} if (seen := data.seen_in_training) is None else {"seen_in_training": seen}),
        **({"largest_class": shares} if (shares := data.largest_class) else {}),
        "parameters": task.num_parameters,
        **{"seconds": run.seconds, f"{task.unit}_per_second": run.rate},
        **({"diverged": run.diverged} if run.diverged else {}),
    }
    notes = {"notes": "; ".join(f"{name}: {note}" for name, note in task.metric_notes.items())}
    # TensorBoard sorts when_best/ behind the curves of train/ and val/
    scores = {f"when_best/{name.replace('/', '_')}": value for name, value in summary.items() if "/" in name}
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(hyperparameters(cli) | notes, scores)
        else:
            logger.log_hyperparams(notes)
            logger.log_metrics(scores, trainer.global_step)
        logger.finalize("success")  # raises on a full disk; at the end of the process, the error would be lost
    if run.folder is not None:
        run.write()
        details = {
            "started": started.isoformat(timespec="seconds"),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "precision": str(trainer.precision),
            "notes": task.metric_notes,
            "monitor": task.monitor,
            "better": {metric.name: metric.better for metric in task.metrics if metric.better},
            "content": data.content,
            "config": cli.content,
        }
        content = json.dumps({**summary, **environment(), **details}, indent=2, default=str)
        write_atomically(run.folder / "result.json", content + "\n")
    return summary


def write_predictions(
    path: Path, batches: Sequence[Mapping[str, Tensor | list[str]]], names: Sequence[str] | None = None
) -> None:
    """Write a CSV with a line for each example. Floats are rounded to four decimals. A vector fills one cell.

    Args:
        path: path of the CSV.
        batches: for each batch, a dict that maps the names of columns to their cells.
        names: file names of the examples, for a column "file"; None: no column "file".
    """
    predicted: dict[str, list[Any]] = {}
    for batch in batches:
        for name, cells in batch.items():
            if isinstance(cells, Tensor):
                cells = (cells.double().round(decimals=4) if cells.is_floating_point() else cells).tolist()
            predicted.setdefault(name, []).extend(cells)
    count = len(next(iter(predicted.values())))
    columns = {"example": [*range(count)], **({} if names is None else {"file": names[:count]}), **predicted}
    write_csv(path, columns, (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)))
