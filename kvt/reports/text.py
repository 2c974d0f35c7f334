"""Formats the cells and the comparisons of a table as Markdown and as rows of tables.csv."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, isfinite, isnan, nan

import numpy as np
import pandas as pd

from kvt.markdown import Markdown, markdown_table
from kvt.reports.comparisons import CEILING, Cell, Compared, steps_to_ceiling
from kvt.reports.names import label
from kvt.reports.statistics import UNDECIDED
from kvt.reports.tables import Table
from kvt.tasks.metrics import Metric


def verdict_in_words(compared: Compared, kind: Metric) -> str:
    """Return the verdict of a comparison. After "undecided", add the smallest margin in points."""
    margin = compared.smallest_margin if compared.verdict == UNDECIDED else nan
    return compared.verdict + (f", ± {margin / kind.point:.2f}" if isfinite(margin) else "")


def better_in(compared: Compared) -> str:
    """Return the pairs in which the first attention is better, such as "3 of 51"."""
    return f"{compared.better_in:.0f} of {compared.pairs}" if isfinite(compared.better_in) else "–"


def pair_of(compared: Compared) -> str:
    return f"{label(compared.attention)} − {label(compared.baseline)}"


def counts_of(compared: Compared) -> str:
    """Return the size of a comparison, such as "24 pairs of 8 settings and 3 seeds, 2 settings left out"."""
    counts = ((compared.pairs, "pair"), (compared.settings, "setting"), (compared.seeds, "seed"))
    pairs, settings, seeds = (f"{number} {noun}{'s' * (number > 1)}" for number, noun in counts)
    return f"{pairs} of {settings} and {seeds}{left_out_of(compared)}"


def left_out_of(compared: Compared) -> str:
    return f", {compared.left_out} setting{'s' * (compared.left_out > 1)} left out" * (compared.left_out > 0)


def difference_of(compared: Compared, kind: Metric) -> str:
    """Return the difference and its interval in points. If numbers of solved runs are compared, return the numbers."""
    if isfinite(compared.solved):
        solved = f"solved {compared.solved:.0f} against {compared.solved_by_baseline:.0f} of {compared.pairs}"
        return f"{solved}, blocks {compared.won:.0f} : {compared.lost:.0f}"
    return kind.points(compared.difference) + interval_of(compared.low, compared.high, kind)


def interval_of(low: float, high: float, kind: Metric) -> str:
    return f" [{kind.points(low)}, {kind.points(high)}]" if isfinite(low) else ""


def results_table(
    cells: Sequence[Cell], table: Table, compared: Sequence[Compared] = (), relabelled: bool = False
) -> Markdown:
    """Return a table with our results, the published results, their difference and the pairs with a better result.

    If `relabelled`, published numbers stand in the columns with corrected names, otherwise in the paper's columns.
    If all cells of a column have the same numbers of runs, these numbers are in the last row.
    """
    kind, all_published = table.kind, table.published_right if relabelled else table.published
    lines = [["", *table.columns, "mean"]]
    ahead = {(one.attention, one.column): better_in(one) for one in compared if one.baseline == compared[0].baseline}
    counts = {column: {_count(cell) for cell in cells if cell.column == column} for column in table.columns}
    run = {cell.column for cell in cells if cell.runs}
    shared = {column: of.pop() if len(of) == 1 and column in run else "" for column, of in counts.items()}
    for attention in dict.fromkeys(cell.attention for cell in cells):
        ours = [cell for cell in cells if cell.attention == attention]
        means = np.array([cell.mean for cell in ours])
        # NaN if a column has no mean: means over different columns are not comparable
        texts = [_cell(kind, cell, shared[cell.column]) for cell in ours]
        lines.append([bold_label(attention), *texts, kind.value(means.mean())])
        if theirs := all_published.get(attention, {}):
            published = [theirs.get(column, (nan, nan)) for column in table.columns]
            their_means = np.array([mean for mean, _ in published])
            texts = [_published(kind, *value) for value in published]
            lines.append(["published", *texts, kind.value(their_means.mean())])
            differences = kind.scaled(means) - kind.scaled(their_means)
            lines.append(["difference", *map(kind.points, [*differences, differences.mean()])])
        if any((attention, column) in ahead for column in table.columns):
            pairs = [ahead.get((attention, column), "–") for column in table.columns]
            lines.append([f"better than {label(compared[0].baseline)} in", *pairs, ""])
    return markdown_table([*lines, ["n", *shared.values(), ""]] if any(shared.values()) else lines)


def comparisons_table(compared: Sequence[Compared], kind: Metric) -> Markdown:
    """Return a table with a row for each comparison. If no comparison has a p-value, omit the column."""
    lines = [["", "pair", "n", "better in", "difference", "p", "verdict"]]
    for one in compared:
        about = [one.column, pair_of(one), counts_of(one), better_in(one), difference_of(one, kind)]
        lines.append([*about, _p(one.p), verdict_in_words(one, kind) or "–"])
    untested = all(isnan(one.p) for one in compared)
    return markdown_table([[*line[:5], line[-1]] for line in lines] if untested else lines)


def at_the_ceiling(compared: Sequence[Compared]) -> str:
    """List the columns with comparisons at the ceiling, such as "copy; reverse (all but KV+Pos); sort (KV)"."""
    words = []
    with_first = [one for one in compared if one.baseline == compared[0].baseline]
    for column in dict.fromkeys(one.column for one in with_first):
        here = [one for one in with_first if one.column == column]
        easy = [label(one.attention) for one in here if one.verdict == CEILING]
        hard = [label(one.attention) for one in here if one.verdict != CEILING]
        if easy:
            fewer = f" (all but {' / '.join(hard)})" if len(hard) < len(easy) else f" ({' / '.join(easy)})"
            words.append(column + fewer * bool(hard))
    return "; ".join(words)


def shares_table(cells: Iterable[Cell], table: Table) -> Markdown | None:
    """Return a table of the shares of variance that are due to settings; None if all shares are unknown."""
    shares: dict[str, list[float]] = {}
    for cell in cells:
        shares.setdefault(cell.attention, []).append(cell.share_of_settings)
    known = {attention: row for attention, row in shares.items() if any(map(isfinite, row))}
    return attentions_table(table.columns, known, lambda share: f"{100 * share:.0f} %") if known else None


def steps_table(histories: pd.DataFrame, table: Table, columns: Sequence[str]) -> Markdown | None:
    """Return a table of the median step at which the validation metric reaches `NEARLY` · its highest possible value.

    Return None if no run has this metric.
    """
    metric = f"val/{table.metric.partition('/')[2]}"
    if metric not in histories:
        return None
    runs = histories.dropna(subset=metric).drop_duplicates("name")
    runs = runs.assign(steps=runs.name.map(steps_to_ceiling(histories, metric)).fillna(inf))
    medians = {c: runs[runs.name.isin(table.columns[c])].groupby("attention").steps.median() for c in columns}
    rows = pd.DataFrame(medians, index=runs.attention.unique()).itertuples()
    return attentions_table(columns, {name: row for name, *row in rows}, "{:,.0f}".format)


def attentions_table(
    columns: Iterable[str], rows: Mapping[str, Iterable[float]], form: Callable[[float], str]
) -> Markdown:
    """Return a table with a row for each attention. A dash stands for a number that is not finite."""
    lines = [[bold_label(name), *(form(x) if isfinite(x) else "–" for x in row)] for name, row in rows.items()]
    return markdown_table([["", *columns], *lines])


def numbers_of(cells: Sequence[Cell], compared: Sequence[Compared], table: Table) -> list[pd.DataFrame]:
    """Return rows for tables.csv: each cell with its attention's comparisons, then the comparisons of pools."""
    found = pd.DataFrame(cells, columns=Cell._fields)
    unused = [] if found.published_mean.notna().any() else ["published_mean", "published_over_settings"]
    unused += [] if found.not_finite.any() else ["not_finite"]
    found = found.replace({"not_finite": {0: nan}}).drop(columns=unused)
    rows = pd.DataFrame(compared, columns=Compared._fields).drop(columns="table")
    return [
        found.merge(rows.drop(columns="settings"), how="left"),
        rows[rows.column.isin(table.pools)].assign(metric=table.metric),
    ]


def bold_label(attention: str) -> Markdown:
    return Markdown("**{}**").format(label(attention))


def _cell(kind: Metric, cell: Cell, shared: str) -> str:
    if not cell.runs:
        return _count(cell)
    spread = f" ± {kind.value(cell.over_settings)}" * isfinite(cell.over_settings)
    return f"{kind.value(cell.mean)}{spread}" + f", n = {_count(cell)}" * (not shared)


def _count(cell: Cell) -> str:
    """Return the numbers of a cell's runs, settings and seeds, or why the cell has no value."""
    if not cell.wanted:
        return "not in this scale"
    lost = cell.not_finite
    gone = f", {cell.diverged} diverged" * (cell.diverged > 0)
    gone += f", {lost} with a metric that is not finite" * (lost > 0)
    if not cell.runs:
        return f"{'no value' if lost > 0 else 'not run'} (0 of {cell.wanted}{gone})"
    return str(cell.runs) if cell.runs == cell.wanted else f"{cell.runs} of {cell.wanted}{gone}{_share(cell)}"


def _share(cell: Cell) -> str:
    """Return the numbers of settings and seeds of a cell, such as "; 3 of 8 settings, 1 to 2 seeds"."""
    seeds = (
        f"{cell.fewest_seeds:.0f}"
        if cell.fewest_seeds == cell.most_seeds
        else f"{cell.fewest_seeds:.0f} to {cell.most_seeds:.0f}"
    )
    of = f"; {cell.settings} of {cell.wanted_settings} settings" * (cell.wanted_settings > 1)
    return f"{of}, {seeds} seed{'s' * (cell.most_seeds > 1)}"


def _p(value: float) -> str:
    return "–" if isnan(value) else f"{value:.4f}" if value >= 0.0001 else "< 0.0001"


def _published(kind: Metric, mean: float, std: float) -> str:
    return kind.value(mean) + (f" ± {kind.value(std)}" if isfinite(std) else "")
