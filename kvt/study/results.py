"""What the runs of a grid have left behind."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd

from kvt.study.grid import Grid, Run, varied
from kvt.study.work import State, read_failure, read_result, state_of

KEPT = ("parameters", "seconds", "fleet", "precision", "commit", "packages", "machine", "notes")


class Times:
    """Estimates how long runs take from those that are finished.

    A run is expected to take what the finished runs took that share the most settings with it, on average.

    Args:
        runs: of the study.
        root: the folder of all runs.
    """

    def __init__(self, runs: Sequence[Run], root: Path) -> None:
        self._root = root
        self._known: dict[frozenset[tuple[str, str]], list[float]] = {}
        for run in runs:
            self.add(run)

    def add(self, run: Run) -> None:
        """Takes a run into account, if it is finished."""
        if (result := read_result(run.folder(self._root))) is not None:
            self._known.setdefault(_signature(run), []).append(_seconds(result))

    def left(self, runs: Sequence[Run], workers: int) -> str:
        """How long these will take: "2:05:00", or "unknown" while no run is finished."""
        if not self._known:
            return "unknown time"
        mean = {signature: sum(seconds) / len(seconds) for signature, seconds in self._known.items()}
        expected: dict[frozenset[tuple[str, str]], float] = {}
        for signature in {_signature(run) for run in runs}:
            shared = {known: len(signature & known) for known in mean}
            nearest = [mean[known] for known, count in shared.items() if count == max(shared.values())]
            expected[signature] = sum(nearest) / len(nearest)
        return str(timedelta(seconds=round(sum(expected[_signature(run)] for run in runs) / workers)))


def headline(result: Mapping[str, Any] | None) -> str:
    """A result in a few words: its main metrics and its time."""
    if result is None:  # a shared disk may not show it yet
        return ""
    stage = "test" if any(name.startswith("test/") for name in result) else "val"
    numbers = [f"{name} {value:.4f}" for name, value in result.items() if name.startswith(f"{stage}/")]
    return "  ".join([*numbers, f"{_seconds(result):.0f} s"])


def _signature(run: Run) -> frozenset[tuple[str, str]]:
    """Task and settings, without the seed, as a set."""
    return frozenset((name, str(value)) for name, value in {"task": run.task, **run.settings}.items())


def _seconds(result: Mapping[str, Any]) -> float:
    """From the start of a run to its end; where it was interrupted, at least its training; of a fleet its share."""
    started, finished = (datetime.fromisoformat(result[name]) for name in ("started", "finished"))
    return max((finished - started).total_seconds(), float(result["seconds"])) / _fleet(result)


def _fleet(result: Mapping[str, Any]) -> int:
    """How many runs share the seconds of a result."""
    return max(1, int(result.get("fleet") or 1))


def _shared(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result with this run's share of the seconds of its fleet."""
    return {**result, "fleet": _fleet(result), "seconds": result["seconds"] / _fleet(result)}


def table_of_results(grid: Grid, root: Path) -> pd.DataFrame:
    """One row a run of the grid, in its order, done or not.

    Columns: name, task, attention, seed, setting (the settings that differ within the grid, as text), state (a
    `State`), message (of a failure); then each such setting by its name; then what result.json holds: metrics such as
    "test/acc", parameters, seconds (of training; of a fleet the run's share), fleet (how many runs were trained as
    one), commit, precision, packages, machine. What is not known is missing (NaN or None).
    """
    names = varied(grid.runs)
    rows = []
    for run in grid.runs:
        folder = run.folder(root)
        state, result = state_of(folder), read_result(folder)
        known = _shared(result) if result else {}
        rows.append(
            {
                "name": run.name,
                "task": run.task,
                "attention": run.attention,
                "seed": run.seed,
                "setting": run.text(names),
                "state": state,
                "message": read_failure(folder) if state == State.FAILED else known.get("diverged", ""),
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
        file = run.folder(root) / "history.csv"
        result = read_result(run.folder(root))
        if result is not None and "diverged" not in result and file.is_file():
            about = {"name": run.name, "task": run.task, "attention": run.attention, "seed": run.seed}
            history = pd.read_csv(file).assign(**about, setting=run.text(names))
            history["seconds"] /= _fleet(result)
            parts.append(history)
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
