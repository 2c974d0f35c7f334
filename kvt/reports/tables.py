"""The tables of a study: ours beside the published, and each attention against the first."""

from collections.abc import Mapping, Sequence
from math import isfinite, isnan, nan
from typing import Any, NamedTuple

import pandas as pd

from kvt.reports.names import METRICS, Metric, label, metric_of
from kvt.reports.page import Markdown, markdown_table
from kvt.reports.statistics import Comparison, Summary, compare, summarise, verdict
from kvt.study.grid import Grid, Run
from kvt.study.run import State
from kvt.system.errors import UserError, unknown

KEYS = ("metric", "columns", "published", "relabelled", "note")

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

    @property
    def published_right(self) -> Published:
        """The paper's numbers, each column by its right name."""
        return {
            attention: {self.relabelled.get(column, column): value for column, value in cells.items()}
            for attention, cells in self.published.items()
        }


class Compared(NamedTuple):
    """A line of the table of comparisons.

    Attributes:
        column: of the table.
        attention: compared with the first.
        numbers: their difference.
        low: lower end of the interval of the difference; NaN where nothing is tested.
        high: its upper end.
        different: p that there is no difference.
        equal: p that it is beyond the margin; all of these corrected for the number of tested lines.
        verdict: what the interval says, or why nothing is tested.
    """

    column: str
    attention: str
    numbers: Comparison
    low: float
    high: float
    different: float
    equal: float
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
    if isinstance(columns, list) and all(isinstance(task, str) for task in columns):
        columns = {task: {"task": task} for task in columns}
    if not isinstance(columns, dict) or not all(isinstance(wanted, dict) for wanted in columns.values()):
        raise UserError(f"{grid.name}: columns: must be names, each with settings and their values")
    return {
        str(name): frozenset(run.name for run in grid.runs if _matches(run, wanted)) for name, wanted in columns.items()
    }


def tables_of(grid: Grid) -> list[Table]:
    """The tables that a grid asks for; a column, or table, without runs or published numbers is left out.

    Raises:
        UserError: a key or metric that there is not; published numbers that are none.
    """
    contents = grid.content.get("tables", [{"metric": "test/acc"}])
    if not isinstance(contents, list) or not all(isinstance(content, dict) for content in contents):
        raise UserError(f"{grid.name}: tables: must be a list, each with a metric:")
    tables = []
    for content in contents:
        for key in content:
            if key not in KEYS:
                raise unknown(f"key in tables of {grid.name}:", key, KEYS)
        if (metric := content.get("metric")) not in (known := [f"{s}/{m}" for s in ("test", "val") for m in METRICS]):
            raise unknown(f"metric in tables of {grid.name}:", metric, known)
        try:
            published = {
                attention: {str(column): _mean_and_std(value) for column, value in cells.items()}
                for attention, cells in content.get("published", {}).items()
            }
            relabelled = {str(printed): str(right) for printed, right in content.get("relabelled", {}).items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(
                f"{grid.name}: published: must be attentions, each with columns and numbers; relabelled: columns"
            ) from error
        columns = {
            name: runs
            for name, runs in columns_of(grid, content.get("columns", grid.content.get("columns"))).items()
            if runs or any(name in cells for cells in published.values())
        }
        note = " ".join(str(content.get("note", "")).split())
        if columns:
            tables.append(Table(metric, columns, published, relabelled, note))
    return tables


def finished(results: pd.DataFrame, table: Table, column: str) -> pd.DataFrame:
    """The finished runs of a column that have the table's metric."""
    known = results if table.metric in results else results.assign(**{table.metric: nan})
    rows = known[known.name.isin(table.columns[column]) & (known.state == State.FINISHED)]
    return rows[rows[table.metric].notna()]


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
    """Each attention against the first, column by column.

    Args:
        results: of the study.
        table: which metric and columns.
        margin: what still counts as equal, in points.
    """
    first, *others = dict.fromkeys(results.attention)
    kind, found = table.kind, []
    reach = margin * kind.point
    for column in table.columns:
        rows = finished(results, table, column)
        pairs = rows.pivot(index=["task", "setting", "seed"], columns="attention", values=table.metric)
        for attention in others:
            if {attention, first} <= set(pairs) and len(both := pairs[[attention, first]].dropna().reset_index()):
                numbers = compare(both[attention], both[first], both.task + " " + both.setting)
                untested = ""
                if both[[attention, first]].min(axis=None) > kind.highest - reach:
                    untested = "both at the ceiling"  # there is nothing to ask
                if diverged(results, table, column, attention) > diverged(results, table, column, first):
                    untested = "diverges"  # the pairs that are left were not left by chance
                found.append((column, attention, numbers._replace(error=nan) if untested else numbers, untested))
    tests = max(1, sum(isfinite(numbers.error) for _, _, numbers, _ in found))
    compared = []
    for column, attention, numbers, untested in found:
        low, high = numbers.interval(tests)
        judged = untested or verdict(low, high, reach, kind.more_is_better)
        p, q = numbers.different(tests), numbers.equal(reach, tests)
        compared.append(Compared(column, attention, numbers, low, high, p, q, judged))
    return compared


def diverged(results: pd.DataFrame, table: Table, column: str, attention: str) -> int:
    """How many runs of a cell have diverged."""
    rows = results[results.name.isin(table.columns[column]) & (results.attention == attention)]
    return int((rows.state == State.DIVERGED).sum())


def markdown_of_results(results: pd.DataFrame, table: Table, relabelled: bool = False) -> Markdown:
    """Rows: ours, published and the difference of each attention. Columns as printed, or with their right names."""
    kind, cells = table.kind, summaries(results, table)
    all_published = table.published_right if relabelled else table.published
    lines = [["", *table.columns, "mean"]]
    for attention in dict.fromkeys(results.attention):
        ours = {column: cells[attention, column] for column in table.columns}
        wanted = results[results.attention == attention].name
        counts = {column: int(wanted.isin(names).sum()) for column, names in table.columns.items()}
        theirs = all_published.get(attention, {})
        published = {column: theirs.get(column, (nan, nan)) for column in table.columns}
        lines.append(
            [
                Markdown("**{}**").format(label(attention)),
                *(_cell(kind, ours[c], counts[c], diverged(results, table, c, attention)) for c in table.columns),
            ]
        )
        lines[-1].append(kind.value(_mean([cell.mean for cell in ours.values()])))
        if theirs:
            lines.append(["published", *(_published(kind, published[c]) for c in table.columns)])
            lines[-1].append(kind.value(_mean([mean for mean, _ in published.values()])))
            differences = [ours[c].mean - published[c][0] for c in table.columns]
            lines.append(["difference", *(kind.points(d) for d in [*differences, _mean(differences)])])
    return markdown_table(lines)


def markdown_of_comparisons(compared: Sequence[Compared], kind: Metric) -> Markdown:
    """A line a comparison."""
    lines = [["", "attention", "pairs", "difference", "95 % interval", "p (different)", "p (equal)", "verdict"]]
    for column, attention, numbers, low, high, different, equal, judged in compared:
        interval = f"{kind.points(low)} to {kind.points(high)}" if isfinite(low) else "–"
        pairs = f"{numbers.pairs} ({numbers.settings} setting{'s' * (numbers.settings > 1)})"
        difference = kind.points(numbers.difference)
        lines.append([column, label(attention), pairs, difference, interval, _p(different), _p(equal), judged])
    return markdown_table(lines)


def _cell(kind: Metric, cell: Summary, wanted: int, lost: int) -> str:
    if not wanted:
        return "not in this scale"
    gone = f", {lost} diverged" * (lost > 0)
    if not cell.runs:
        return f"not run (0 of {wanted}{gone})"
    spread = "".join(f" ± {kind.value(std)}" for std in (cell.over_settings, cell.over_seeds))
    count = str(cell.runs) if cell.runs == wanted else f"{cell.runs} of {wanted}{gone}"
    return f"{kind.value(cell.mean)}{spread}, n = {count}"


def _p(value: float) -> str:
    return "–" if isnan(value) else f"{value:.4f}" if value >= 0.0001 else "< 0.0001"


def _published(kind: Metric, value: tuple[float, float]) -> str:
    mean, std = value
    return kind.value(mean) + (f" ± {kind.value(std)}" if isfinite(std) else "")


def _mean(numbers: Sequence[float]) -> float:
    """NaN if one is: the mean of other columns would be another mean."""
    return sum(numbers) / len(numbers)


def _mean_and_std(value: Any) -> tuple[float, float]:
    mean, std = value if isinstance(value, list) else (value, nan)
    return float(mean), float(std)


def _matches(run: Run, wanted: Mapping[str, Any]) -> bool:
    return all(_same(run.value(name), value) for name, value in wanted.items())


def _same(ours: Any, wanted: Any) -> bool:
    try:
        return float(ours) == float(wanted)  # YAML takes 1e-3 for a word
    except (TypeError, ValueError):
        return bool(ours == wanted)
