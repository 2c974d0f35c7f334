"""The results of a grid's runs as tables."""

from pathlib import Path

import pandas as pd

from kvt.study.grid import Grid, varied
from kvt.study.records import State, read_record

KEPT = ("parameters", "seconds", "fleet", "precision", "commit", "packages", "machine", "notes")


def table_of_results(grid: Grid, root: Path) -> pd.DataFrame:
    """Return a table with a row for each run of the grid, in its order, done or not.

    Columns: name, task, attention, seed, setting (the settings that differ within the grid, as text), state, message;
    each such setting by its name; and from result.json, missing where unknown, metrics such as "test/acc" and `KEPT`.
    """
    names, rows = varied(grid.runs), []
    for run in grid.runs:
        record = read_record(run.folder(root))
        about = {"name": run.name, "task": run.task, "attention": run.attention, "seed": run.seed}
        about |= {"setting": run.text(names), "state": record.state, "message": record.message}
        setting = {name: value for name, value in run.setting.items() if name in names}
        known = {name: value for name, value in (record.result or {}).items() if "/" in name or name in KEPT}
        rows.append(about | setting | known)
    return pd.DataFrame(rows)


def table_of_histories(grid: Grid, root: Path) -> pd.DataFrame:
    """Return a table with a row for each step at which a finished run logged something.

    Columns: name, task, attention, seed, setting, step, seconds (of training; a run's share of its fleet's), and
    metrics such as "train/loss" and "val/loss", missing where they were not logged.
    """
    names, parts = varied(grid.runs), []
    for run in grid.runs:
        record = read_record(run.folder(root))
        if record.state == State.FINISHED and record.history is not None:
            about = {"name": run.name, "task": run.task, "attention": run.attention, "seed": run.seed}
            parts.append(record.history.assign(**about, setting=run.text(names)))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
