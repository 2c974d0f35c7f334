"""Records: the results of a grid in three files, which can be shared and extended.

results.csv has a row for each run. The row is a flattened result.json: the column "model.dim" is an argument of the
task's class, "machine.processor" an entry of "machine". A cell is JSON or other text, and is empty if the run has no
such value. histories.csv.gz has the histories, reduced to fewer rows. manifest.json has the SHA-256 of the other files,
and a list of additions: who added how many runs, and when.

Only one process at a time extends a record, and the record is readable at every moment. The process first writes new
files beside the old files, as *.next. Then it writes the manifest with the new hashes, and renames the new files.
"""

import gzip
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd
from filelock import FileLock
from pydantic import AwareDatetime, BaseModel

from kvt.run.config import GROUPS, PARTS, TRAINER, RunConfig
from kvt.study.grid import Grid, Run
from kvt.study.outcomes import RESULT, Outcome, State, damage, ended, read_outcome, thinned
from kvt.system.console import say
from kvt.system.errors import UserError
from kvt.system.files import sha256_of, write_atomically
from kvt.system.quoting import printable

RESULTS, HISTORIES, MANIFEST = "results.csv", "histories.csv.gz", "manifest.json"
POINTS = 100  # a history keeps at most this many rows with training metrics alone, and as many other rows
KEY = ["name", "replication"]
FIRST = [*KEY, "task", "attention", "seed", "state"]
LEFT_OUT = ("task", "attn", "seed", "better")  # keys of result.json that other columns or the task's class have


class _Addition(BaseModel):
    by: str
    when: AwareDatetime
    runs: int


class _Manifest(BaseModel):
    version: Literal[1] = 1
    grid: str
    scale: str
    files: dict[str, str]  # SHA-256, hexadecimal
    added: list[_Addition]


class Row(NamedTuple):
    name: str
    task: str
    attention: str
    outcome: Outcome


def find_outcomes(
    runs: Sequence[Run], folders: Iterable[Path], known: Iterable[Outcome] = ()
) -> dict[str, list[Outcome]]:
    """Return a dict from a run's name to its outcomes, read from folders that contain runs or records at any depth.

    A result belongs to the run with the same configuration. Equal results of a run count once. The outcomes in `known`
    come first. A result that continued from a checkpoint belongs to no run. The function prints a note for each damaged
    run, which is left out, and the number of runs in each of several folders. Raises UserError if the folders have no
    result of the runs.
    """
    # results with other classes are skipped, because importing a class of an unknown source is unsafe
    classes = {(run.config.model["class_path"], run.config.data["class_path"]) for run in runs}
    found: dict[str, list[Outcome]] = {run.name: [] for run in runs}
    seen = set()
    sources = {"": known} | {str(folder): _outcomes(folder) for folder in folders}
    counts: dict[str, int] = {}
    for folder, outcomes in sources.items():
        names = set()
        for outcome in outcomes:
            config = outcome.made_with
            paths = (config.model["class_path"], config.data["class_path"])
            from_scratch = config.ckpt_path is None
            if paths in classes and from_scratch and (name := config.name) in found:
                names.add(name)
                if (result := (name, frozenset(_cells(outcome).items()))) not in seen:
                    seen.add(result)
                    found[name].append(outcome)
        if folder:
            counts[folder] = len(names)
    if counts and not any(counts.values()):
        raise UserError(f"--from {' '.join(counts)}: holds none of the {len(runs)} runs")
    for folder, count in counts.items() if len(counts) > 1 else ():
        say(f"--from {printable(folder)}: holds {count} of the {len(runs)} runs")
    return found


def _outcomes(folder: Path) -> Iterator[Outcome]:
    for path in sorted(folder.rglob(MANIFEST)):
        yield from (row.outcome for row in read_record(path.parent)[1])
    for path in sorted(folder.rglob(RESULT)):
        outcome = read_outcome(path.parent)
        if outcome.state == State.DAMAGED:
            say(f"note: {path.parent} is left out: {outcome.message}")
        else:
            yield outcome


def widen_record(grid: Grid, folder: Path, sources: Sequence[Path]) -> str:
    """Add results of a grid, from folders of runs and from other records, to a record; return a line with run counts.

    Rows have the order of the grid. Rows of runs that are no longer in the grid come last. If there are no new results,
    no file is written.
    """
    if (folder / RESULTS).is_file() and not (folder / MANIFEST).exists():
        raise UserError(f"--out {folder}: its {RESULTS} was not written by kvt study record: choose another folder")
    new = [outcome for outcomes in find_outcomes(grid.runs, sources).values() for outcome in outcomes]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        for leftover in folder.glob("*.*.tmp"):  # files of a killed process
            leftover.unlink(missing_ok=True)
        return _widen(grid, folder, new)


def _widen(grid: Grid, folder: Path, new: Sequence[Outcome]) -> str:
    manifest = _Manifest(grid=grid.name, scale=grid.scale, files={}, added=[])
    old: list[Row] = []
    if (folder / MANIFEST).exists():
        manifest, old = read_record(folder)
        if (manifest.grid, manifest.scale) != (grid.name, grid.scale):
            raise UserError(f"--out {folder}: is a record of {manifest.grid} at scale {manifest.scale}: choose another")
        _settle(folder, manifest)  # completes the writes that a killed process has left
    found = find_outcomes(grid.runs, (), known=[*(row.outcome for row in old), *new])
    kept = {id(outcome) for outcomes in found.values() for outcome in outcomes}
    gone = [row for row in old if id(row.outcome) not in kept]
    rows = [Row(run.name, run.task, run.attention, one) for run in grid.runs for one in found[run.name]] + gone
    if added := len(rows) - len(old):
        now = datetime.now(UTC).replace(microsecond=0)
        user = os.fsencode(os.environ.get("USER") or "unknown").decode(errors="replace")
        addition = _Addition(by=user, when=now, runs=added)
        _write(folder, manifest.model_copy(update={"added": [*manifest.added, addition]}), rows)
    done = sum(bool(outcomes) for outcomes in found.values())
    again = len(rows) - len(gone) - done
    return f"{printable(folder)}: {done} of {len(grid.runs)} runs, {again} repeated; {added} added"


def read_record(folder: Path) -> tuple[_Manifest, list[Row]]:
    """Return the manifest and the rows of a record.

    Raises UserError if a file is missing, damaged or edited, or if another version of the format wrote the record.
    """
    with damage(f"{folder}: this record cannot be read"):
        with damage(f"{folder / MANIFEST}"):
            manifest = _Manifest.model_validate_json((folder / MANIFEST).read_bytes())
        contents = {name: _place(folder, name, manifest).read_bytes() for name in (RESULTS, HISTORIES)}
        histories = _read_histories(contents[HISTORIES])
        table = pd.read_csv(BytesIO(contents[RESULTS]), dtype=str, keep_default_na=False)
        rows = []
        for number, cells in enumerate(table.to_dict("records"), start=2):
            history = histories.get((cells["name"], int(cells["replication"])))
            outcome = ended(json.dumps(_result(cells)), history, f"{folder / RESULTS}: line {number}")
            rows.append(Row(cells["name"], cells["task"], cells["attention"], outcome))
        return manifest, rows


def _place(folder: Path, name: str, manifest: _Manifest) -> Path:
    """Return the path of the file whose hash is in the manifest: `name`, or `name`.next after a killed process."""
    for path in (folder / name, folder / f"{name}.next"):
        if path.is_file() and sha256_of(path) == manifest.files.get(name):
            return path
    raise UserError(f"{folder / name}: is missing or not the file that {MANIFEST} names (SHA-256): restore it")


def _settle(folder: Path, manifest: _Manifest) -> None:
    """Rename the *.next files whose hashes are in the manifest to their final names."""
    for name in manifest.files:
        os.replace(_place(folder, name, manifest), folder / name)


def _result(cells: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of result.json from the cells of a row, without Trainer settings that are defaults."""
    result: dict[str, Any] = {"seed": _value(cells["seed"]), "commit": None}
    settings: dict[str, Any] = {"seed": result["seed"]}
    for name, cell in cells.items():
        if name in FIRST or not cell:
            continue
        section, dot, part = name.partition(".")
        if section in (*GROUPS, *PARTS):
            settings[name] = _value(cell)
        elif dot:
            result.setdefault(section, {})[part] = _value(cell)
        else:
            result[name] = _value(cell)
    return {**result, "config": RunConfig.from_flat(settings).as_dict()}


def _cells(outcome: Outcome) -> dict[str, str]:
    """Return the cells of an outcome's row, without the columns in `FIRST`."""
    settings = outcome.made_with.flat.items()
    found = {
        name: value for name, value in settings if name != "seed" and (name not in TRAINER or value != TRAINER[name])
    }
    for name, value in outcome.result.items():
        if name in ("machine", "packages"):
            found |= {f"{name}.{part}": known for part, known in value.items()}
        elif name not in LEFT_OUT and value is not None:
            found[name] = value.isoformat() if isinstance(value, datetime) else value
    return {name: _text(value) for name, value in found.items()}


def _write(folder: Path, manifest: _Manifest, rows: Sequence[Row]) -> None:
    numbers: Counter[str] = Counter()
    lines, histories = [], []
    for name, task, attention, outcome in rows:
        numbers[name] += 1
        key, seed = {"name": name, "replication": numbers[name]}, outcome.made_with.seed_everything
        about = {**key, "task": task, "attention": attention, "seed": seed, "state": outcome.state}
        lines.append({**about, **_cells(outcome)})
        if outcome.history is not None:
            histories.append(_thinned(outcome.history).assign(**key))
    results = pd.DataFrame(lines, columns=[*FIRST, *_columns(lines)])
    table = pd.concat(histories) if histories else pd.DataFrame()
    table = table.reindex(columns=list(dict.fromkeys([*KEY, "step", "seconds", *table.columns])))
    curves = table.to_csv(index=False, float_format="%.7g").encode()
    contents = {RESULTS: results.to_csv(index=False).encode(), HISTORIES: gzip.compress(curves, mtime=0)}
    files = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    manifest = manifest.model_copy(update={"files": files})
    for name, content in contents.items():
        write_atomically(folder / f"{name}.next", content)
    write_atomically(folder / MANIFEST, manifest.model_dump_json(indent=2).encode() + b"\n")
    _settle(folder, manifest)


def _columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the columns of all rows: settings, then metrics, then other columns, each in order of appearance."""
    found = dict.fromkeys(name for row in rows for name in row if name not in FIRST)
    place = {section: n for n, section in enumerate(GROUPS)}
    return sorted(found, key=lambda name: place.get(name.partition(".")[0], len(place) + ("/" not in name)))


def _thinned(history: pd.DataFrame) -> pd.DataFrame:
    """Reduce the rows with training metrics alone to at most `POINTS`; keep all other rows, which tables count."""
    others = [name for name in history if not name.startswith("train/") and name not in ("step", "seconds")]
    measured = history[others].notna().any(axis=1)
    kept = pd.concat([history[measured], thinned(history[~measured], POINTS)]).sort_index()
    return kept.assign(step=kept.step.astype("int64"))


def _read_histories(content: bytes) -> dict[tuple[str, int], pd.DataFrame]:
    table = pd.read_csv(BytesIO(content), compression="gzip", dtype={"name": str, "replication": int})
    groups = table.astype(dict.fromkeys(table.columns.difference(KEY), float)).groupby(KEY)
    return {key: rows.drop(columns=KEY).dropna(axis=1, how="all").reset_index(drop=True) for key, rows in groups}


def _text(value: Any) -> str:
    """Return a value as JSON. Return a printable string unchanged, unless the string can be parsed as JSON."""
    plain = isinstance(value, str) and value and value.isprintable() and _value(value) == value
    return value if plain else json.dumps(value)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
