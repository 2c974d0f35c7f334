"""The sections that a report has unless its grid lists others: differences, tables, curves and notes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from html import unescape
from itertools import product
from math import isfinite
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvt.reports import figures
from kvt.reports.comparisons import CEILING, CHANCE, NEARLY, Cell, Compared, cells_of
from kvt.reports.forest import forest
from kvt.reports.names import label
from kvt.reports.notes import notes, other_counts  # noqa: F401  (notes is a section, too)
from kvt.reports.results import Results, measure
from kvt.reports.section import Section
from kvt.reports.statistics import MIN_SAMPLES, NO_DIRECTION
from kvt.reports.tables import Table, against_of, columns_of, curves_of, kind_of
from kvt.reports.text import (
    at_the_ceiling,
    comparisons_table,
    numbers_of,
    pair_of,
    results_table,
    shares_table,
    steps_table,
)
from kvt.study.grid import Grid
from kvt.study.outcomes import Outcomes
from kvt.system.quoting import Markdown

LEGEND = Markdown("""\
Mean ± standard deviation over settings (of the means over seeds), where there are several; n runs. A point is
{point}. All numbers of the tables are in tables.csv.""")

AS_PRINTED = Markdown("Columns named as the paper prints them:")
RIGHT = Markdown("Columns with their right names:")

PUBLISHED = Markdown("""\
*published*: the paper's mean ± standard deviation over settings, where it says so. *difference*: ours less the
published, in points.""")

OTHER_SETTINGS = Markdown("""\
**Ours are not the paper's settings (see above): the difference from the published numbers is that of other
settings, too.**""")

COMPARED = Markdown("""\
Runs are paired by task, settings and seed, so that both have seen the same data in the same order. *n*: left out are
settings in which every run of every attention is within {margin:g} point{s} of the best possible, or no better than
chance, for they tell nothing apart. *difference*: mean over settings, in points{better}, with its 95 % t interval.
The settings are those of this grid, and the sample is one of their seeds, which may move all settings together. Of
the intervals of independent pairs and of R seeds, with R − 1 degrees of freedom, the wider one is shown. With fewer
than two seeds, on average, the sample is one of settings. *beyond this grid*: the interval if settings are a sample,
too. *p (no difference)*: t-test that the mean
difference is 0. *p (TOST)*: two one-sided t-tests that it is beyond ± {margin:g} point{s}. Both p are corrected for all
{tests} comparisons of this page (Holm), intervals are not. *verdict*: "as good" where p (TOST) is below 0.05; else
"better" or "worse" where p (no difference) is; else "undecided", with the smallest margin that contains the interval.
Intervals take differences for normal, and are too narrow where they are strongly skewed. "diverges": more runs of the
first of a pair have diverged than of the other; the pairs that are left are not tested.""")

SOLVED = Markdown("""\
*solved*: how many runs of each of the pair come to {nearly:g} % of the highest value. Where runs are near perfect or
far from it, their mean describes neither: p is that of the sign test over the pairs of which one alone has solved it
(McNemar's exact test), which takes pairs for independent.""")

UNTESTED = Markdown("""\
*difference*: the mean of pairs of runs with the same task, settings and seed, in points{better}. Fewer than {fewest}
settings, or seeds of a single setting, are not tested.""")

UNDIRECTED = Markdown("""\
*direction unknown*: the task does not say whether more or less of {metric} is better: write `better="more"` or
`better="less"` in its `Metric`.""")

AT_CHANCE = Markdown("""\
*both at chance*: no run is {margin:g} point{s} better than guessing, which tells nothing apart and is not tested.""")

IN_ACCURACY = Markdown(" Points of this sentence are those of accuracy.")

AT_THE_CEILING = Markdown("""\
**At the ceiling**, every run within {margin:g} point{s} of the best possible, which tells nothing apart: {pairs}.""")

STEPS = Markdown("""\
Optimiser steps to {nearly:g} % of the highest value in validation, as often as it was computed: medians over runs; –
unless more than half of them get there.""")

SHARES = Markdown("""\
The share of the runs' variance that is of settings; the rest is of seeds. The larger it is, the more do further
settings tell, and the less further seeds.""")


def differences(grid: Grid, results: Results) -> Iterator[Section]:
    """Say which attentions are better, worse or as good, and draw how far they are apart."""
    compared = [(table, results.compared_in(number)) for number, table in enumerate(results.tables)]
    drawn = {f"differences-{_slug(table)}": forest(lines, table, results.first) for table, lines in compared}
    yield Section(figures=_known(drawn), findings=[one for table, lines in compared for one in _findings(table, lines)])


def tables(grid: Grid, results: Results) -> Iterator[Section]:
    """Set the means of all attentions beside the published ones, and compare each with the first, table by table."""
    for number, table in enumerate(results.tables):
        cells, compared = cells_of(results.runs, table), results.compared_in(number)
        text = [*_text_of_table(grid, results, cells, table), *_comparisons(results, table, compared)]
        yield Section(f"{table.title[0].upper()}{table.title[1:]}", text, numbers_of(cells, compared, table))


def curves(grid: Grid, results: Results) -> Iterator[Section]:
    """Draw learning curves, tables against a setting, and bars."""
    drawn: dict[str, Figure | None] = {}
    if len(histories := results.histories):
        columns = columns_of(grid, grid.file.columns)
        parts = [histories[histories.name.isin(names)].assign(task=column) for column, names in columns.items()]
        of_columns = pd.concat(parts, ignore_index=True)
        for metrics in curves_of(grid):
            drawn[metrics[0].replace("/", "-")] = figures.curves(of_columns, metrics, kind_of(grid, metrics[0]))
    for (words, setting), table in product(against_of(grid).items(), results.tables):
        drawn[f"against-{words.replace(' ', '-')}-{_slug(table)}"] = figures.against(
            results.runs, table, setting, words
        )
    drawn |= {f"bars-{_slug(table)}": figures.bars(results.runs, table) for table in results.tables}
    if known := _known(drawn):
        yield Section("Curves and bars", figures=known)


def verdicts(grid: Grid, outcomes: Outcomes) -> Iterator[str]:
    """Yield lines for a terminal: cells of tables beside their published numbers, and the findings of the report."""
    _, results = measure(grid, outcomes)
    for number, table in enumerate(results.tables):
        cells = [cell for cell in cells_of(results.runs, table) if cell.runs and isfinite(cell.published_mean)]
        for cell in cells:
            ours, theirs = (table.kind.value(mean) for mean in (cell.mean, cell.published_mean))
            yield f"{table.title}, {cell.column}, {label(cell.attention)}: {ours}, n = {cell.runs}; the paper: {theirs}"
        for finding in _findings(table, results.compared_in(number)):
            yield unescape(finding.replace("**", ""))


def _slug(table: Table) -> str:
    return table.metric.replace("/", "-").replace(" ", "-")


def _known(drawn: dict[str, Figure | None]) -> dict[str, Figure]:
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _findings(table: Table, compared: Sequence[Compared]) -> list[Markdown]:
    """Return a sentence that lists a table's comparisons that have a verdict, and counts the others."""
    found, told = [], ("worse", "better", "as good", "diverges")
    for verdict in told:
        where: dict[str, list[str]] = {}
        for one in compared:
            if one.verdict == verdict:
                where.setdefault(pair_of(one), []).append(f"{one.column} {table.kind.points(one.difference)}")
        if where:
            pairs = ", ".join(f"{pair} ({'; '.join(columns)})" for pair, columns in where.items())
            found.append(Markdown("**{}**: {}").format(verdict, pairs))
    if untold := Counter(one.verdict for one in compared if one.verdict not in told):
        counts = ", ".join(f"{count} × {verdict}" for verdict, count in untold.items())
        found.append(Markdown("{}: {}").format("others" if found else "no verdict", counts))
    heading = Markdown("In {}: ").format(table.title)
    return [heading + Markdown("; ").join(found) + Markdown(".")] if found else []


def _text_of_table(grid: Grid, results: Results, cells: Sequence[Cell], table: Table) -> list[Markdown]:
    lines = [results_table(cells, table)]
    if table.relabelled:
        right = results_table(cells, table, relabelled=True)
        lines = [AS_PRINTED, *lines, RIGHT, right]
    lines.append(LEGEND.format(point=table.kind.point_in_words))
    if table.published:
        lines += [PUBLISHED, *([OTHER_SETTINGS] if grid.scale_diff else [])]
    if table.note:
        lines.append(Markdown("Note: {}").format(table.note))
    names = frozenset[str]().union(*table.columns.values())
    lines += other_counts(results.runs[results.runs.name.isin(names)])
    if (shares := shares_table(cells, table)) is not None:
        lines += [shares, SHARES]
    return lines


def _comparisons(results: Results, table: Table, compared: Sequence[Compared]) -> list[Markdown]:
    if not compared:
        return []
    lines = [Markdown("### Is it as good as {}?").format(label(results.first))]
    easy, others = ([one for one in compared if (one.verdict == CEILING) is at_ceiling] for at_ceiling in (True, False))
    counted = [one for one in compared if isfinite(one.solved)]
    verdicts = {one.verdict for one in compared}
    tests = sum(isfinite(one.p_different) for one in results.compared)
    words: dict[str, Any] = {"margin": table.margin, "s": "" if table.margin == 1 else "s", "tests": tests}
    words |= {"better": "; less is better" * (table.kind.better == "less"), "fewest": MIN_SAMPLES}
    if others:
        tested = any(isfinite(one.p_different) for one in compared)
        lines += [comparisons_table(others, table.kind), (COMPARED if tested else UNTESTED).format(**words)]
    if counted:
        lines.append(SOLVED.format(nearly=100 * NEARLY))
    if NO_DIRECTION in verdicts:
        lines.append(UNDIRECTED.format(metric=table.kind.label))
    if CHANCE in verdicts:
        lines.append(AT_CHANCE.format(**words) + (IN_ACCURACY if table.accuracy else Markdown("")))
    if easy:
        lines.append(AT_THE_CEILING.format(**words, pairs=at_the_ceiling(compared)))
    of_either = {one.column for one in (*easy, *counted)}
    shown = [column for column in table.columns if column in of_either]
    if shown and (steps := steps_table(results.histories, table, shown)) is not None:
        lines += [steps, STEPS.format(nearly=100 * NEARLY)]
    return lines
