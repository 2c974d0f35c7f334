"""What the runs of a grid have left behind."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from kvt.study.grid import Grid, varied
from kvt.study.records import fleet_of
from kvt.study.run import State, record_of

KEPT = ("parameters", "seconds", "fleet", "precision", "commit", "packages", "machine", "notes")


def _shared(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result with this run's share of the seconds of its fleet."""
    return {**result, "fleet": fleet_of(result), "seconds": result["seconds"] / fleet_of(result)}


def table_of_results(grid: Grid, root: Path) -> pd.DataFrame:
    """One row a run of the grid, in its order, done or not.

    Columns: name, task, attention, seed, setting (the settings that differ within the grid, as text), state (a
    `State`), message (why it has failed, has diverged or is damaged); then each such setting by its name; then what
    result.json holds: metrics such as "test/acc", parameters, seconds (of training; of a fleet the run's share), fleet
    (how many runs were trained as one), commit, precision, packages, machine. What is not known is missing (NaN or
    None).
    """
    names = varied(grid.runs)
    rows = []
    for run in grid.runs:
        record = record_of(run.folder(root))
        known = _shared(record.result) if record.result else {}
        rows.append(
            {
                "name": run.name,
                "task": run.task,
                "attention": run.attention,
                "seed": run.seed,
                "setting": run.text(names),
                "state": record.state,
                "message": record.message,
                **{name: value for name, value in run.setting.items() if name in names},
                **{name: value for name, value in known.items() if "/" in name or name in KEPT},
            }
        )
    return pd.DataFrame(rows)


def table_of_histories(grid: Grid, root: Path) -> pd.DataFrame:
    """One row a moment that a finished run logged something at.

    Columns: name, task, attention, seed, setting, step, seconds (of training; of a fleet the run's share), and
    metrics such as "train/loss" and "val/loss", each missing where it was not logged.
    """
    names, parts = varied(grid.runs), []
    for run in grid.runs:
        record = record_of(run.folder(root))
        if record.state == State.FINISHED and record.result and record.history is not None:
            about = {"name": run.name, "task": run.task, "attention": run.attention, "seed": run.seed}
            history = record.history.assign(**about, setting=run.text(names))
            history["seconds"] /= fleet_of(record.result)
            parts.append(history)
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
