"""Formats the cells and the comparisons of a table as Markdown and as rows of tables.csv."""

from collections import Counter
from collections.abc import Sequence
from math import inf, isfinite, isnan, nan

import numpy as np
import pandas as pd

from kvt.markdown import Markdown, markdown_table
from kvt.reports.comparisons import CEILING, Cell, Compared, steps_to_ceiling
from kvt.reports.statistics import TOO_FEW, UNDECIDED
from kvt.reports.tables import Table, counted, label
from kvt.tasks.metrics import Metric


def results_table(cells: Sequence[Cell], table: Table, compared: Sequence[Compared] = ()) -> Markdown:
    """Return a table with the rows of each attention: our results, published results and their difference.

    With `compared`, a further row tells in how many pairs the attention is better than the baseline of `compared[0]`.
    The last row, n, has the most frequent number of runs in each column. A cell with another number states its own.
    """
    kind, lines = table.kind, [["", *table.columns, "mean"]]
    ahead = {(one.attention, one.column): better_in(one) for one in compared if one.baseline == compared[0].baseline}
    counts = {column: Counter(_count(c) for c in cells if c.column == column and c.runs) for column in table.columns}
    usual = {column: of.most_common(1)[0][0] if of else "" for column, of in counts.items()}
    for attention in dict.fromkeys(cell.attention for cell in cells):
        row = [cell for cell in cells if cell.attention == attention]
        ours, theirs = (np.array(values) for values in zip(*((c.mean, c.published_mean) for c in row), strict=True))
        # the mean over columns is NaN if one column has no value: means over different columns are not comparable
        lines.append([bold_label(attention), *(_cell(kind, c, usual[c.column]) for c in row), kind.value(ours.mean())])
        if np.isfinite(theirs).any():
            published = [_spread(kind, cell.published_mean, cell.published_over_settings) for cell in row]
            lines.append(["published", *published, kind.value(theirs.mean())])
            differences = kind.scaled(ours) - kind.scaled(theirs)
            lines.append(["difference", *map(kind.points, [*differences, differences.mean()])])
        if any((attention, column) in ahead for column in table.columns):
            pairs = [ahead.get((attention, column), "–") for column in table.columns]
            lines.append([f"better than {label(compared[0].baseline)} in", *pairs, ""])
    return markdown_table([*lines, ["n", *usual.values(), ""]] if any(usual.values()) else lines)


def printed_table(table: Table) -> Markdown:
    """Return the published numbers in columns with the names that the paper prints."""
    cells = {
        name: [_spread(table.kind, *of.get(c, (nan, nan))) for c in table.columns] for name, of in table.printed.items()
    }
    return markdown_table([["", *table.columns], *([bold_label(name), *row] for name, row in cells.items())])


def comparisons_table(compared: Sequence[Compared], kind: Metric) -> Markdown:
    """Return a table with a row for each comparison. Omit the column of p-values if it would be empty."""
    lines = [["", "pair", "n", "better in", "difference", "p", "verdict"]]
    for one in compared:
        about = [one.column, pair_of(one), counts_of(one), better_in(one), difference_of(one, kind)]
        p = "–" if isnan(one.p) else f"{one.p:.4f}" if one.p >= 0.0001 else "< 0.0001"
        lines.append([*about, p, verdict_in_words(one, kind) or "–"])
    untested = all(isnan(one.p) for one in compared)
    return markdown_table([[*line[:5], line[-1]] for line in lines] if untested else lines)


def steps_table(histories: pd.DataFrame, table: Table, columns: Sequence[str]) -> Markdown | None:
    """Return a table of median `steps_to_ceiling` of the validation metric; None if no history has this metric."""
    metric = f"val/{table.metric.partition('/')[2]}"
    if metric not in histories:
        return None
    runs = histories.dropna(subset=metric).drop_duplicates("name")
    runs = runs.assign(steps=runs.name.map(steps_to_ceiling(histories, metric)).fillna(inf))
    medians = [runs[runs.name.isin(table.columns[c])].groupby("attention").steps.median() for c in columns]
    lines = [["", *columns]]
    for attention in runs.attention.unique():
        steps = [of.get(attention, inf) for of in medians]
        lines.append([bold_label(attention), *(f"{step:,.0f}" if isfinite(step) else "–" for step in steps)])
    return markdown_table(lines)


def numbers_of(cells: Sequence[Cell], compared: Sequence[Compared], table: Table) -> list[pd.DataFrame]:
    """Return two frames for tables.csv: cells with the comparisons of their attentions, and comparisons of pools."""
    found = pd.DataFrame(cells, columns=Cell._fields)
    unused = [] if found.published_mean.notna().any() else ["published_mean", "published_over_settings"]
    unused += [] if found.not_finite.any() else ["not_finite"]
    found = found.replace({"not_finite": {0: nan}}).drop(columns=unused)
    rows = pd.DataFrame(compared, columns=Compared._fields).drop(columns="table")
    pools = rows[rows.column.isin(table.pools)].assign(metric=table.metric)
    return [found.merge(rows.drop(columns="settings"), how="left"), pools]


def at_the_ceiling(compared: Sequence[Compared]) -> str:
    """Return the columns in which comparisons with the first baseline are at the ceiling.

    "copy; reverse (KV)": all these comparisons in copy, but only KV's in reverse.
    """
    words, baseline = [], compared[0].baseline
    for column in dict.fromkeys(one.column for one in compared):
        here = [one for one in compared if (one.column, one.baseline) == (column, baseline)]
        easy = [label(one.attention) for one in here if one.verdict == CEILING]
        if easy:
            words.append(column if len(easy) == len(here) else f"{column} ({', '.join(easy)})")
    return "; ".join(words)


def bold_label(attention: str) -> Markdown:
    return Markdown("**{}**").format(label(attention))


def pair_of(compared: Compared) -> str:
    return f"{label(compared.attention)} − {label(compared.baseline)}"


def counts_of(compared: Compared) -> str:
    """Return the size of a comparison, such as "24 pairs of 8 settings and 3 seeds, 2 settings left out"."""
    settings, seeds = counted(compared.settings, "setting"), counted(compared.seeds, "seed")
    return f"{counted(compared.pairs, 'pair')} of {settings} and {seeds}{left_out_of(compared)}"


def left_out_of(compared: Compared) -> str:
    return f", {counted(compared.left_out, 'setting')} left out" * (compared.left_out > 0)


def better_in(compared: Compared) -> str:
    """Return the number of pairs in which `attention` is better, such as "3 of 51"; a dash if it is unknown."""
    return f"{compared.better_in:.0f} of {compared.pairs}" if isfinite(compared.better_in) else "–"


def difference_of(compared: Compared, kind: Metric) -> str:
    """Return text such as "solved 5 against 3 of 9, blocks 2 : 0", or, in points, "+1.20 [+0.40, +2.00]" or "+1.20"."""
    if isfinite(compared.solved):
        solved = f"solved {compared.solved:.0f} against {compared.solved_by_baseline:.0f} of {compared.pairs}"
        return f"{solved}, blocks {compared.won:.0f} : {compared.lost:.0f}"
    return kind.points(compared.difference) + interval_of(compared.low, compared.high, kind)


def interval_of(low: float, high: float, kind: Metric) -> str:
    return f" [{kind.points(low)}, {kind.points(high)}]" if isfinite(low) else ""


def verdict_in_words(compared: Compared, kind: Metric) -> str:
    """Return a verdict, such as "better", "1 seed: no verdict", or "undecided, ± 1.20" with the smallest margin."""
    if compared.verdict == TOO_FEW:
        return f"{counted(compared.seeds, 'seed')}: no verdict"
    margin = compared.smallest_margin if compared.verdict == UNDECIDED else nan
    return compared.verdict + (f", ± {margin / kind.point:.2f}" if isfinite(margin) else "")


def _cell(kind: Metric, cell: Cell, usual: str) -> str:
    """Return mean ± standard deviation, and `_count` unless it is `usual`; for a cell without values, the reason."""
    if cell.runs:
        count = _count(cell)
        return _spread(kind, cell.mean, cell.over_settings) + f", n = {count}" * (count != usual)
    why = "no value" if cell.not_finite else "not run"
    return f"{why} (0 of {cell.wanted}{_lost(cell)})" if cell.wanted else "not in this scale"


def _count(cell: Cell) -> str:
    """Return numbers of runs, settings, seeds and lost runs: "4 of 24 (2 of 8 settings, 1 to 3 seeds, 2 diverged)"."""
    settings = _of(cell.settings, cell.wanted_settings)
    few, most, wanted = cell.fewest_seeds, cell.most_seeds, -(-cell.wanted // cell.wanted_settings)
    seeds = f"{few:.0f} to {_of(most, wanted)}" if few < most else _of(most, wanted)
    return (
        f"{_of(cell.runs, cell.wanted)} ({settings} {'setting' + 's' * (cell.wanted_settings > 1)}, "
        f"{seeds} seed{'s' * (wanted > 1)}{_lost(cell)})"
    )


def _of(number: float, wanted: int) -> str:
    return f"{wanted}" if number == wanted else f"{number:.0f} of {wanted}"


def _lost(cell: Cell) -> str:
    lost = f", {cell.diverged} diverged" * (cell.diverged > 0)
    return lost + f", {cell.not_finite} without a finite value" * (cell.not_finite > 0)


def _spread(kind: Metric, mean: float, deviation: float) -> str:
    return kind.value(mean) + (f" ± {kind.value(deviation)}" if isfinite(deviation) else "")
