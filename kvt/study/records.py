"""Records: the results of a grid in three files, which can be shared and extended.

A row of results.csv is a flattened result.json: the column "model.dim" has an argument of the task's class, and
"machine.processor" an entry of "machine". A cell is JSON or other text. It is empty if the run has no such value, or if
a Trainer setting has its default. histories.csv.gz has the histories, long ones with fewer rows. record.yaml names the
grid and the scale, and lists for each addition the date, the number of runs and the commits of kvt that trained them.

One process at a time extends a record. It replaces the files one after the other, results.csv last. If the process is
killed before the last replacement, the record keeps the old results. Histories of runs without a row are ignored.
"""

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml
from filelock import FileLock

from kvt.run.config import RunConfig
from kvt.run.sections import GROUPS, PARTS, TRAINER
from kvt.study.grid import Grid, Run
from kvt.study.outcomes import RESULT, Outcome, State, damage, ended, read_outcome, thinned
from kvt.system import UserError, parse_yaml, printable, say, user_path, write_atomically

RESULTS, HISTORIES, RECORD = "results.csv", "histories.csv.gz", "record.yaml"
POINTS = 100  # largest number of rows with only training metrics that a record keeps of a history
KEY = ["name", "replication"]
FIRST = [*KEY, "task", "attention", "seed", "state"]
LEFT_OUT = ("task", "attn", "seed", "better")  # keys of result.json that other columns or the task's class have


class Row(NamedTuple):
    name: str
    task: str
    attention: str
    outcome: Outcome


class Record(NamedTuple):
    grid: str
    scale: str
    added: list[dict[str, Any]]  # {"date": "2026-11-24", "commit": "c47a6d85, unknown", "runs": 360}
    rows: list[Row]


def find_outcomes(
    runs: Sequence[Run], folders: Iterable[str | Path], known: Iterable[Outcome] = ()
) -> dict[str, list[Outcome]]:
    """Return the outcomes of each run by name, read from folders that contain runs or records at any depth.

    A result belongs to the run with the same `RunConfig.name`, but to no run if its configuration has a `ckpt_path`.
    Equal results of a run count once. The outcomes in `known` come first. Damaged runs are left out, with a printed
    note. Raises UserError if a folder does not exist, if a record is damaged, or if folders have no results of `runs`.
    """
    # results with other classes are skipped, because importing a class of an unknown source is unsafe
    classes = {(run.config.model["class_path"], run.config.data["class_path"]) for run in runs}
    found: dict[str, dict[Any, Outcome]] = {run.name: {} for run in runs}
    places = [user_path(folder) for folder in folders]
    for outcome in chain(known, *map(_outcomes, places)):
        config = outcome.config
        own = (config.model["class_path"], config.data["class_path"]) in classes and config.ckpt_path is None
        if own and (name := config.name) in found:
            found[name].setdefault(frozenset(_cells(outcome).items()), outcome)
    if places and not any(found.values()):
        raise UserError(f"--from {' '.join(map(str, places))}: holds none of the {len(runs)} runs")
    return {name: [*outcomes.values()] for name, outcomes in found.items()}


def _outcomes(folder: Path) -> Iterator[Outcome]:
    if not folder.is_dir():
        raise UserError(f"--from {folder}: is not a folder")
    for record in sorted(folder.rglob(RECORD)):
        yield from (row.outcome for row in read_record(record.parent).rows)
    for path in sorted(folder.rglob(RESULT)):
        outcome = read_outcome(path.parent)
        if outcome.state == State.FAILED:
            say(f"note: {path.parent} is left out: {outcome.message}")
        else:
            yield outcome


def widen_record(grid: Grid, folder: Path, sources: Sequence[str | Path]) -> str:
    """Add results of a grid, from folders of runs and other records, to the record `folder`; return a line of counts.

    The function makes a new record if `folder` has none. Rows are in the order of the grid. Rows of runs that are no
    longer in the grid come last. If there are no new results, the record is not written. Raises UserError if
    `find_outcomes` does, if the record is damaged, or if it belongs to another grid or scale.
    """
    new = [outcome for outcomes in find_outcomes(grid.runs, sources).values() for outcome in outcomes]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        old = read_record(folder) if (folder / RESULTS).is_file() else Record(grid.name, grid.scale, [], [])
        if (old.grid, old.scale) != (grid.name, grid.scale):
            raise UserError(f"--out {folder}: is a record of {old.grid} at scale {old.scale}: choose another")
        found = find_outcomes(grid.runs, (), known=[*(row.outcome for row in old.rows), *new])
        kept = {id(outcome) for outcomes in found.values() for outcome in outcomes}
        gone = [row for row in old.rows if id(row.outcome) not in kept]
        rows = [Row(run.name, run.task, run.attention, one) for run in grid.runs for one in found[run.name]] + gone
        if added := len(rows) - len(old.rows):
            _write(folder, old, rows)
    done = sum(bool(outcomes) for outcomes in found.values())
    again = len(rows) - len(gone) - done
    return f"{printable(folder)}: {done} of {len(grid.runs)} runs, {again} repeated; {added} added"


def read_record(folder: Path) -> Record:
    """Return a record; raise UserError if a file is missing or damaged."""
    with damage(str(folder / RECORD)):
        about = parse_yaml((folder / RECORD).read_bytes(), RECORD)
        grid, scale, added = about["grid"], about["scale"], about["added"]
    with damage(str(folder / HISTORIES)):
        table = pd.read_csv(folder / HISTORIES, dtype={"name": str, "replication": int})
        groups = table.astype(dict.fromkeys(table.columns.difference(KEY), float)).groupby(KEY)
        histories = {
            key: rows.drop(columns=KEY).dropna(axis=1, how="all").reset_index(drop=True) for key, rows in groups
        }
    with damage(str(folder / RESULTS)):
        rows = []
        for cells in pd.read_csv(folder / RESULTS, dtype=str, keep_default_na=False).to_dict("records"):
            history = histories.get((cells["name"], int(cells["replication"])))
            rows.append(Row(cells["name"], cells["task"], cells["attention"], ended(_result(cells), history)))
    return Record(grid, scale, added, rows)


def _result(cells: Mapping[str, str]) -> dict[str, Any]:
    """Return the entries of result.json that are in a row of results.csv; "config" lacks default Trainer settings."""
    result: dict[str, Any] = {"seed": _value(cells["seed"]), "commit": None}
    settings: dict[str, Any] = {"seed": result["seed"]}
    for name, value in ((name, _value(cell)) for name, cell in cells.items() if cell and name not in FIRST):
        section, dot, part = name.partition(".")
        if section in (*GROUPS, *PARTS):
            settings[name] = value
        else:
            (result.setdefault(section, {}) if dot else result)[part or section] = value
    return {**result, "config": RunConfig.from_flat(settings).as_dict()}


def _cells(outcome: Outcome) -> dict[str, str]:
    """Return an outcome's cells by column. Columns in `FIRST` and Trainer settings with their default are left out."""
    settings = sorted(outcome.config.flat.items(), key=lambda setting: setting[0].startswith("trainer."))
    found = {n: v for n, v in settings if n != "seed" and (n not in TRAINER or v != TRAINER[n])}
    for name, value in outcome.result.items():
        if name in ("machine", "packages"):
            found |= {f"{name}.{part}": known for part, known in value.items()}
        elif name not in LEFT_OUT and value is not None:
            found[name] = value
    return {name: _text(value) for name, value in found.items()}


def _write(folder: Path, old: Record, rows: Sequence[Row]) -> None:
    numbers: Counter[str] = Counter()
    lines, histories = [], []
    for name, task, attention, outcome in rows:
        numbers[name] += 1
        key, seed = {"name": name, "replication": numbers[name]}, outcome.config.seed_everything
        about = {**key, "task": task, "attention": attention, "seed": seed, "state": outcome.state}
        lines.append({**about, **_cells(outcome)})
        if outcome.history is not None:
            histories.append(_thinned(outcome.history).assign(**key))
    table = pd.concat(histories or [pd.DataFrame(columns=[*KEY, "step", "seconds"])])
    table = table[[*dict.fromkeys([*KEY, "step", "seconds", *table])]]
    curves = table.to_csv(index=False, float_format="%.7g").encode()
    before = {id(row.outcome) for row in old.rows}
    new = [row.outcome.result for row in rows if id(row.outcome) not in before]
    commits = ", ".join(sorted({str(result.get("commit") or "unknown") for result in new}))
    addition = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commits, "runs": len(new)}
    about = {"grid": old.grid, "scale": old.scale, "added": [*old.added, addition]}
    write_atomically(folder / RECORD, yaml.safe_dump(about, sort_keys=False))
    write_atomically(folder / HISTORIES, gzip.compress(curves, mtime=0))
    write_atomically(folder / RESULTS, pd.DataFrame(lines).to_csv(index=False))


def _thinned(history: pd.DataFrame) -> pd.DataFrame:
    """Keep at most `POINTS` of a history's rows that have only training metrics, and all other rows."""
    others = [name for name in history if not name.startswith("train/") and name not in ("step", "seconds")]
    measured = history[others].notna().any(axis=1)
    kept = pd.concat([history[measured], thinned(history[~measured], POINTS)]).sort_index()
    return kept.assign(step=kept.step.astype("int64"))


def _text(value: Any) -> str:
    """Return a value as JSON, or unchanged if it is a non-empty, printable string that `_value` reads as itself."""
    plain = isinstance(value, str) and value and value.isprintable() and _value(value) == value
    return value if plain else json.dumps(value)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
