"""The tables of a study: our results beside the published ones, and each attention compared with the first."""

from collections.abc import Mapping, Sequence
from itertools import product
from math import inf, isfinite, isnan, nan
from typing import Any, NamedTuple

import pandas as pd

from kvt.reports.names import METRICS, Metric, label, metric_of
from kvt.reports.page import Markdown, markdown_table
from kvt.reports.statistics import Comparison, Summary, compare, summarise, verdict
from kvt.study.grid import Grid
from kvt.study.outcomes import State
from kvt.system.errors import UserError, unknown

Published = Mapping[str, Mapping[str, tuple[float, float]]]
"""By attention and column: mean and standard deviation over settings, which may be NaN."""


CEILING = "both at the ceiling"
NEARLY = 0.99  # of the highest value


class Table(NamedTuple):
    metric: str  # such as "test/acc"
    columns: Mapping[str, frozenset[str]]  # the names of the runs of each column
    published: Published
    relabelled: Mapping[str, str]  # the right name of each column that the paper mislabels
    note: str

    @property
    def kind(self) -> Metric:
        return metric_of(self.metric)

    @property
    def published_right(self) -> Published:
        return {
            attention: {self.relabelled.get(column, column): value for column, value in cells.items()}
            for attention, cells in self.published.items()
        }


class Compared(NamedTuple):
    """A comparison of an attention with the first in one column; interval and p are corrected for all tested lines."""

    column: str
    attention: str
    numbers: Comparison
    low: float  # the interval of the difference; NaN where nothing is tested
    high: float
    different: float  # p that there is no difference
    equal: float  # p that it is beyond the margin
    verdict: str  # or why nothing is tested

    @property
    def smallest_margin(self) -> float:
        """The smallest margin within which the interval lies; NaN where nothing is tested."""
        return max(abs(self.low), abs(self.high))

    def in_words(self, kind: Metric) -> str:
        """Return the verdict, and with "undecided" the smallest margin, in points."""
        undecided = self.verdict == "undecided"
        return self.verdict + f", ± {self.smallest_margin / kind.point:.2f}" * undecided


def columns_of(grid: Grid, columns: Any) -> dict[str, frozenset[str]]:
    """Return the names of the runs of each column, given its settings, or given tasks; None stands for all tasks."""
    if columns is None or isinstance(columns, list):
        columns = {task: {"task": task} for task in columns or [run.task for run in grid.runs]}
    found = {}
    for column, wanted in columns.items():
        runs = (run for run in grid.runs if all(_same(run.value(name), value) for name, value in wanted.items()))
        found[str(column)] = frozenset(run.name for run in runs)
    return found


def tables_of(grid: Grid) -> list[Table]:
    """Return the tables that a grid asks for, without columns that have neither runs nor published numbers."""
    try:
        tables = [_table(grid, content) for content in grid.content.get("tables", [{"metric": "test/acc"}])]
    except UserError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        parts = "a metric:, columns: of names with settings, published: of attentions with columns and numbers"
        raise UserError(f"{grid.name}: tables: expected a list, each with {parts}, relabelled: of columns") from error
    return [table for table in tables if table.columns]


def curves_of(grid: Grid) -> list[list[str]]:
    """Return the figures of learning curves that a grid asks for, each as its metrics, the main one first."""
    curves = grid.content.get("curves", [["val/loss", "train/loss"]])
    if not isinstance(curves, list) or not all(isinstance(metrics, list) and metrics for metrics in curves):
        raise UserError(f"{grid.name}: curves: {curves}: expected lists of metrics, such as [[val/loss, train/loss]]")
    known = [f"{stage}/{metric}" for stage in ("val", "train") for metric in METRICS]
    if strange := [metric for metrics in curves for metric in metrics if metric not in known]:
        raise unknown(f"metric in curves of {grid.name}:", strange[0], known)
    return curves


def _table(grid: Grid, content: Mapping[str, Any]) -> Table:
    for key in content:
        if key not in Table._fields:
            raise unknown(f"key in tables of {grid.name}:", key, Table._fields)
    if (metric := content.get("metric")) not in (known := [f"{s}/{m}" for s in ("test", "val") for m in METRICS]):
        raise unknown(f"metric in tables of {grid.name}:", metric, known)
    published = {
        attention: {str(column): _mean_and_std(value) for column, value in cells.items()}
        for attention, cells in content.get("published", {}).items()
    }
    relabelled = {str(printed): str(right) for printed, right in content.get("relabelled", {}).items()}
    found = columns_of(grid, content.get("columns", grid.content.get("columns")))
    columns = {name: runs for name, runs in found.items() if runs or any(name in cells for cells in published.values())}
    return Table(metric, columns, published, relabelled, " ".join(str(content.get("note", "")).split()))


def finished(results: pd.DataFrame, table: Table, column: str) -> pd.DataFrame:
    """Return the finished runs of a column that have the table's metric."""
    rows = results[results.name.isin(table.columns[column]) & (results.state == State.FINISHED)]
    return rows.reindex(columns=results.columns.union([table.metric])).dropna(subset=table.metric)


def summary(results: pd.DataFrame, table: Table, attention: str, column: str) -> Summary:
    rows = finished(results, table, column)
    rows = rows[rows.attention == attention]
    return summarise(rows[table.metric], rows.task + " " + rows.setting)


def comparisons(results: pd.DataFrame, table: Table, margin: float) -> list[Compared]:
    """Compare each attention with the first, column by column; a difference below `margin` points counts as equal."""
    first, *others = dict.fromkeys(results.attention)
    kind, reach, found = table.kind, margin * table.kind.point, []
    for column in table.columns:
        rows = finished(results, table, column)
        pairs = rows.pivot(index=["task", "setting", "seed"], columns="attention", values=table.metric)
        for attention in others:
            if {attention, first} <= set(pairs) and len(both := pairs[[attention, first]].dropna().reset_index()):
                numbers = compare(both[attention], both[first], both.task + " " + both.setting)
                untested = ""
                if both[[attention, first]].min(axis=None) > kind.highest - reach:
                    untested = CEILING  # the task is too easy to tell them apart
                if diverged(results, table, column, attention) > diverged(results, table, column, first):
                    untested = "diverges"  # the pairs that are left are not a random sample
                found.append((column, attention, numbers._replace(error=nan) if untested else numbers, untested))
    tests = max(1, sum(isfinite(numbers.error) for _, _, numbers, _ in found))
    compared = []
    for column, attention, numbers, untested in found:
        low, high = numbers.interval(tests)
        judged = untested or verdict(low, high, reach, kind.more_is_better)
        p = numbers.different(tests), numbers.equal(reach, tests)
        compared.append(Compared(column, attention, numbers, low, high, *p, judged))
    return compared


def diverged(results: pd.DataFrame, table: Table, column: str, attention: str) -> int:
    rows = results[results.name.isin(table.columns[column]) & (results.attention == attention)]
    return int((rows.state == State.DIVERGED).sum())


def results_table(results: pd.DataFrame, table: Table, relabelled: bool = False) -> Markdown:
    """Return our results, the published ones and the difference, with the columns as printed or relabelled."""
    kind, all_published = table.kind, table.published_right if relabelled else table.published
    lines = [["", *table.columns, "mean"]]
    for attention in dict.fromkeys(results.attention):
        ours = {column: summary(results, table, attention, column) for column in table.columns}
        names = results[results.attention == attention].name
        wanted = {column: int(names.isin(runs).sum()) for column, runs in table.columns.items()}
        texts = [_cell(kind, ours[c], wanted[c], diverged(results, table, c, attention)) for c in table.columns]
        mean = kind.value(_mean([cell.mean for cell in ours.values()]))
        lines.append([Markdown("**{}**").format(label(attention)), *texts, mean])
        if theirs := all_published.get(attention, {}):
            published = [theirs.get(column, (nan, nan)) for column in table.columns]
            mean = kind.value(_mean([mean for mean, _ in published]))
            lines.append(["published", *(_published(kind, *value) for value in published), mean])
            differences = [cell.mean - mean for cell, (mean, _) in zip(ours.values(), published, strict=True)]
            lines.append(["difference", *(kind.points(d) for d in [*differences, _mean(differences)])])
    return markdown_table(lines)


def comparisons_table(compared: Sequence[Compared], kind: Metric) -> Markdown:
    """Return a table with a row for each comparison, without the columns of the tests if none is tested."""
    lines = [["", "attention", "pairs", "difference", "95 % interval", "p (t-test)", "p (TOST)", "verdict"]]
    for one in compared:
        interval = f"{kind.points(one.low)} to {kind.points(one.high)}" if isfinite(one.low) else "–"
        pairs = f"{one.numbers.pairs} ({one.numbers.settings} setting{'s' * (one.numbers.settings > 1)})"
        tested = [kind.points(one.numbers.difference), interval, _p(one.different), _p(one.equal)]
        lines.append([one.column, label(one.attention), pairs, *tested, one.in_words(kind)])
    untested = all(isnan(one.low) for one in compared)
    return markdown_table([[*line[:4], line[-1]] for line in lines] if untested else lines)


def at_the_ceiling(compared: Sequence[Compared]) -> str:
    """List the comparisons at the ceiling by column: "copy; reverse (all but KV+Pos); sort (KV)"."""
    words = []
    for column in dict.fromkeys(one.column for one in compared):
        here = [one for one in compared if one.column == column]
        easy, hard = (
            [label(one.attention) for one in here if (one.verdict == CEILING) == is_easy] for is_easy in (True, False)
        )
        if easy:
            fewer = f" (all but {' / '.join(hard)})" if len(hard) < len(easy) else f" ({' / '.join(easy)})"
            words.append(column + fewer * bool(hard))
    return "; ".join(words)


def shares_table(results: pd.DataFrame, table: Table) -> Markdown | None:
    """Return a table of the shares of variance that are due to settings; None if none is known."""
    lines = [["", *table.columns]]
    for attention in dict.fromkeys(results.attention):
        shares = [summary(results, table, attention, column).of_settings for column in table.columns]
        if any(isfinite(share) for share in shares):
            texts = [f"{100 * share:.0f} %" if isfinite(share) else "–" for share in shares]
            lines.append([Markdown("**{}**").format(label(attention)), *texts])
    return markdown_table(lines) if len(lines) > 1 else None


def steps_table(histories: pd.DataFrame, table: Table, columns: Sequence[str]) -> Markdown | None:
    """Return a table of the steps to `NEARLY` the highest value in validation, medians over runs; None if unknown."""
    metric = f"val/{table.metric.partition('/')[2]}"
    if metric not in histories:
        return None
    known, reached = histories.dropna(subset=metric), steps_to_ceiling(histories, metric)
    lines = [["", *columns]]
    for attention in dict.fromkeys(known.attention):
        names = [known.name[(known.attention == attention) & known.name.isin(table.columns[c])] for c in columns]
        medians = [reached.reindex(of.unique()).fillna(inf).median() for of in names]
        texts = [f"{median:,.0f}" if isfinite(median) else "–" for median in medians]
        lines.append([Markdown("**{}**").format(label(attention)), *texts])
    return markdown_table(lines)


def steps_to_ceiling(histories: pd.DataFrame, metric: str) -> "pd.Series[float]":
    """Return the first step with `NEARLY` the highest value of a metric, by the name of each run that gets there."""
    return histories[histories[metric] >= NEARLY * metric_of(metric).highest].groupby("name").step.min()


def numbers_of(results: pd.DataFrame, table: Table, compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """Return all numbers of a table and its comparisons in the metric's units, for each column and attention."""
    tested = {(one.column, one.attention): one for one in compared}
    rows = []
    for column, attention in product(table.columns, dict.fromkeys(results.attention)):
        names = results[results.attention == attention].name
        ours, one = summary(results, table, attention, column), tested.get((column, attention))
        row = {"metric": table.metric, "column": column, "attention": attention, **ours._asdict()}
        row |= {"share_of_settings": ours.of_settings, "wanted": int(names.isin(table.columns[column]).sum())}
        row["diverged"] = diverged(results, table, column, attention)
        if theirs := table.published_right.get(attention, {}).get(column):
            row |= dict(zip(("published_mean", "published_over_settings"), theirs, strict=True))
        if one is not None:
            row |= {"pairs": one.numbers.pairs, "difference": one.numbers.difference, "low": one.low, "high": one.high}
            row |= {"p_different": one.different, "p_equal": one.equal, "smallest_margin": one.smallest_margin}
            row["verdict"] = one.verdict
        rows.append(row)
    return rows


def _cell(kind: Metric, cell: Summary, wanted: int, lost: int) -> str:
    if not wanted:
        return "not in this scale"
    gone = f", {lost} diverged" * (lost > 0)
    if not cell.runs:
        return f"not run (0 of {wanted}{gone})"
    spread = f" ± {kind.value(cell.over_settings)}" * isfinite(cell.over_settings)
    count = str(cell.runs) if cell.runs == wanted else f"{cell.runs} of {wanted}{gone}"
    return f"{kind.value(cell.mean)}{spread}, n = {count}"


def _p(value: float) -> str:
    return "–" if isnan(value) else f"{value:.4f}" if value >= 0.0001 else "< 0.0001"


def _published(kind: Metric, mean: float, std: float) -> str:
    return kind.value(mean) + (f" ± {kind.value(std)}" if isfinite(std) else "")


def _mean(numbers: Sequence[float]) -> float:
    """Return the mean, NaN if a number is: pandas would leave that column out of the mean."""
    return sum(numbers) / len(numbers)


def _mean_and_std(value: Any) -> tuple[float, float]:
    mean, std = value if isinstance(value, list) else (value, nan)
    return float(mean), float(std)


def _same(ours: Any, wanted: Any) -> bool:
    try:
        return float(ours) == float(wanted)  # YAML reads 1e-3 as a text
    except (TypeError, ValueError):
        return bool(ours == wanted)
