"""Makes the explorer of a study: one HTML file that shows all runs and their learning curves."""

import json
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvt.reports.figures import MOMENTS, line_styles
from kvt.reports.names import STAGES, metric_of
from kvt.reports.tables import tables_of
from kvt.study.grid import Grid
from kvt.study.outcomes import Outcomes, outcome_of, tally, thinned
from kvt.system.files import page_with
from kvt.system.quoting import shell_word

TEMPLATE = Path(__file__).parent / "explorer.html"
LABELS = {"parameters": "parameters", "seconds": "training time (s)"}
POINTS = 60  # largest number of points of one curve
FEWEST_POINTS = 12  # number of points of a curve if there are very many curves
ALL_POINTS = 300_000  # largest number of points of all curves together, as far as `FEWEST_POINTS` allows


def explorer_page(grid: Grid, outcomes: Outcomes) -> str:
    """Return the HTML page. Names that users choose stand only in the JSON of the page, and cannot act as HTML."""
    return page_with(explorer_data(grid, outcomes), TEMPLATE)


def explorer_data(grid: Grid, outcomes: Outcomes) -> dict[str, Any]:
    """Return the data of the page: a table with a row for each run in the grid's order, the commands and the curves."""
    made = [outcome_of(run, outcomes) for run in grid.runs]
    choices: Iterable[dict[str, Any]] = (
        {
            **{"task": run.task, "attention": run.attention},
            **{name: value for name, value in run.setting.items() if name in grid.varying},
            **{"seed": run.seed, "state": one.state},
        }
        for run, one in zip(grid.runs, made, strict=True)
    )
    words = [{word.partition("=")[0]: shell_word(word) for word in run.config.words} for run in grid.runs]
    columns = {
        "choice": choices,
        "result": (_numbers(one.result) for one in made),
        "about": ({"name": run.name, "message": one.message} for run, one in zip(grid.runs, made, strict=True)),
        "setting": (run.config.flat for run in grid.runs),
        "machine": (_made_on(one.result) for one in made),
        "command": words,
    }
    histories = ((one.history for one in outcomes.get(run.name, ()) if one.history is not None) for run in grid.runs)
    return {
        "title": grid.title,
        "about": f"Scale {grid.scale}: {grid.about} {tally(one.state for one in made)}",
        "y": [table.metric for table in tables_of(grid, outcomes)],
        "attentions": [style._asdict() for style in line_styles(run.attention for run in grid.runs).values()],
        "moments": MOMENTS,
        "columns": [{"kind": kind, **column} for kind, rows in columns.items() for column in _columns(rows, len(made))],
        **_curves([next(found, None) for found in histories]),
    }


def _columns(rows: Iterable[Mapping[str, Any]], number: int) -> list[dict[str, Any]]:
    """Return for each name its distinct values, and for each row the index of the row's value; -1 without a value."""
    places: dict[str, list[int]] = {}
    values: dict[str, dict[str, Any]] = {}  # the keys are repr(value), because 1, 1.0 and True are equal as keys
    for place, row in enumerate(rows):
        for name, value in row.items():
            if name not in places:
                places[name], values[name] = [-1] * number, {}
            key, found = repr(value), values[name]
            if key not in found:
                found[key] = len(found), _value(value)
            places[name][place] = found[key][0]
    columns = []
    for name, of_rows in places.items():
        column = {"name": name, "label": _label(name), "values": [value for _, value in values[name].values()]}
        columns.append(column if set(of_rows) == {0} else column | {"places": of_rows})
    return columns


def _value(value: Any) -> str | float:
    """Return a string or a finite number unchanged, and any other value as a JSON string."""
    if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)):
        return value
    return json.dumps(value)


def _label(name: str) -> str:
    stage = name.partition("/")[0]
    return f"{STAGES[stage]} {metric_of(name).label}" if stage in STAGES else LABELS.get(name, name)


def _numbers(result: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in result.items() if "/" in name or name in LABELS}
    return {name: _rounded(value) if isinstance(value, float) else value for name, value in found.items()}


def _rounded(number: float) -> float:
    return float(f"{number:.5g}")


def _made_on(result: Mapping[str, Any]) -> dict[str, Any]:
    parts = {f"{name}.{part}": v for name in ("machine", "packages") for part, v in result.get(name, {}).items()}
    return parts | {name: result[name] for name in ("precision", "commit", "content", "notes") if result.get(name)}


def _curves(histories: Sequence[pd.DataFrame | None]) -> dict[str, Any]:
    """Return the curves of all runs with a reduced number of points.

    "metrics" lists the names of metrics. "steps" lists the distinct sequences of steps. "curves" has a list of groups
    for each run. A group holds the metrics that the run measured at the same steps. It has three items: the index of
    the sequence in "steps", the seconds, and a dict that maps the index of a metric to its values.
    """
    metrics = [*dict.fromkeys(name for history in histories if history is not None for name in _metrics(history))]
    number = sum(len(_metrics(history)) for history in histories if history is not None)
    points = max(FEWEST_POINTS, min(POINTS, ALL_POINTS // max(1, number)))
    steps: dict[tuple[int, ...], int] = {}
    curves = []
    for history in histories:
        groups: dict[tuple[int, ...], dict[int, list[Any]]] = {}
        columns = {} if history is None else dict(zip(history, history.to_numpy(float).T, strict=True))
        for name in metrics:
            if name in columns:
                kept = thinned(np.flatnonzero(~np.isnan(columns[name])), points).tolist()
                groups.setdefault(tuple(kept), {})[metrics.index(name)] = [*map(_point, columns[name][kept])]
        curves.append(
            [
                [
                    steps.setdefault(tuple(columns["step"][[*kept]].astype(int).tolist()), len(steps)),
                    [*map(_rounded, columns["seconds"][[*kept]])],
                    values,
                ]
                for kept, values in groups.items()
                if kept
            ]
        )
    named = [{"name": name, "label": _label(name)} for name in metrics]
    return {"metrics": named, "steps": [*steps], "curves": curves}


def _metrics(history: pd.DataFrame) -> list[str]:
    return [name for name in history if name not in ("step", "seconds")]


def _point(number: float) -> float | None:
    return _rounded(number) if isfinite(number) else None
