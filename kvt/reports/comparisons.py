"""Computes the cells of a report's tables, and compares attentions in a column or in a pool (a group of columns)."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import inf, isfinite, isnan, nan
from typing import NamedTuple

import numpy as np
import pandas as pd

from kvt.reports.statistics import compare, compare_shares, holm, summarise, verdict
from kvt.reports.tables import Table, metric_of
from kvt.study.outcomes import State

CEILING, CHANCE, SILENT, LOST = "both at the ceiling", "both at chance", "at the ceiling or at chance", "runs lost"
NEARLY = 0.99  # a run has solved a task if its metric is at least this share of the highest possible value


def with_means(results: pd.DataFrame, histories: pd.DataFrame, tables: Sequence[Table]) -> pd.DataFrame:
    """Return `results` with a column for each `over_training` metric in `histories`: its mean over a run's history."""
    of_runs = {t.metric: t.over_training for t in tables if t.over_training in histories}
    means = {name: histories.groupby("name")[metric].mean() for name, metric in of_runs.items()}
    return results.assign(**{name: results.name.map(values) for name, values in means.items()})


def steps_to_ceiling(histories: pd.DataFrame, metric: str) -> "pd.Series[float]":
    """Return by run name the first step with a metric ≥ `NEARLY` · its highest possible value; omit other runs."""
    return histories[histories[metric] >= NEARLY * metric_of(metric).highest].groupby("name").step.min()


def finite(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return the rows in which a metric is finite, with the metric as float; no rows if the table lacks it."""
    rows = table.assign(**{metric: table[metric].astype(float) if metric in table else nan})
    return rows[np.isfinite(rows[metric])]


def finished(results: pd.DataFrame, table: Table, column: str) -> pd.DataFrame:
    """Return the rows of `results` in a column or pool of `table`, of finished runs with a finite `table.metric`."""
    runs = table.runs(results, column)
    return finite(runs[runs.state == State.FINISHED], table.metric)


def untried(results: pd.DataFrame) -> list[str]:
    """Return the attentions of which no run has started; [] if no run of the grid has started."""
    tried = {*results.attention[results.state != State.NEW]}
    return [name for name in results.attention.unique() if tried and name not in tried]


class Cell(NamedTuple):
    """Statistics of one attention in one column of a table, and the published numbers. Unknown numbers are NaN."""

    metric: str
    column: str
    attention: str
    mean: float  # this field and the next five fields are copied from `Summary`
    over_settings: float
    over_seeds: float
    runs: int
    settings: int
    share_of_settings: float
    wanted: int  # number of runs that the grid lists for this cell
    wanted_settings: int
    fewest_seeds: float  # smallest number of seeds of a setting, among the settings that `settings` counts
    most_seeds: float
    diverged: int
    not_finite: int  # number of finished runs whose metric is missing, NaN or infinite
    published_mean: float
    published_over_settings: float


def cells_of(results: pd.DataFrame, table: Table) -> list[Cell]:
    """Return a cell for each column and attention, but none for `untried` attentions without published numbers."""
    cells, hidden = [], {*untried(results)} - {*table.published}
    for column, attention in product(table.columns, [a for a in results.attention.unique() if a not in hidden]):
        ours = table.runs(results, column)
        ours = ours[ours.attention == attention]
        known = finished(ours, table, column)
        settings = known.task + " " + known.setting
        seeds = [*map(int, settings.value_counts())]
        theirs = table.published.get(attention, {}).get(column, (nan, nan))
        cell = Cell(
            **{"metric": table.metric, "column": column, "attention": attention},
            **summarise(known[table.metric], settings)._asdict(),
            wanted=len(ours),
            wanted_settings=(ours.task + " " + ours.setting).nunique(),
            fewest_seeds=min(seeds, default=nan),
            most_seeds=max(seeds, default=nan),
            diverged=int((ours.state == State.DIVERGED).sum()),
            not_finite=int((ours.state == State.FINISHED).sum()) - len(known),
            published_mean=theirs[0],
            published_over_settings=theirs[1],
        )
        cells.append(cell)
    return cells


class Compared(NamedTuple):
    """A comparison of two attentions in a column or pool. Unknown numbers are NaN."""

    table: int  # index of the table in the report
    column: str
    attention: str
    baseline: str
    left_out: int  # number of settings at the ceiling or at chance that the comparison does not use
    pairs: int = 0
    settings: int = 0
    seeds: int = 0
    better_in: float = nan  # number of pairs in which `attention` is better than `baseline`
    difference: float = nan  # difference of the metric, of its logarithm, or of the share of solved runs
    low: float = nan  # lower end of the 95 % interval
    high: float = nan  # upper end
    smallest_margin: float = nan  # smallest margin that contains the 90 % interval
    solved: float = nan  # number of runs of `attention` that solved the task
    solved_by_baseline: float = nan
    won: float = nan  # number of combinations of block (`statistics.blocks`) and seed in which `attention` solved more
    lost: float = nan
    margin: float = nan  # in points; NaN, like `p`, if `Table.claims` lacks the comparison
    p: float = nan
    untested: str = ""  # `CEILING`, `CHANCE`, `SILENT` or `LOST` if this rules out a test, else ""
    verdict: str = ""  # `untested`; if that is "", a result of `statistics.verdict`, or "" without a margin


def comparisons(results: pd.DataFrame, tables: Sequence[Table]) -> list[Compared]:
    """Return the comparisons of attentions in each column and pool of a report's tables.

    Each attention is compared with the first one of `results` and with its partners in `Table.pairs`, if they have a
    pair of runs. A comparison with a margin (`Table.margin_of`) has a verdict and, if it can be tested, a p-value. The
    p-values are corrected for their number (Holm). A setting is left out if all runs of all attentions are at the
    ceiling, or all at chance. If no setting is left, a comparison is over all settings, and is not tested.
    """
    rows = [row for number, table in enumerate(tables) for row in _compared(results, number, table)]
    found = []
    for row, p in zip(rows, holm(pd.Series([row.p for row in rows], dtype=float)), strict=True):
        kind, words = tables[row.table].kind, row.untested
        if isfinite(row.margin):
            words = words or verdict(row.difference, p, row.smallest_margin < row.margin * kind.point, kind.better)
        found.append(row._replace(p=p, verdict=words))
    return found


def by_seed(results: pd.DataFrame, table: Table, column: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the metric in a column or pool as two frames: of all settings, and of those that can show a difference.

    A frame has a row for each setting and seed, and a column for each attention. The text of a setting begins with the
    task. The second frame lacks the settings in which all runs are at the ceiling, or all at chance.
    """
    known = _with_chance(results, table, column)
    of_setting = known.groupby("setting")
    easy = of_setting[table.metric].min() > table.kind.highest - table.kind.point
    hard = of_setting.above_chance.max() < table.point_of_chance
    wide = known.pivot(index=["setting", "seed"], columns="attention", values=table.metric)
    return wide, wide[~wide.index.isin(easy.index[easy | hard], level="setting")]


def _compared(results: pd.DataFrame, number: int, table: Table) -> Iterator[Compared]:
    attentions = results.attention.unique()
    against = [*((attention, attentions[0]) for attention in attentions[1:]), *table.pairs]
    for column in (*table.columns, *table.pools):
        runs = _diverged_as_unsolved(results, table) if column in table.solved else results
        lost = _lost(runs, table, column)
        wide, telling = by_seed(runs, table, column)
        known = _with_chance(runs, table, column)
        for attention, baseline in against:
            pair = [attention, baseline]
            if {*pair} <= set(wide) and len(every := wide[pair].dropna()):
                both = telling[pair].dropna()
                shown = both if len(both) else every
                left_out = len(every.index.unique("setting")) - len(shown.index.unique("setting"))
                line = Compared(number, column, attention, baseline, left_out)
                above = known[known.attention.isin(pair)].set_index(["setting", "seed"]).above_chance
                untested = _untested(shown, above[shown.index], table) or SILENT * (not len(both))
                if lost & {*pair}:
                    untested = LOST  # the remaining pairs are not a random sample
                margin = table.margin_of(column, attention, baseline)
                yield _measured(line._replace(margin=margin, untested=untested), shown, table)


def _diverged_as_unsolved(results: pd.DataFrame, table: Table) -> pd.DataFrame:
    """Return `results` in which diverged runs are finished, with a value of the metric that does not solve the task."""
    diverged, unsolved = results.state == State.DIVERGED, -1 - abs(table.kind.highest)
    values = results.get(table.metric, pd.Series(nan, results.index))
    values = values.mask(diverged, unsolved if isfinite(unsolved) else 0.0)
    return results.assign(state=results.state.mask(diverged, State.FINISHED), **{table.metric: values})


def _lost(results: pd.DataFrame, table: Table, column: str) -> set[str]:
    """Return attentions with a lost run in a column or pool: it diverged, failed, or finished with no finite metric."""
    runs = table.runs(results, column)
    lost = runs.state.isin((State.DIVERGED, State.FAILED))
    if not table.over_training:  # a mean over training is also missing if the record of a run lacks its history
        lost |= (runs.state == State.FINISHED) & ~runs.name.isin(finished(results, table, column).name)
    return {*runs.attention[lost]}


def _with_chance(results: pd.DataFrame, table: Table, column: str) -> pd.DataFrame:
    """Return `finished`, with the task put before `setting`, and `above_chance`: accuracy − chance, NaN if unknown."""
    known = finished(results, table, column)
    accuracy = pd.Series(known.get(table.accuracy or table.metric, nan), known.index, dtype=float)
    above = accuracy - known.name.map(table.chance).astype(float)
    return known.assign(setting=known.task + " " + known.setting, above_chance=above)


def _untested(both: pd.DataFrame, above_chance: "pd.Series[float]", table: Table) -> str:
    if both.min(axis=None) > table.kind.highest - table.kind.point:
        return CEILING
    at_chance = (above_chance < table.point_of_chance).all()  # false if an accuracy of guessing is unknown
    return CHANCE if at_chance else ""


def _measured(line: Compared, both: pd.DataFrame, table: Table) -> Compared:
    """Return `line` with its numbers, computed from the metric of its two attentions in `both`."""
    ours, theirs = (table.kind.scaled(both[name]) for name in (line.attention, line.baseline))
    setting, seed = (both.index.get_level_values(name).to_series() for name in ("setting", "seed"))
    numbers = compare(ours, theirs, setting, seed)
    line = line._replace(pairs=numbers.pairs, settings=numbers.settings, seeds=numbers.seeds)
    if table.kind.better:
        ahead = ours > theirs if table.kind.better == "more" else ours < theirs
        line = line._replace(better_in=int(ahead.sum()))
    line, p = line._replace(difference=numbers.difference), numbers.different
    if line.column in table.solved:
        solved, by_baseline = (values >= NEARLY * table.kind.highest for values in (ours, theirs))
        shares = compare_shares(solved, by_baseline, setting, seed)
        p = shares.different if numbers.seeds > 1 else nan
        line = line._replace(solved=shares.solved, solved_by_baseline=shares.solved_by_baseline)
        difference = (shares.solved - shares.solved_by_baseline) / numbers.pairs
        line = line._replace(won=shares.won, lost=shares.lost, difference=difference)
    elif not line.untested:
        most = table.kind.highest if table.kind.highest > 0 else inf  # largest difference of values from 0 to `highest`
        low, high, margin = np.clip([*numbers.interval, numbers.margin], -most, most).tolist()
        line = line._replace(low=low, high=high, smallest_margin=margin)
    return line._replace(p=nan if line.untested or isnan(line.margin) else p)
