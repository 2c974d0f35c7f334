"""The tables of a study: ours beside the published, and each attention against the first."""

from collections.abc import Mapping, Sequence
from math import isfinite, isnan
from typing import Any, NamedTuple

import pandas as pd

from kvt.errors import UserError, unknown
from kvt.study.grid import Grid, Run
from kvt.study.names import METRICS, Metric, label, metric_of
from kvt.study.statistics import Comparison, Summary, compare, holm, summarise, verdict
from kvt.study.work import State

Published = Mapping[str, Mapping[str, tuple[float, float]]]
"""By attention and column: mean and standard deviation over settings, which may be NaN."""


class Table(NamedTuple):
    """A table that a grid asks for.

    Attributes:
        metric: such as "test/acc".
        columns: by name, the hashes of the runs that belong there.
        published: the paper's numbers.
        relabelled: by the printed name of a column, its right one.
        note: what a reader must know of it.
    """

    metric: str
    columns: Mapping[str, frozenset[str]]
    published: Published
    relabelled: Mapping[str, str]
    note: str

    @property
    def kind(self) -> Metric:
        """How its metric is written."""
        return metric_of(self.metric)


class Compared(NamedTuple):
    """A line of the table of comparisons: see `Comparison`."""

    column: str
    attention: str
    numbers: Comparison
    p: float
    verdict: str


def columns_of(grid: Grid, columns: Any) -> dict[str, frozenset[str]]:
    """The runs of each column.

    Args:
        grid: where to look.
        columns: filters by name; a list names tasks; None stands for all tasks. A filter is settings with their values.

    Raises:
        UserError: it is none of these.
    """
    if columns is None:
        columns = list(dict.fromkeys(run.task for run in grid.runs))
    if isinstance(columns, list):
        columns = {task: {"task": task} for task in columns}
    if not isinstance(columns, dict) or not all(isinstance(wanted, dict) for wanted in columns.values()):
        raise UserError(f"{grid.name}: columns: must be names, each with settings and their values")
    return {
        str(name): frozenset(run.name for run in grid.runs if _matches(run, wanted)) for name, wanted in columns.items()
    }


def tables_of(grid: Grid) -> list[Table]:
    """The tables that a grid asks for.

    Raises:
        UserError: a key or metric that there is not; published numbers that are none.
    """
    tables = []
    for content in grid.content.get("tables", [{"metric": "test/acc"}]):
        for key in content:
            if key not in ("metric", "columns", "published", "relabelled", "note"):
                raise unknown(f"key in tables of {grid.name}:", key, ["metric", "columns", "published", "note"])
        if (metric := content.get("metric")) not in (known := [f"{s}/{m}" for s in ("test", "val") for m in METRICS]):
            raise unknown("metric", metric, known)
        try:
            published = {
                attention: {str(column): _mean_and_std(value) for column, value in cells.items()}
                for attention, cells in content.get("published", {}).items()
            }
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{grid.name}: published: must be attentions, each with columns and numbers") from error
        columns = {
            name: runs
            for name, runs in columns_of(grid, content.get("columns", grid.content.get("columns"))).items()
            if runs or any(name in cells for cells in published.values())
        }
        note = " ".join(str(content.get("note", "")).split())
        tables.append(Table(metric, columns, published, content.get("relabelled", {}), note))
    return tables


def finished(results: pd.DataFrame, table: Table, column: str) -> pd.DataFrame:
    """The finished runs of a column that have the table's metric."""
    rows = results[results.name.isin(table.columns[column]) & (results.state == State.FINISHED)]
    return rows[rows[table.metric].notna()] if table.metric in rows else rows[:0]


def summaries(results: pd.DataFrame, table: Table) -> dict[tuple[str, str], Summary]:
    """By attention and column."""
    cells = {}
    for attention in dict.fromkeys(results.attention):
        for column in table.columns:
            rows = finished(results, table, column)
            rows = rows[rows.attention == attention]
            cells[attention, column] = summarise(
                rows.get(table.metric, pd.Series(dtype=float)), rows.task + " " + rows.setting
            )
    return cells


def comparisons(results: pd.DataFrame, table: Table, margin: float) -> list[Compared]:
    """Each attention against the first, column by column, then over all columns.

    Args:
        results: of the study.
        table: which metric and columns.
        margin: what still counts as equal, in points.
    """
    attentions = list(dict.fromkeys(results.attention))
    found: list[tuple[str, str, Comparison]] = []
    parts = {column: finished(results, table, column) for column in table.columns}
    parts = {column: rows for column, rows in parts.items() if len(rows)}
    if len(parts) > 1:
        parts["all"] = pd.concat(parts.values()).drop_duplicates("name")
    for column, rows in parts.items():
        pairs = rows.pivot(index=["task", "setting", "seed"], columns="attention", values=table.metric)
        for attention in attentions[1:]:
            if {attention, attentions[0]} <= set(pairs):
                both = pairs[[attention, attentions[0]]].dropna().reset_index()
                if len(both):
                    settings = both.task + " " + both.setting
                    found.append((column, attention, compare(both[attention], both[attentions[0]], settings)))
    corrected = holm([numbers.p for _, _, numbers in found])
    kind = table.kind
    return [
        Compared(column, attention, numbers, p, verdict(numbers, p, margin * kind.point, kind.more_is_better))
        for (column, attention, numbers), p in zip(found, corrected, strict=True)
    ]


def markdown_of_results(results: pd.DataFrame, table: Table, relabelled: bool = False) -> str:
    """Rows: ours, published and the difference of each attention. Columns as printed, or with their right names."""
    kind, cells = table.kind, summaries(results, table)
    printed = {table.relabelled.get(column, column) if relabelled else column: column for column in table.columns}
    lines = [["", *table.columns, "mean"]]
    for attention in dict.fromkeys(results.attention):
        ours = {column: cells[attention, column] for column in table.columns}
        wanted = results[results.attention == attention].name
        counts = {column: int(wanted.isin(names).sum()) for column, names in table.columns.items()}
        theirs = table.published.get(attention, {})
        published = {column: theirs.get(printed.get(column, column), (float("nan"),) * 2) for column in table.columns}
        lines.append([f"**{label(attention)}**", *(_cell(kind, ours[c], counts[c]) for c in table.columns)])
        lines[-1].append(kind.value(_mean([cell.mean for cell in ours.values()])))
        if theirs:
            lines.append(["published", *(_published(kind, published[c]) for c in table.columns)])
            lines[-1].append(kind.value(_mean([mean for mean, _ in published.values()])))
            differences = [ours[c].mean - published[c][0] for c in table.columns]
            lines.append(["difference", *(kind.points(d) for d in [*differences, _mean(differences)])])
    return markdown_table(lines)


def markdown_of_comparisons(compared: Sequence[Compared], kind: Metric) -> str:
    """A line a comparison."""
    lines = [["", "attention", "pairs", "difference", "95 % interval", "p, corrected", "verdict"]]
    for column, attention, numbers, p, judged in compared:
        interval = f"{kind.points(numbers.low)} to {kind.points(numbers.high)}" if isfinite(numbers.low) else "–"
        pairs = f"{numbers.pairs} ({numbers.settings} settings)"
        shown = "–" if isnan(p) else f"{p:.4f}" if p >= 0.0001 else "< 0.0001"
        lines.append([column, label(attention), pairs, kind.points(numbers.difference), interval, shown, judged])
    return markdown_table(lines)


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """A table, its first line the heading."""
    heading, *rest = lines
    rule = [":--", *["--:"] * (len(heading) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heading, rule, *rest])


def _cell(kind: Metric, cell: Summary, wanted: int) -> str:
    if not wanted:
        return "not in this scale"
    if not cell.runs:
        return f"not run (0 of {wanted})"
    spread = "".join(f" ± {kind.value(std)}" for std in (cell.over_settings, cell.over_seeds))
    count = str(cell.runs) if cell.runs == wanted else f"{cell.runs} of {wanted}"
    return f"{kind.value(cell.mean)}{spread} ({count})"


def _published(kind: Metric, value: tuple[float, float]) -> str:
    mean, std = value
    return kind.value(mean) + (f" ± {kind.value(std)}" if isfinite(std) else "")


def _mean(numbers: Sequence[float]) -> float:
    """NaN if one is: the mean of other columns would be another mean."""
    return sum(numbers) / len(numbers)


def _mean_and_std(value: Any) -> tuple[float, float]:
    mean, std = value if isinstance(value, list) else (value, float("nan"))
    return float(mean), float(std)


def _matches(run: Run, wanted: Mapping[str, Any]) -> bool:
    return all(_same(run.value(name), value) for name, value in wanted.items())


def _same(ours: Any, wanted: Any) -> bool:
    try:
        return float(ours) == float(wanted)  # YAML takes 1e-3 for a word
    except (TypeError, ValueError):
        return bool(ours == wanted)
