"""The command `kvt runs`, which lists runs."""

import os
from math import inf, isfinite
from pathlib import Path
from typing import Any

from kvt.system import UserError, printable, tell, user_path

MAX_CHARS = 50  # largest length of a setting, which may hold a whole tokenizer, and of an error


def runs(*folders: str) -> None:
    """List runs: folder, task, attention, the settings that differ among runs of a task, state, and score.

    The score is the validation metric that chooses the best checkpoint of the task. Within a task, the best run is
    first, and runs without a finite score are last. TensorBoard shows all settings and the curves.

    Args:
        folders: folders to search; default: lightning_logs.
    """
    import pandas as pd

    from kvt.study.outcomes import CONFIG

    places = [user_path(folder) for folder in folders or ("lightning_logs",)]
    if strange := [place for place in places if not place.is_dir()]:
        raise UserError(f"{strange[0]}: no such folder: pass one with runs, such as lightning_logs")
    found = {os.path.realpath(path.parent): path.parent for place in places for path in place.rglob(CONFIG)}
    if not found:
        raise UserError(f"no runs in {', '.join(map(str, places))}")
    rows = sorted(map(_row, found.values()), key=lambda row: (row["task"], row["rank"], row["folder"]))
    table, settings = pd.DataFrame(rows), pd.DataFrame([row["settings"] for row in rows])
    differ = settings.groupby(table.task).nunique(dropna=False).gt(1).any()
    shown = settings.loc[:, differ[differ].index].fillna("").map(lambda cell: f"{cell:.{MAX_CHARS}}")
    cells = pd.concat([table[["folder", "task", "attn"]], shown, table[["state", "score"]]], axis=1)
    tell(cells.map(printable).to_string(index=False))


def _row(folder: Path) -> dict[str, Any]:
    """Return a run's cells in the list, its settings, and its rank within the task; the best run has the lowest."""
    from kvt.run.config import bare, in_short
    from kvt.run.folder import is_in_use
    from kvt.study.outcomes import State, read_outcome

    state, message, result, _, config = read_outcome(folder)
    settings = {printable(bare(name)): str(in_short(value)) for name, value in config.stated.items()} if config else {}
    settings |= {"ckpt_path": config.ckpt_path} if config and config.ckpt_path else {}
    monitor = result.get("monitor", "val/loss")
    score, better = result.get(monitor), result.get("better", {}).get(monitor.partition("/")[2])
    sign = {"more": -1, "less": 1}.get(better, 0)
    return {
        "folder": str(folder),
        "task": str(result.get("task", folder.resolve().parent.parent.name)),
        "attn": settings.pop("attn", "?"),
        "settings": settings,
        "state": ("running" if is_in_use(folder) else "stopped") if state == State.STARTED else str(state),
        "score": message[:MAX_CHARS] if score is None else f"{monitor} {score:.4f}",
        "rank": sign * score if score is not None and isfinite(score) else inf,
    }
