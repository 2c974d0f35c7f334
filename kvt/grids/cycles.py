"""Report sections of the grids `cycles` and `shift`: accuracies, steps, and the law of cycles (docs/symmetry.md)."""

from collections.abc import Iterator
from math import gcd, inf, isfinite
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy.stats import t

from kvt.markdown import Markdown, markdown_table
from kvt.reports.comparisons import NEARLY, steps_to_ceiling
from kvt.reports.figures import POINTS, STYLE, WIDTH, add_legend, limit_ticks, line_styles
from kvt.reports.report import Results, Section
from kvt.reports.tables import label
from kvt.study.grid import Grid, Run
from kvt.study.outcomes import thinned

ACCURACY, COURSE = "test/acc", "val/acc"
SIZE = ["depth", "heads"]
MARK: dict[str, Any] = {"markersize": 3.5, "alpha": 0.8, "markeredgewidth": 0}
SYMBOLS = 10  # digits; a guess is right with probability 1/10
NEAR = 0.005  # an accuracy at most this far from a level counts as equal to the level

FINDING = """\
{standing} of {runs} runs end within {points:g} points of an accuracy 1 − 0.9 · b / {length} with an integer b, as the
law of cycles says. {chance:.0f} % of random accuracies would."""

TEXT = """\
The task moves digits along cycles of tokens. In a head with symmetric scores, the tokens of a cycle of more than two
cannot all attend to their predecessors: at least one token attends elsewhere. If b tokens attend elsewhere and guess
one of ten digits, the expected accuracy is 1 − 0.9 · b / {length}. The *level* has b = C, the number of cycles of more
than two tokens."""

LEGEND = """\
Mean of n runs [95 % t interval over seeds]. **Bold**: more than {points:g} points above the level. The level is for one
head with symmetric scores in one layer, not for QKV, KV+Phase and larger models."""

STEPS = """\
### Training steps to {nearly:.0f} % validation accuracy

Median over all runs of a size, and in brackets the number of runs that reach it. A dash: half of the runs or fewer
reach it."""


def levels(grid: Grid, results: Results) -> Iterator[Section]:
    """Yield plots of accuracies and levels, then tables (see `_tables`); nothing if no run has finished."""
    if not len(known := results.finished):
        return
    known, length = add_cycles(known, grid), grid.runs[0].value("length")
    standing, chance = int(stands(known[ACCURACY], length).sum()), min(1, 2 * NEAR / (1 - level(length, 1)))
    finding = FINDING.format(standing=standing, runs=len(known), points=100 * NEAR, length=length, chance=100 * chance)
    figures = {"levels": draw_levels(known, length)}
    if COURSE in results.histories:
        figures["ladder"] = draw_ladder(results.histories, known, length)
    yield Section("Levels", [Markdown(finding), Markdown(TEXT).format(length=length)], figures=figures)
    yield Section(text=[*_tables(known, results.histories, length)])


def level(length: int, broken: float) -> float:
    """Return the expected accuracy if `broken` of `length` tokens guess one of ten digits and the others are right.

    >>> level(16, 2)
    0.8875
    """
    return 1 - (1 - 1 / SYMBOLS) * broken / length


def longer_cycles(length: int, cycle: int) -> int:
    """Return C, the number of cycles of more than two tokens, for `length` tokens in cycles of `cycle` tokens."""
    return length // cycle if cycle > 2 else 0


def add_cycles(results: pd.DataFrame, grid: Grid) -> pd.DataFrame:
    """Return results of the tasks shift or permute with the columns cycle (tokens of a cycle), depth and heads."""
    runs = {run.name: run for run in grid.runs}
    of_rows = [runs[name] for name in results.name]
    return results.assign(cycle=[*map(_cycle, of_rows)], **{n: [run.value(n) for run in of_rows] for n in SIZE})


def _cycle(run: Run) -> int:
    if run.config.data["init_args"]["task"] == "permute":
        return int(run.value("cycle"))
    length = run.value("length")
    return int(length // gcd(length, run.value("by")))


def stands(accuracy: pd.Series, length: int) -> pd.Series:
    """Return for each accuracy whether its distance to the closest `level` of an integer `broken` is at most `NEAR`."""
    broken = (1 - accuracy) / (1 - level(length, 1))
    return (broken - broken.round()).abs() * (1 - level(length, 1)) <= NEAR


@rc_context(STYLE)
def draw_levels(results: pd.DataFrame, length: int) -> Figure:
    """Plot test accuracy and the level of one symmetric head against cycle length, with a panel for each model size."""
    cycles, sizes = sorted(results.cycle.unique()), results.groupby(SIZE)
    rows, chosen = -(-len(sizes) // 2), line_styles(results.attention)
    figure = Figure(figsize=(WIDTH, 1.1 + 1.6 * rows))
    panels = figure.subplots(rows, min(2, len(sizes)), sharex=True, sharey=True, squeeze=False).flat
    for axes, (size, of_size) in zip(panels, sizes, strict=False):
        limit_ticks(axes, 5)
        axes.grid(visible=False, axis="x")
        for place, cycle in enumerate(cycles):
            height = level(length, longer_cycles(length, cycle))
            axes.plot([place - 0.4, place + 0.4], [height, height], color="0.75", linewidth=4, solid_capstyle="butt")
        for number, (attention, style) in enumerate(chosen.items()):
            runs = of_size[of_size.attention == attention]
            beside = 0.7 * ((number + 0.5) / len(chosen) - 0.5)
            axes.plot(np.searchsorted(cycles, runs.cycle) + beside, runs[ACCURACY], **style.mark, **MARK)
        axes.set_xticks(range(len(cycles)), [str(cycle) for cycle in cycles])
        axes.set_title(_name(size))
        axes.set_ylim(top=1.02)
    for axes in figure.axes[-2:]:  # a label of the whole figure would overlap the legend
        axes.set_xlabel("tokens of a cycle")
    figure.supylabel("test accuracy")
    keys = [Line2D([], [], **style.mark, **MARK, label=style.label) for style in chosen.values()]
    add_legend(figure, [*keys, Line2D([], [], color="0.75", linewidth=4, label="level of one symmetric head")])
    figure.suptitle("a mark is a run")
    return figure


@rc_context(STYLE)
def draw_ladder(histories: pd.DataFrame, results: pd.DataFrame, length: int) -> Figure:
    """Plot the smallest model's validation accuracies against steps: a panel per attention, a grey line per level."""
    size, smallest = next(iter(results.groupby(SIZE)))
    chosen = line_styles(smallest.attention)
    rows = -(-len(chosen) // 3)
    figure = Figure(figsize=(WIDTH, 0.5 + 1.9 * rows))
    panels = figure.subplots(rows, 3, sharex=True, sharey=True, squeeze=False)
    for axes, (attention, style) in zip(panels.flat, chosen.items(), strict=False):
        limit_ticks(axes, 5)
        axes.grid(visible=False)
        for broken in range(length + 1):
            axes.axhline(level(length, broken), color="0.85", linewidth=0.6, zorder=0)
        for name in smallest[smallest.attention == attention].name:
            course = thinned(histories[histories.name == name].dropna(subset=COURSE), POINTS)
            axes.plot(course.step, course[COURSE], color=style.colour, linewidth=0.7, alpha=0.8)
        axes.set_title(style.label)
        axes.set_ylim(level(length, length) - 0.02, 1.02)
        axes.set_xlim(left=0)
    for axes in panels.flat[max(0, len(chosen) - 3) : len(chosen)]:  # the lowest panel of each column
        axes.tick_params(labelbottom=True)
    for axes in panels.flat[len(chosen) :]:
        axes.set_axis_off()
    figure.supxlabel("optimiser step")
    figure.supylabel("validation accuracy")
    about = f"a curve is a run, of any cycles and seed; a line is a level 1 − 0.9 · b / {length}"
    figure.suptitle(f"{_name(size)}: {about}")
    return figure


def _tables(known: pd.DataFrame, histories: pd.DataFrame, length: int) -> Iterator[Markdown]:
    """Yield tables of mean accuracies by model size, and of steps to 99 % if `histories` has validation accuracies."""
    attentions = known.attention.unique()
    for size, of_size in known.groupby(SIZE):
        yield Markdown("### {}").format(_name(size))
        lines = [["tokens of a cycle", "C", "level", *map(label, attentions)]]
        for cycle, runs in of_size.groupby("cycle"):
            height = level(length, count := longer_cycles(length, cycle))
            cells = [_cell(runs[ACCURACY][runs.attention == attention], height) for attention in attentions]
            lines.append([str(cycle), str(count), f"{height:.3f}", *cells])
        yield markdown_table(lines)
    yield Markdown(LEGEND).format(points=100 * NEAR)
    if COURSE in histories:
        yield Markdown(STEPS).format(nearly=100 * NEARLY)
        runs = known.assign(steps=known.name.map(steps_to_ceiling(histories, COURSE)))
        cells = runs.groupby(["attention", *SIZE]).steps.agg(_steps).unstack(SIZE, fill_value="–").loc[attentions]
        yield markdown_table([["", *map(_name, cells)], *([label(name), *row] for name, *row in cells.itertuples())])


def _steps(steps: "pd.Series[float]") -> str:
    return f"{steps.fillna(inf).median():,.0f} ({steps.count()} of {len(steps)})".replace("inf", "–")


def _cell(accuracies: "pd.Series[float]", height: float) -> str:
    if not (n := len(accuracies)):
        return "–"
    mean, reach = accuracies.mean(), t.ppf(0.975, n - 1) * accuracies.sem()  # `reach` is NaN for a single run
    bold = "**" if mean > height + NEAR else ""
    interval = f" [{max(0, mean - reach):.3f}, {min(1, mean + reach):.3f}]" if isfinite(reach) else ""
    return Markdown(f"{bold}{mean:.3f}{bold}{interval}, n = {n}")


def _name(size: tuple[int, int]) -> str:
    layers, heads = size
    return f"{layers} layer{'s' * (layers > 1)}, {heads} head{'s' * (heads > 1)}"
