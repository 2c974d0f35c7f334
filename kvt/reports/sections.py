"""Writes the sections of a report that grids list by name: tables, curves and notes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from html import unescape
from itertools import product
from math import isfinite

import pandas as pd
from matplotlib.figure import Figure

from kvt.markdown import Markdown
from kvt.reports import figures
from kvt.reports.comparisons import CEILING, LOST, NEARLY, Cell, Compared, cells_of
from kvt.reports.notes import notes, other_counts  # noqa: F401  (grids can list notes as a section)
from kvt.reports.report import Results, Section, measure
from kvt.reports.tables import Table, against_of, columns_of, counted, curves_of, kind_of, label
from kvt.reports.text import (
    at_the_ceiling,
    comparisons_table,
    numbers_of,
    pair_of,
    printed_table,
    results_table,
    steps_table,
)
from kvt.study.grid import Grid
from kvt.study.outcomes import Outcomes

OTHER_SETTINGS = Markdown("""\
**Our settings differ from the paper's (see Runs). They contribute to the difference from the published numbers.**""")
JUDGED = Markdown("""\
*as good*: the 90 % interval is within ± {margins}. *p* is corrected for the {tests} of this report that have a p.""")
AT_THE_CEILING = Markdown("**At the ceiling** (not tested): {}.")
STEPS = Markdown("""\
The training step at which validation first finds {nearly:g} % of the highest possible value: medians over runs. A dash:
half of the runs or fewer reach it.""")
LEGEND = Markdown("""\
* **results**: mean ± standard deviation over settings. The value of a setting is the mean over its seeds. A single
  setting has no standard deviation. *n*: the number of runs. A cell with another number than the last row has its own.
* **published**: the paper's mean ± standard deviation over settings, if the paper has one. *difference*: our mean minus
  the published mean, in points.
* **better in**: the number of pairs in which an attention is better. Runs are paired by task, settings and seed. Both
  runs of a pair have read the same data in the same order. A setting is left out if all runs of all attentions are
  within 1 point of the best possible value, or if all are no better than chance.
* **difference** of a pair of attentions: mean over settings, in points, with its 95 % confidence interval. Settings
  that differ only in heads share initial weights and data. They are a block, and are averaged within a seed. The
  interval is Welch's t over the seeds of the blocks. Its standard error is multiplied by √(1 + 0.2 (B − 1)) for B
  blocks, because a seed moves all blocks a little together. It assumes normally distributed differences. Intervals are
  not corrected for their number. A single seed has no interval and no verdict.
* **verdict**: "as good" if the 90 % interval is within the margin; else "better" or "worse" if p, from the t-test of a
  mean difference of 0, is below 0.05; else "undecided", with the smallest margin that contains the 90 % interval. If a
  grid lists claims, only these comparisons have a p and a verdict, and p is corrected for their number (Holm).
* **solved**: the number of runs of each attention that reach {nearly:g} % of the highest possible value. Some runs are
  near perfect and others are far from it. Their mean would describe neither. *blocks a : b*: of the blocks, with one
  seed each, the first attention has more solved runs in a, the second in b. p is from the two-sided sign test.
* **both at the ceiling**: all runs are within 1 point of the best possible value. **both at chance**: no run is 1 point
  of accuracy better than guessing, which finds the share of the largest class, or 1 / classes if a run has not recorded
  this share. **runs lost**: a run of one of the two attentions has diverged, has failed, or has no finite metric, so
  that the remaining pairs are not a random sample. These comparisons are not tested.
* **direction unknown**: the task's `Metric` does not declare `better="more"` or `better="less"`.""")


def tables(grid: Grid, results: Results) -> Iterator[Section]:
    """Yield a section for each table, with the published numbers and the comparisons, and a legend."""
    for number, table in enumerate(results.tables):
        cells = cells_of(results.runs, table)
        compared = [one for one in results.compared if one.table == number]
        text = [*_results(grid, results, cells, compared, table), *_comparisons(results, table, compared)]
        drawn = _known({f"differences-{_slug(table)}": figures.forest(compared, table, results.first)})
        yield Section(f"{table.title[0].upper()}{table.title[1:]}", text, numbers_of(cells, compared, table), drawn)
    if results.tables:
        yield Section("How to read the tables", [LEGEND.format(nearly=100 * NEARLY)])


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
        name = f"against-{words.replace(' ', '-')}-{_slug(table)}"
        drawn[name] = figures.against(results.runs, table, setting, words)
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
        for finding in summary(table, [one for one in results.compared if one.table == number]):
            yield unescape(finding.replace("**", ""))


def _results(
    grid: Grid, results: Results, cells: Sequence[Cell], compared: Sequence[Compared], table: Table
) -> Iterator[Markdown]:
    """Yield our results beside the published results, and a summary of the comparisons."""
    yield results_table(cells, table, compared)
    less = " Less is better." * (table.kind.better == "less")
    yield Markdown("A point is {}.{}").format(table.kind.point_in_words, less)
    yield from summary(table, compared)
    if table.published and grid.scale_diff:
        yield OTHER_SETTINGS
    if table.note:
        yield Markdown("Note: {}").format(table.note)
    if table.printed:
        yield Markdown("The published numbers in the columns that the paper prints:")
        yield printed_table(table)
    yield from other_counts(results.runs[results.runs.name.isin(frozenset().union(*table.columns.values()))])


def summary(table: Table, compared: Sequence[Compared]) -> list[Markdown]:
    """Return a sentence that lists decided comparisons of a table and counts the others; [] without comparisons."""
    found, told = [], ("worse", "better", "as good", LOST)
    for verdict in told:
        where: dict[str, list[str]] = {}
        for one in compared:
            if one.verdict == verdict:
                where.setdefault(pair_of(one), []).append(f"{one.column} {table.kind.points(one.difference)}")
        if where:
            pairs = ", ".join(f"{pair} ({'; '.join(columns)})" for pair, columns in where.items())
            found.append(Markdown("**{}**: {}").format(verdict, pairs))
    if untold := Counter(one.verdict for one in compared if one.verdict and one.verdict not in told):
        counts = ", ".join(f"{count} × {verdict}" for verdict, count in untold.items())
        found.append(Markdown("{}: {}").format("others" if found else "no verdict", counts))
    heading = Markdown("In {}: ").format(table.title)
    return [heading + Markdown("; ").join(found) + Markdown(".")] if found else []


def _comparisons(results: Results, table: Table, compared: Sequence[Compared]) -> Iterator[Markdown]:
    """Yield the comparisons of attentions. Those at the ceiling are listed with the steps until they get there."""
    if not compared:
        return
    yield Markdown("### Is it as good as {}?").format(label(results.first))
    easy, others = ([one for one in compared if (one.verdict == CEILING) is at_ceiling] for at_ceiling in (True, False))
    if others:
        yield comparisons_table(others, table.kind)
    if margins := {one.margin: pair_of(one) for one in others if isfinite(one.p)}:
        pairs = [f"{margin:g} ({pair})" * (len(margins) > 1) or f"{margin:g}" for margin, pair in margins.items()]
        tests = counted(sum(isfinite(one.p) for one in results.compared), "comparison")
        yield JUDGED.format(tests=tests, margins=" or ± ".join(pairs))
    if easy:
        yield AT_THE_CEILING.format(at_the_ceiling(compared))
    of_either = {one.column for one in compared if one.verdict == CEILING or isfinite(one.solved)}
    shown = [column for column in table.columns if column in of_either]
    if shown and (steps := steps_table(results.histories, table, shown)) is not None:
        yield steps
        yield STEPS.format(nearly=100 * NEARLY)


def _slug(table: Table) -> str:
    return table.metric.replace("/", "-").replace(" ", "-")


def _known(drawn: dict[str, Figure | None]) -> dict[str, Figure]:
    return {name: figure for name, figure in drawn.items() if figure is not None}
