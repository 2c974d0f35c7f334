"""Reads the outcomes of runs from their folders, and makes tables of outcomes."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from kvt.run.config import RunConfig, bare
from kvt.study.grid import Grid, Run
from kvt.system import UserError, one_line, parse_yaml

RESULT, HISTORY, ERROR, CONFIG = "result.json", "history.csv", "error.txt", "config.yaml"
REQUIRED = ("config", "seed", "parameters", "seconds", "precision", "commit", "packages", "machine")
# settings that only version 0.1 had, with the values at which they had no effect
REMOVED = {"teacher": None, "teacher_temperature": 1.0, "teacher_weight": 1.0}
KEPT = ("parameters", "seconds", "precision", "commit", "packages", "machine", "notes", "content")


class State(StrEnum):
    NEW = "to run"
    STARTED = "started"
    FINISHED = "finished"
    DIVERGED = "diverged"
    FAILED = "failed"  # an error ended the run, a file is damaged, or the folder has another configuration


TERMINAL = (State.FINISHED, State.DIVERGED, State.FAILED)


def tally(states: Iterable[State]) -> str:
    """Return the numbers of runs by state, such as "3 runs: 2 to run, 1 finished"."""
    counts = Counter(states)
    parts = [f"{counts[state]} {state}" for state in State if counts[state]]
    return f"{counts.total()} runs: {', '.join(parts)}"


class Outcome(NamedTuple):
    """The state of a run and, if the run has finished or diverged, its result."""

    state: State
    message: str = ""  # one line: why the run failed or diverged
    result: dict[str, Any] = {}  # noqa: RUF012 - never modified; the content of result.json without "config"
    history: pd.DataFrame | None = None
    config: Any = None  # the RunConfig in the run's files; None if unknown, or if `read_outcome` wanted another


Outcomes = Mapping[str, Sequence[Outcome]]  # maps a run's name to its outcomes; all but the first are repetitions


def outcome_of(run: Run, outcomes: Outcomes) -> Outcome:
    """Return the first outcome of a run, or an outcome of state `NEW` if there is none."""
    return next(iter(outcomes.get(run.name, ())), Outcome(State.NEW))


def read_outcomes(runs: Sequence[Run], root: Path) -> Outcomes:
    """Return the outcome of each run by name, read from the run's folder inside `root`."""
    return {run.name: [read_outcome(run.folder(root), run.config)] for run in runs}


def read_outcome(folder: Path, wanted: RunConfig | None = None) -> Outcome:
    """Return a run's outcome, read from its folder. A run with a damaged file is `FAILED`; `message` names the file.

    A run whose configuration differs from `wanted` is `FAILED`, too: a default of kvt may have changed since the run.
    """
    try:
        outcome = _read(folder)
    except UserError as error:
        return Outcome(State.FAILED, one_line(str(error)))
    changed = wanted.differences(outcome.config) if wanted and outcome.config else []
    told = "; ".join(f"{bare(name)} is {theirs}, now {ours}" for name, ours, theirs in changed)
    return Outcome(State.FAILED, one_line(told)) if changed else outcome


def _read(folder: Path) -> Outcome:
    if (folder / RESULT).exists():
        with damage(HISTORY):
            path = folder / HISTORY
            history = pd.read_csv(path, dtype=float, float_precision="round_trip") if path.exists() else None
        with damage(RESULT):
            return ended(json.loads((folder / RESULT).read_bytes()), history)
    with damage(CONFIG):
        path = folder / CONFIG
        config = _configuration(parse_yaml(path.read_bytes(), CONFIG)) if path.exists() else None
    if (folder / ERROR).exists():
        return Outcome(State.FAILED, one_line((folder / ERROR).read_text().partition("\n")[0]), config=config)
    return Outcome(State.STARTED if config else State.NEW, config=config)


def ended(result: Any, history: pd.DataFrame | None) -> Outcome:
    """Return the outcome from a parsed result.json and a history; raise ValueError if a `REQUIRED` key is missing."""
    if missing := [key for key in REQUIRED if key not in result]:
        raise ValueError(f"{missing[0]} is missing")
    state = State.DIVERGED if "diverged" in result else State.FINISHED
    kept = {key: value for key, value in result.items() if key != "config"}
    return Outcome(state, one_line(result.get("diverged", "")), kept, history, _configuration(result["config"]))


@contextmanager
def damage(where: str) -> Iterator[None]:
    """Context manager: turn any error into a UserError that begins with `where`, the damaged file."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{where}: {error}") from error


def _configuration(stored: Mapping[str, Any]) -> RunConfig:
    config = RunConfig(**{n: value for n, value in stored.items() if n not in REMOVED or value != REMOVED[n]})
    dict(config.stated)  # raises if a section is malformed
    return config


def thinned(rows: Any, points: int) -> Any:
    """Return at most `points` evenly spaced rows, including the last."""
    return rows[:: -max(1, ceil(len(rows) / points))][::-1]


def table_of_results(grid: Grid, outcomes: Outcomes) -> pd.DataFrame:
    """Return a table with a row for each run of the grid, done or not, in the grid's order.

    Columns: name, task, attention, seed, setting (the settings that differ within the grid, as text), state, message;
    one column for each setting that differs within the grid; metrics such as "test/acc"; the keys in `KEPT` from
    result.json. Columns without any value may be missing.
    """
    return _table(grid, {run.name: [outcome_of(run, outcomes)] for run in grid.runs})


def table_of_repeats(grid: Grid, outcomes: Outcomes) -> pd.DataFrame:
    """Return a table like `table_of_results`, with a row for each repetition: every outcome of a run but the first."""
    return _table(grid, {run.name: outcomes.get(run.name, ())[1:] for run in grid.runs})


def table_of_histories(grid: Grid, outcomes: Outcomes) -> pd.DataFrame:
    """Return a table with the histories of finished runs; an empty table if there are none.

    Columns: name, task, attention, seed, setting, step, seconds of training, and metrics such as "train/loss". If a run
    was trained several times, its first history is used.
    """
    histories: dict[str, pd.DataFrame] = {}
    for name in (run.name for run in grid.runs):
        for one in outcomes.get(name, ()):
            if one.state == State.FINISHED and one.history is not None:
                histories.setdefault(name, one.history)
    if not histories:
        return pd.DataFrame()
    stacked = pd.concat(histories, names=["name"]).reset_index("name")
    return stacked.merge(pd.DataFrame([_identity(run, grid) for run in grid.runs]), on="name")


def _table(grid: Grid, outcomes: Outcomes) -> pd.DataFrame:
    return pd.DataFrame(
        {
            **_identity(run, grid),
            **{"state": outcome.state, "message": outcome.message},
            **{name: value for name, value in run.setting.items() if name in grid.varying},
            **{name: value for name, value in outcome.result.items() if "/" in name or name in KEPT},
        }
        for run in grid.runs
        for outcome in outcomes[run.name]
    )


def _identity(run: Run, grid: Grid) -> dict[str, Any]:
    about = {"name": run.name, "task": run.task, "attention": run.attention, "seed": run.seed}
    return about | {"setting": run.text(grid.varying)}
