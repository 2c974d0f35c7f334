"""Writes the default sections of a report, used if the grid lists no sections."""

from collections import Counter
from collections.abc import Iterator, Sequence
from html import unescape
from itertools import product
from math import isfinite

import pandas as pd
from matplotlib.figure import Figure

from kvt.markdown import Markdown
from kvt.reports import figures
from kvt.reports.comparisons import CEILING, CHANCE, LOST, NEARLY, Cell, Compared, cells_of
from kvt.reports.names import label
from kvt.reports.notes import notes, other_counts  # noqa: F401  (grids can list notes as a section)
from kvt.reports.section import Results, Section, measure
from kvt.reports.statistics import NO_DIRECTION
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

LEGEND = Markdown("""\
Mean ± standard deviation over settings, and number of runs n. If n is equal for a whole column, it is in the last row.
*better than … in*: the number of pairs in which an attention is better. The value of a setting is the mean over its
seeds. A single setting has no standard deviation. A point is {point}. tables.csv has all numbers of the tables.""")

AS_PRINTED = Markdown("Columns named as the paper prints them:")
RIGHT = Markdown("Columns with their right names:")

PUBLISHED = Markdown("""\
*published*: the paper's mean ± standard deviation over settings, if the paper has one. *difference*: our mean minus
the published mean, in points.""")

OTHER_SETTINGS = Markdown("""\
**Our settings differ from the paper's (see above). They contribute to the difference from the published numbers.**""")

COMPARED = Markdown("""\
Runs are paired by task, settings and seed. Both runs of a pair have read the same data in the same order. *n*: the
number of pairs. A setting is left out if all runs of all attentions are within 1 point of the best possible value, or
if all are no better than chance. *better in*: the pairs in which the first attention is better. *difference*: mean over
settings, in points{better}, with its 95 % confidence interval. Settings that differ only in heads share initial weights
and data. They are a block, and are averaged within a seed. The interval is Welch's t over the seeds of the blocks. Its
standard error is multiplied by √(1 + 0.2 (B − 1)) for B blocks, because a seed moves all blocks a little together. It
assumes normally distributed differences. A single seed has no interval.""")
JUDGED = Markdown("""\
*p*: t-test of a mean difference of 0, corrected for the {tests} comparisons of this report that have a p (Holm).
Intervals are not corrected. *verdict*: "as good" if the 90 % interval is within ± {margins}; else "better" or "worse"
if p is below 0.05; else "undecided", with the smallest margin that contains the 90 % interval.""")
UNCLAIMED = Markdown("Only the comparisons that the grid lists as claims have a verdict.")
SOLVED = Markdown("""\
*solved*: the number of runs of each attention that reach {nearly:g} % of the highest possible value. Some runs are near
perfect and others are far from it. Their mean would describe neither. *blocks a : b*: of the blocks, with one seed
each, the first attention has more solved runs in a, the second in b. p is from the two-sided sign test over these.""")

UNDIRECTED = Markdown("""\
*direction unknown*: the task does not declare whether more or less of {metric} is better. Write `better="more"` or
`better="less"` in its `Metric`.""")

AT_CHANCE = Markdown("""\
*both at chance*: no run is 1 point better than guessing. The comparison is not tested. The accuracy of
guessing is the share of the largest class, or 1 / classes if the run has not recorded this share.""")

LOST_RUNS = Markdown("""\
*runs lost*: a run of one of the two attentions has diverged, has failed, or has no finite metric. The remaining pairs
are not a random sample, so the comparison is not tested.""")

IN_ACCURACY = Markdown(" These points are points of accuracy.")

AT_THE_CEILING = Markdown("""\
**At the ceiling** (all runs are within 1 point of the best possible value; not tested): {pairs}.""")

STEPS = Markdown("""\
The training step at which validation first finds {nearly:g} % of the highest possible value: medians over runs. A dash:
half of the runs or fewer reach it.""")

SHARES = Markdown("""\
The share of the variance over runs that is due to settings. The rest is due to seeds. If the share is large, a further
setting gives more information than a further seed.""")


def differences(grid: Grid, results: Results) -> Iterator[Section]:
    """Yield a section that lists the verdicts and shows the forest plots."""
    compared = [(table, results.compared_in(number)) for number, table in enumerate(results.tables)]
    drawn = {f"differences-{_slug(table)}": figures.forest(lines, table, results.first) for table, lines in compared}
    yield Section(figures=_known(drawn), findings=[one for table, lines in compared for one in _findings(table, lines)])


def tables(grid: Grid, results: Results) -> Iterator[Section]:
    """Yield a section for each table: our means, published means and comparisons with the first attention."""
    for number, table in enumerate(results.tables):
        cells, compared = cells_of(results.runs, table), results.compared_in(number)
        text = [*_text_of_table(grid, results, cells, compared, table), *_comparisons(results, table, compared)]
        yield Section(f"{table.title[0].upper()}{table.title[1:]}", text, numbers_of(cells, compared, table))


def curves(grid: Grid, results: Results) -> Iterator[Section]:
    """Yield a section of figures: learning curves, bars, and metrics against a setting such as the width."""
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
    """Yield lines for a terminal: our numbers beside published numbers, and the findings of the report."""
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
    """Return a sentence that lists decided comparisons of a table and counts the others; [] without comparisons."""
    compared = [one for one in compared if one.verdict]
    found, told = [], ("worse", "better", "as good", LOST)
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


def _text_of_table(
    grid: Grid, results: Results, cells: Sequence[Cell], compared: Sequence[Compared], table: Table
) -> list[Markdown]:
    lines = [results_table(cells, table, compared, relabelled=bool(table.relabelled))]
    if table.relabelled:
        lines = [RIGHT, *lines, AS_PRINTED, results_table(cells, table)]
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
    verdicts, tests = {one.verdict for one in compared}, sum(isfinite(one.p) for one in results.compared)
    if others:
        less = "; less is better" * (table.kind.better == "less")
        lines += [comparisons_table(others, table.kind), COMPARED.format(better=less)]
    if margins := {one.margin: pair_of(one) for one in others if isfinite(one.p)}:
        pairs = [f"{margin:g} ({pair})" * (len(margins) > 1) or f"{margin:g}" for margin, pair in margins.items()]
        lines.append(JUDGED.format(tests=tests, margins=" or ± ".join(pairs)))
    if "" in verdicts:
        lines.append(UNCLAIMED)
    if counted:
        lines.append(SOLVED.format(nearly=100 * NEARLY))
    if NO_DIRECTION in verdicts:
        lines.append(UNDIRECTED.format(metric=table.kind.label))
    if CHANCE in verdicts:
        lines.append(AT_CHANCE + (IN_ACCURACY if table.accuracy else Markdown("")))
    if LOST in verdicts:
        lines.append(LOST_RUNS)
    if easy:
        lines.append(AT_THE_CEILING.format(pairs=at_the_ceiling(compared)))
    of_either = {one.column for one in (*easy, *counted)}
    shown = [column for column in table.columns if column in of_either]
    if shown and (steps := steps_table(results.histories, table, shown)) is not None:
        lines += [steps, STEPS.format(nearly=100 * NEARLY)]
    return lines
