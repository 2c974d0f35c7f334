"""Reads outcomes of runs from result.json, failure.json and config.yaml; makes tables of the outcomes."""

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from pydantic import AwareDatetime, BaseModel, Field, ValidationError, model_validator

from kvt.run.config import RunConfig, bare
from kvt.system.errors import UserError, first_mistake
from kvt.system.files import read_json, read_yaml
from kvt.system.quoting import one_line

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from kvt.study.grid import Grid, Run

Rows = TypeVar("Rows", "pd.DataFrame", "np.ndarray[Any, Any]")
Fields = dict[str, Any]  # the content of result.json without the configuration

RESULT, HISTORY, FAILURE, CONFIG = "result.json", "history.csv", "failure.json", "config.yaml"
READERS = 32  # number of threads that read runs


class State(StrEnum):
    NEW = "to run"
    STARTED = "started"
    FINISHED = "finished"
    DIVERGED = "diverged"
    FAILED = "failed"
    DAMAGED = "damaged"
    OUTDATED = "outdated"  # trained with another configuration: kvt's default changed, or the folder is a copy
    LOCKED = "locked"  # another process holds the run's lock
    STUCK = "stuck"  # stopped by a limit of the machine, such as a full disk, that would also stop the next run


FAULTY = (State.FAILED, State.DAMAGED, State.OUTDATED)  # kvt trains these runs again only with --retry_failed
TERMINAL = (State.FINISHED, State.DIVERGED, *FAULTY)


def tally(states: Iterable[State]) -> str:
    """Return the numbers of runs by state, such as "3 runs: 2 to run, 1 finished"."""
    counts = Counter(states)
    parts = [f"{counts[state]} {state}" for state in State if counts[state]]
    return f"{counts.total()} runs: {', '.join(parts)}"


REMOVED = {"teacher": None, "teacher_temperature": 1.0, "teacher_weight": 1.0}
"""Settings of version 0.1, with the values in runs that did not use them."""


class Outcome(NamedTuple):
    """The state of a run, and the result of a run that has ended. The source is a run's folder or a record."""

    state: State
    message: str = ""  # one line: why the run failed, diverged, or is damaged, outdated or stuck
    result: Fields = {}  # noqa: RUF012 - never modified
    history: Any = None  # a pandas.DataFrame or None; the type is Any, because importing pandas is slow
    config: RunConfig | None = None  # the stored configuration; None if the file is damaged or the run is new

    @property
    def made_with(self) -> RunConfig:
        """The configuration of a run that has ended."""
        assert self.config
        return self.config


Outcomes = Mapping[str, Sequence[Outcome]]  # maps a run's name to its outcomes; reports use the first


def outcome_of(run: "Run", outcomes: Outcomes) -> Outcome:
    """Return the first outcome of a run, or an outcome of state `NEW` if there is none."""
    return next(iter(outcomes.get(run.name, ())), Outcome(State.NEW))


def read_outcome(folder: Path, wanted: RunConfig | None = None, history: bool = True) -> Outcome:
    """Return a run's outcome, read from its folder.

    Args:
        folder: the run's folder.
        wanted: the configuration that the run should have. A run with another configuration is `OUTDATED`.
        history: whether to read the history.

    Returns:
        The outcome. If a file is invalid, the state is `DAMAGED` and the message names the file.
    """
    try:
        outcome = _read(folder, history)
    except UserError as error:
        return Outcome(State.DAMAGED, one_line(str(error)))
    if wanted is None or outcome.config is None:
        return outcome
    if changed := wanted.differences(outcome.config):
        told = (f"{bare(name)} is {theirs}, now {ours}" for name, ours, theirs in changed)
        return Outcome(State.OUTDATED, one_line("; ".join(told)))
    return outcome._replace(config=wanted)  # `wanted` equals the stored configuration; sharing it saves memory


def _read(folder: Path, history: bool) -> Outcome:
    try:
        with damage(RESULT):
            content = (folder / RESULT).read_bytes()
        return ended(content, _read_history(folder) if history else None, RESULT)
    except FileNotFoundError:  # the run has not ended
        config = stored_config(folder)
    if (folder / FAILURE).exists():
        failure = read_json(folder / FAILURE) or {}
        return Outcome(State.FAILED, one_line(str(failure.get("error", "unknown"))), config=config)
    return Outcome(State.STARTED if config else State.NEW, config=config)


def stored_config(folder: Path) -> RunConfig | None:
    """Return the configuration in a run's folder, None if the run has not begun; raise UserError for a damaged file."""
    try:
        with damage(CONFIG):
            return _configuration(read_yaml(folder / CONFIG, CONFIG), CONFIG)
    except FileNotFoundError:
        return None


def ended(content: str | bytes, history: "pd.DataFrame | None", where: str) -> Outcome:
    """Return the outcome of a run from the content of its result.json.

    Raises a UserError that begins with `where` if the content is invalid.
    """
    with damage(where):
        stored = _Result.model_validate_json(content)
        result = stored.model_dump(exclude_unset=True, exclude={"config"})
        config = _configuration(stored.config, where)
    state = State.DIVERGED if "diverged" in result else State.FINISHED
    return Outcome(state, one_line(result.get("diverged", "")), result, history, config)


@contextmanager
def damage(where: str) -> Iterator[None]:
    """Context manager: convert an error that a file's content causes to a UserError that begins with `where`."""
    try:
        yield
    except (UserError, FileNotFoundError, ImportError, MemoryError):  # not caused by a file's content
        raise
    except Exception as error:
        said = first_mistake(error) if isinstance(error, ValidationError) else getattr(error, "strerror", None) or error
        raise UserError(f"{where}: {said}") from error


def seconds_of(result: Mapping[str, Any]) -> float:
    """Return the seconds from the start to the end of a run, or the seconds of training, whichever is larger.

    In a resumed run, the seconds of training can be larger, because `started` is the time at which the run resumed.
    """
    seconds, started, finished = float(result["seconds"]), result.get("started"), result.get("finished")
    return max((finished - started).total_seconds(), seconds) if started and finished else seconds


_Time = Annotated[AwareDatetime, Field(gt=datetime(1970, 1, 2, tzinfo=UTC), lt=datetime(9999, 1, 1, tzinfo=UTC))]
"""A date and time that can be converted to every time zone."""


class _Machine(BaseModel, strict=True, extra="allow"):
    processor: str
    system: str
    threads: int
    gpus: list[str]


class _Result(BaseModel, strict=True, extra="allow"):
    config: dict[str, Any]
    seed: int
    parameters: Annotated[int, Field(lt=2**63)]
    seconds: Annotated[float, Field(ge=0, le=1e9)]
    started: _Time | None = None
    finished: _Time | None = None
    machine: _Machine
    packages: dict[str, Any]
    precision: str
    commit: str | None
    content: str | None = None
    diverged: str = ""
    notes: dict[str, Any] = Field(default={})
    monitor: str = "val/loss"
    better: dict[str, str] = Field(default={})

    @model_validator(mode="after")
    def _check_metrics(self) -> "_Result":
        for name, value in (self.model_extra or {}).items():
            if "/" in name and not (isinstance(value, float) or (type(value) is int and abs(value) < 2**63)):
                raise ValueError(f"{name} is not a number")
        return self


def _configuration(stored: Mapping[str, Any], where: str) -> RunConfig:
    try:
        kept = {name: value for name, value in stored.items() if name not in REMOVED or value != REMOVED[name]}
        config = RunConfig(**kept)  # raises an error for an unknown key
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    json.dumps(config.stated)  # raises an error for settings that are not plain data
    return config


def _read_history(folder: Path) -> "pd.DataFrame | None":
    import numpy as np
    import pandas as pd

    try:
        with damage(f"{HISTORY} is not a table of numbers"):
            with (folder / HISTORY).open(encoding="utf-8", newline="") as file:
                names, *rows = csv.reader(file)
            cells = np.array([[float(cell or "nan") for cell in row] for row in rows])
            history = pd.DataFrame(cells.reshape(len(rows), len(names)), columns=_index(*names))
    except FileNotFoundError:
        return None
    times = [names.index(name) for name in ("step", "seconds") if names.count(name) == 1]
    if len(times) < 2 or not (rows and np.isfinite(history.to_numpy()[:, times]).all()):
        raise UserError(f"{HISTORY} has no rows, or rows without step or seconds")
    return history


@cache  # many histories have the same columns
def _index(*names: str) -> "pd.Index[str]":
    import pandas as pd

    return pd.Index(names)


KEPT = ("parameters", "seconds", "precision", "commit", "packages", "machine", "notes", "content")


def read_outcomes(runs: "Sequence[Run]", root: Path) -> Outcomes:
    """Return a dict that maps the name of each run to its outcome, read from the run's folder inside `root`."""
    return {run.name: [outcome] for run, outcome in zip(runs, iter_outcomes(runs, root), strict=True)}


def iter_outcomes(runs: "Sequence[Run]", root: Path) -> Iterator[Outcome]:
    """Yield the outcomes of runs in order. Threads read many runs at once, because network disks have high latency."""
    begun = _begun({run.folder(root).parent for run in runs})

    def read(run: "Run") -> Outcome:
        folder = run.folder(root)
        return read_outcome(folder, run.config) if folder in begun else Outcome(State.NEW)

    with ThreadPoolExecutor(READERS) as pool:
        yield from pool.map(read, runs)


def _begun(folders: Iterable[Path]) -> set[Path]:
    """Return the folders of runs that have begun. Listing their parents is faster than checking each run's folder."""
    found: set[Path] = set()
    for folder in folders:
        try:
            found.update(folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            continue  # no run in this folder has begun
        except OSError as error:
            raise UserError(f"the folder {folder} cannot be listed: {error.strerror}") from error
    return found


def thinned(rows: Rows, points: int) -> Rows:
    """Return at most `points` of the rows. The returned rows are evenly spaced and include the last row."""
    return rows[:: -max(1, ceil(len(rows) / points))][::-1]


def table_of_results(grid: "Grid", outcomes: Outcomes) -> "pd.DataFrame":
    """Return a table with a row for each run of the grid, in the grid's order. Runs that are not done have a row, too.

    Columns: name, task, attention, seed, setting (the settings that differ within the grid, as text), state, message;
    one column for each setting that differs within the grid; metrics such as "test/acc"; the keys in `KEPT` from
    result.json. Columns without any value may be missing.
    """
    return _table(grid, {run.name: [outcome_of(run, outcomes)] for run in grid.runs})


def table_of_repeats(grid: "Grid", outcomes: Outcomes) -> "pd.DataFrame":
    """Return a table with the columns of `table_of_results`, and a row for each outcome after the first of a run."""
    return _table(grid, {run.name: outcomes.get(run.name, ())[1:] for run in grid.runs})


def table_of_histories(grid: "Grid", outcomes: Outcomes) -> "pd.DataFrame":
    """Return a table with a row for each step at which a finished run logged metrics.

    Columns: name, task, attention, seed, setting, step, seconds of training, and metrics such as "train/loss". If a run
    was trained several times, its first history is used.
    """
    import numpy as np
    import pandas as pd

    identities, histories = [], []
    for run, identity in _identities(grid):
        finished = (one.history for one in outcomes.get(run.name, ()) if one.state == State.FINISHED)
        if (history := next((one for one in finished if one is not None), None)) is not None:
            identities.append(identity)
            histories.append(history)
    if not histories:
        return pd.DataFrame()
    rows = np.repeat(np.arange(len(histories)), [*map(len, histories)])
    of_runs = pd.DataFrame(identities).iloc[rows].reset_index(drop=True)
    return pd.concat([_stacked(histories), of_runs], axis=1)


def _stacked(histories: "Sequence[pd.DataFrame]") -> "pd.DataFrame":
    """Return one table of all histories. For many small histories, `pandas.concat` takes a hundred times as long."""
    import numpy as np
    import pandas as pd

    names = [*dict.fromkeys(name for columns in dict.fromkeys(map(_names, histories)) for name in columns)]
    values, start = np.full((sum(map(len, histories)), len(names)), np.nan), 0
    for history in histories:
        end = start + len(history)
        values[start:end, [names.index(name) for name in _names(history)]] = history.to_numpy()
        start = end
    return pd.DataFrame(values, columns=names)


def _names(history: "pd.DataFrame") -> tuple[str, ...]:
    return tuple(history.columns)


def _table(grid: "Grid", outcomes: Outcomes) -> "pd.DataFrame":
    import pandas as pd

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


def _identities(grid: "Grid") -> "Iterator[tuple[Run, dict[str, Any]]]":
    for run in grid.runs:
        about = {"name": run.name, "task": run.task, "attention": run.attention, "seed": run.seed}
        yield run, about | {"setting": run.text(grid.varying)}
