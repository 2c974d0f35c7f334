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
from kvt.system import UserError, one_line, read_yaml

RESULT, HISTORY, ERROR, CONFIG = "result.json", "history.csv", "error.txt", "config.yaml"
REQUIRED = ("config", "seed", "parameters", "seconds", "precision", "commit", "packages", "machine")
OF_MACHINE = ("processor", "system", "threads", "gpus")
REMOVED = {"teacher": None, "teacher_temperature": 1.0, "teacher_weight": 1.0}
"""Settings of version 0.1, with the values in runs that did not use them."""


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
    """The state of a run, and the result of a run that has ended. The source is a run's folder or a record."""

    state: State
    message: str = ""  # one line: why the run failed or diverged
    result: dict[str, Any] = {}  # noqa: RUF012 - never modified; the content of result.json without "config"
    history: pd.DataFrame | None = None
    config: Any = None  # the stored RunConfig; None if the file is damaged or the run is new


Outcomes = Mapping[str, Sequence[Outcome]]  # maps a run's name to its outcomes; reports use the first


def outcome_of(run: Run, outcomes: Outcomes) -> Outcome:
    """Return the first outcome of a run, or an outcome of state `NEW` if there is none."""
    return next(iter(outcomes.get(run.name, ())), Outcome(State.NEW))


def read_outcomes(runs: Sequence[Run], root: Path) -> Outcomes:
    """Return a dict that maps the name of each run to its outcome, read from the run's folder inside `root`."""
    return {run.name: [read_outcome(run.folder(root), run.config)] for run in runs}


def read_outcome(folder: Path, wanted: RunConfig | None = None) -> Outcome:
    """Return a run's outcome, read from its folder.

    Args:
        folder: the run's folder.
        wanted: the configuration that the run should have. A run with another configuration is `FAILED`: a default of
            kvt has changed since, or the folder is a copy of another run's.

    Returns:
        The outcome. If a file is damaged, the state is `FAILED` and the message begins with the name of the file.
    """
    try:
        outcome = _read(folder)
    except UserError as error:
        return Outcome(State.FAILED, one_line(str(error)))
    if wanted is None or outcome.config is None:
        return outcome
    if changed := wanted.differences(outcome.config):
        told = (f"{bare(name)} is {theirs}, now {ours}" for name, ours, theirs in changed)
        return Outcome(State.FAILED, one_line("; ".join(told)))
    return outcome._replace(config=wanted)  # `wanted` equals the stored configuration; sharing it saves memory


def _read(folder: Path) -> Outcome:
    if (folder / RESULT).exists():
        with damage(RESULT):
            result = json.loads((folder / RESULT).read_bytes())
        return ended(result, _read_history(folder), RESULT)
    with damage(CONFIG):
        config = _configuration(read_yaml(folder / CONFIG, CONFIG)) if (folder / CONFIG).exists() else None
    if (folder / ERROR).exists():
        first, *_ = (folder / ERROR).read_text(errors="replace").split("\n")
        return Outcome(State.FAILED, one_line(first), config=config)
    return Outcome(State.STARTED if config else State.NEW, config=config)


def ended(result: Any, history: pd.DataFrame | None, where: str) -> Outcome:
    """Return the outcome of a run from the content of its result.json.

    Raises a UserError that begins with `where` if the content is invalid.
    """
    with damage(where):
        for keys, part in ((REQUIRED, result), (OF_MACHINE, result.get("machine"))):
            if missing := [key for key in keys if key not in part]:
                raise ValueError(f"{missing[0]} is missing")
        numbers = ("parameters", "seconds", *(name for name in result if "/" in name))
        if wrong := [name for name in numbers if type(result[name]) not in (int, float)]:
            raise ValueError(f"{wrong[0]} is not a number")
        diverged, config = one_line(result.get("diverged", "")), _configuration(result["config"])
    state = State.DIVERGED if "diverged" in result else State.FINISHED
    return Outcome(state, diverged, {key: value for key, value in result.items() if key != "config"}, history, config)


@contextmanager
def damage(where: str) -> Iterator[None]:
    """Context manager: convert an error that a file's content causes to a UserError that begins with `where`."""
    try:
        yield
    except (ImportError, MemoryError):  # not caused by a file's content
        raise
    except Exception as error:
        said = str(getattr(error, "strerror", None) or error)
        raise UserError(said if said.startswith(where) else f"{where}: {said}") from error


def _configuration(stored: Mapping[str, Any]) -> RunConfig:
    return RunConfig(**{name: value for name, value in stored.items() if name not in REMOVED or value != REMOVED[name]})


def _read_history(folder: Path) -> pd.DataFrame | None:
    if not (folder / HISTORY).exists():
        return None
    with damage(f"{HISTORY} is not a table of numbers"):
        history = pd.read_csv(folder / HISTORY, dtype=float, float_precision="round_trip")
        if history.empty or history[["step", "seconds"]].isna().any(axis=None):
            raise ValueError("no rows, or rows without step or seconds")
    return history


KEPT = ("parameters", "seconds", "precision", "commit", "packages", "machine", "notes", "content")


def thinned(rows: Any, points: int) -> Any:
    """Return at most `points` of the rows. The returned rows are evenly spaced and include the last row."""
    return rows[:: -max(1, ceil(len(rows) / points))][::-1]


def table_of_results(grid: Grid, outcomes: Outcomes) -> pd.DataFrame:
    """Return a table with a row for each run of the grid, in the grid's order. Runs that are not done have a row, too.

    Columns: name, task, attention, seed, setting (the settings that differ within the grid, as text), state, message;
    one column for each setting that differs within the grid; metrics such as "test/acc"; the keys in `KEPT` from
    result.json. Columns without any value may be missing.
    """
    return _table(grid, {run.name: [outcome_of(run, outcomes)] for run in grid.runs})


def table_of_repeats(grid: Grid, outcomes: Outcomes) -> pd.DataFrame:
    """Return a table with the columns of `table_of_results`, and a row for each outcome after the first of a run."""
    return _table(grid, {run.name: outcomes.get(run.name, ())[1:] for run in grid.runs})


def table_of_histories(grid: Grid, outcomes: Outcomes) -> pd.DataFrame:
    """Return a table with a row for each step at which a finished run logged metrics.

    Columns: name, task, attention, seed, setting, step, seconds of training, and metrics such as "train/loss". If a run
    was trained several times, its first history is used.
    """
    found = [
        (about, history)
        for run, about in _identities(grid)
        for history in [
            one.history for one in outcomes.get(run.name, ()) if one.state == State.FINISHED and one.history is not None
        ][:1]
    ]
    if not found:
        return pd.DataFrame()
    stacked = pd.concat([history for _, history in found], keys=range(len(found)))
    of_runs = pd.DataFrame([about for about, _ in found]).iloc[stacked.index.get_level_values(0)]
    return pd.concat([stacked.reset_index(drop=True), of_runs.reset_index(drop=True)], axis=1)


def _table(grid: Grid, outcomes: Outcomes) -> pd.DataFrame:
    return pd.DataFrame(
        {
            **identity,
            **{"state": outcome.state, "message": outcome.message},
            **{name: value for name, value in run.setting.items() if name in grid.varying},
            **{name: value for name, value in outcome.result.items() if "/" in name or name in KEPT},
        }
        for run, identity in _identities(grid)
        for outcome in outcomes[run.name]
    )


def _identities(grid: Grid) -> Iterator[tuple[Run, dict[str, Any]]]:
    for run in grid.runs:
        about = {"name": run.name, "task": run.task, "attention": run.attention, "seed": run.seed}
        yield run, about | {"setting": run.text(grid.varying)}
