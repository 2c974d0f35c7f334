"""Figures of a study: learning curves, bars, metrics against a setting, and differences between attentions."""

import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from io import BytesIO, StringIO
from itertools import product
from math import inf, isfinite
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from kvt.attention import ATTENTION
from kvt.reports.comparisons import CEILING, Compared, cells_of, finished, finite
from kvt.reports.tables import STAGES, Table, in_words, label
from kvt.reports.text import pair_of, verdict_in_words
from kvt.study.outcomes import thinned
from kvt.tasks.metrics import Metric

OTHER_COLOURS = ("#7B3294", "#117733", "#EE3377", "#A6611A")  # for attentions not in ATTENTION, in order of appearance
DASHES: tuple[Any, ...] = ("-", (0, (6, 1.5)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
THIN: dict[str, Any] = {"linestyle": (0, (3, 1.5)), "linewidth": 0.7}
MARKERS = ("o", "^", "s", "D")
HATCHES = ("", "//////", "......", "xxxxxx")
BAR: dict[str, Any] = {"alpha": 0.75, "edgecolor": "white", "linewidth": 0}
RUN: dict[str, Any] = {"color": "0.15", "marker": "o", "markersize": 1.8, "linestyle": "", "markeredgewidth": 0}
PUBLISHED: dict[str, Any] = RUN | {"color": "black", "marker": "D", "markersize": 4.5}
PUBLISHED |= {"markerfacecolor": "none", "markeredgewidth": 0.9}
TICKS = {"major.size": 2.5, "major.width": 0.6, "color": "0.5", "labelcolor": "black"}
MOMENTS = {"step": "optimiser step", "seconds": "seconds of training"}
FILLED = ("as good", "better", "worse")  # verdicts with a filled marker
WIDTH = 7.0  # inches
FONT = 7.5  # points
STYLE: Any = {
    **dict.fromkeys(("font.size", "figure.titlesize", "figure.labelsize"), FONT),
    **dict.fromkeys(("figure.constrained_layout.use", "axes.axisbelow", "axes.grid"), True),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.linewidth", "grid.linewidth"), 0.6),
    **{"axes.titlesize": FONT + 1, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 4},
    **{"axes.edgecolor": "0.5", "grid.color": "0.9"},
}
STYLE |= {f"{axis}tick.{name}": value for axis in "xy" for name, value in TICKS.items()}
"""The style of plots in reports, but not of attention maps. Functions that draw plots have `@rc_context(STYLE)`."""
TICK_STEPS = [1, 2, 2.5, 5, 10]  # distances of ticks, times a power of ten
POINTS = 120  # largest number of points of one curve
MARKED = 16  # a thick curve with at most this number of points has markers


class LineStyle(NamedTuple):
    label: str
    colour: str
    dashes: int  # index in DASHES, MARKERS and HATCHES, which distinguish attentions with the same colour

    @property
    def line(self) -> dict[str, Any]:
        return {"color": self.colour, "linestyle": DASHES[self.dashes]}

    @property
    def mark(self) -> dict[str, Any]:
        return {"color": self.colour, "marker": MARKERS[self.dashes], "linestyle": ""}


def line_styles(attentions: Iterable[str]) -> dict[str, LineStyle]:
    """Return a line style for each attention, such as "kv" or "kv, kv_heads 1"."""
    found: dict[str, LineStyle] = {}
    names = {attention: attention.partition(",")[0] for attention in attentions}
    own = [*dict.fromkeys(name for name in names.values() if name not in ATTENTION)]
    for attention, name in names.items():
        colour = ATTENTION[name].colour if name in ATTENTION else OTHER_COLOURS[own.index(name) % len(OTHER_COLOURS)]
        alike = sum(style.colour == colour for style in found.values())
        found[attention] = LineStyle(label(attention), colour, alike % len(DASHES))
    return found


@rc_context(STYLE)
def curves(histories: pd.DataFrame, metrics: Sequence[str], kind: Metric) -> Figure | None:
    """Draw the learning curves of each attention against steps and seconds, with a row of panels for each `task`.

    A curve is the mean over runs. The first metric, which `kind` describes, has a thick line and a band of ± one
    standard deviation over runs, clipped to the range of the metric. Other metrics have thin lines. Return None if no
    task has the first metric.
    """
    known = finite(histories, first := metrics[0])
    if not len(known):
        return None
    tasks = known["task"].unique()
    chosen = line_styles(known["attention"])
    figure = Figure(figsize=(WIDTH, 0.55 + 1.5 * len(tasks)))
    panels = figure.subplots(len(tasks), len(MOMENTS), sharey="row", squeeze=False)
    for row, task in zip(panels, tasks, strict=True):
        of_task = histories[histories["task"] == task]
        for metric, (attention, style) in product(reversed(metrics), chosen.items()):
            runs = finite(of_task[of_task["attention"] == attention], metric)
            if len(runs):
                values, seconds = along(runs, metric)
                for axes, places in zip(row, (values, values.set_axis(seconds)), strict=True):
                    _curve(axes, style, places, kind.highest, metric == first)
        for axes, moment in zip(row, MOMENTS, strict=True):
            limit_ticks(axes, 4)
            axes.set_xlim(left=0)
            axes.xaxis.set_major_locator(MaxNLocator(5, steps=TICK_STEPS, integer=moment == "step"))
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
        low, high = row[0].get_ylim()
        if (known[known["task"] == task][first] >= 0).all():
            low = 0 if low < high / 3 else low
        row[0].set_ylim(low, min(high, 1.015 * kind.highest) if kind.highest > 0 else high)
        row[0].set_ylabel(in_words(first, kind) if len(metrics) == 1 else kind.words)
        row[0].set_title(task.replace("_", " "))
    for axes, words in zip(panels[-1], MOMENTS.values(), strict=True):
        axes.set_xlabel(words)
    points = known["step"].nunique() == 1
    keys = [Line2D([], [], **(style.mark if points else style.line), label=style.label) for style in chosen.values()]
    if len(metrics) > 1:
        stages = [STAGES[metric.partition("/")[0]] for metric in metrics]
        keys.append(Line2D([], [], color="0.3", linewidth=1.3, label=stages[0]))
        keys += [Line2D([], [], color="0.3", **THIN, label=stage) for stage in stages[1:]]
    figure.align_ylabels(panels[:, 0])
    add_legend(figure, keys)
    least, most = known.groupby(["task", "attention"])["name"].nunique().agg(["min", "max"])
    number = f"{most}" if least == most else f"{least} to {most}"
    several = f"mean of {number} runs a curve, band: ± one standard deviation; a run that ended keeps its last value"
    figure.suptitle(several if most > 1 else "one run a curve")
    return figure


def along(histories: pd.DataFrame, metric: str) -> tuple[pd.DataFrame, "pd.Series[float]"]:
    """Return the values of a metric, with a column for each run, and the mean time of each row in seconds.

    There is a row for each step at which at least half of the runs have a value or have ended. A run without a value at
    a step keeps its previous value and time, even after its end: otherwise the last means would be of the longest runs
    alone.
    """
    runs = histories.pivot_table(index="step", columns="name", values=[metric, "seconds"], aggfunc="last")
    known, ended = runs[metric].notna(), runs[metric].bfill().isna()
    runs = runs.ffill()[2 * (known | ended).sum(axis=1) >= known.shape[1]]
    return runs[metric], runs["seconds"].mean(axis=1)


@rc_context(STYLE)
def bars(results: pd.DataFrame, table: Table) -> Figure | None:
    """Draw a bar for each attention in each column: the mean over settings of the mean over seeds.

    The whisker is ± one standard deviation over settings, clipped to the range of the metric. A dot is one run. A
    diamond is a published mean, in the correct column if the paper mislabels one. Return None if no cell has a value.
    """
    cells = [cell for cell in cells_of(results, table) if isfinite(cell.mean)]
    if not cells:
        return None
    columns = [*dict.fromkeys(cell.column for cell in cells)]
    tried = {cell.attention for cell in cells}
    chosen = line_styles(name for name in results.attention.unique() if name in tried)
    width = 0.82 / max(3, len(chosen))
    beside = {name: (number - (len(chosen) - 1) / 2) * width for number, name in enumerate(chosen)}
    at = [columns.index(cell.column) + beside[cell.attention] for cell in cells]
    mean, deviation = np.array([(cell.mean, cell.over_settings) for cell in cells]).T
    figure = Figure(figsize=(WIDTH, 2.3))
    axes = figure.subplots()
    limit_ticks(axes, 5)
    styles = [chosen[cell.attention] for cell in cells]
    colours, hatches = [style.colour for style in styles], [HATCHES[style.dashes] for style in styles]
    axes.bar(at, mean, 0.9 * width, color=colours, hatch=hatches, **BAR, zorder=2)
    below = mean if (mean >= 0).all() else inf  # a metric that is never negative has no whisker below 0
    reach = [np.minimum(deviation, limit) for limit in (below, (table.kind.highest - mean).clip(0))]
    whisker: dict[str, Any] = {"color": "0.15", "elinewidth": 0.9, "capsize": min(2.5, 20 * width)}
    axes.errorbar(at, mean, reach, fmt="none", **whisker, zorder=4)
    dots = []
    for place, column in enumerate(columns):
        runs = finished(results, table, column)
        spread = (runs.groupby("attention").cumcount() + 1) * 0.618 % 1 - 0.5  # golden ratio: dots rarely overlap
        dots.append([place + runs.attention.map(beside) + 0.7 * width * spread, runs[table.metric]])
    axes.plot(*np.concatenate(dots, axis=1), **RUN, alpha=0.6, zorder=3)
    boxes: Any = {name: {"facecolor": style.colour, "hatch": HATCHES[style.dashes]} for name, style in chosen.items()}
    keys: list[Any] = [Patch(**box, **BAR, label=chosen[name].label) for name, box in boxes.items()]
    keys.append(Line2D([], [], **RUN, label="a run"))
    if any(isfinite(cell.published_mean) for cell in cells):
        axes.plot(at, [cell.published_mean for cell in cells], **PUBLISHED)
        keys.append(Line2D([], [], **PUBLISHED, label="published mean" + ", column corrected" * bool(table.printed)))
    axes.set_xticks(range(len(columns)), [fill(name.replace("_", " "), max(6, 95 // len(columns))) for name in columns])
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    margin = 0.55 + max(0, 3 - len(columns)) / 2  # keeps bars narrow if there are few groups
    axes.set_xlim(-margin, len(columns) - 1 + margin)
    axes.set_ylabel(table.title)
    add_legend(figure, keys)
    over = "mean over settings, whisker: ± one standard deviation over settings"
    figure.suptitle(over if np.isfinite(deviation).any() else "mean over seeds")
    return figure


@rc_context(STYLE)
def against(results: pd.DataFrame, table: Table, setting: str, words: str) -> Figure | None:
    """Draw the table's metric against a setting, with a panel for each column and a line for each attention.

    A line joins means over runs. Its band is from the lowest to the highest run. If the table's metric is an accuracy,
    a thin line shows the accuracy of guessing, where known. `setting` is a setting with positive values, such as "dim",
    or a pattern such as "test/acc_*_back": then the metrics that match the pattern are drawn against the number in
    place of *. `words` labels the horizontal axis. Return None if there are no values.
    """
    pattern = re.compile(re.escape(setting).replace(r"\*", r"(\d+)"))
    numbers = {name: int(found[1]) for name in results if (found := pattern.fullmatch(name)) and found.groups()}
    if setting not in results and not numbers:
        return None
    known = pd.concat(finished(results, table, column).assign(column=column) for column in table.columns)
    if numbers:
        known = known.drop(columns=table.metric).melt(["column", "attention"], [*numbers], setting, table.metric)
        known = known.assign(**{setting: known[setting].map(numbers)}).dropna()
    if not len(known):
        return None
    columns, chosen = [*known.column.unique()], line_styles(known.attention)
    figure = Figure(figsize=(WIDTH, 2.3))
    panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    values = sorted(known[setting].unique())
    for axes, column in zip(panels, columns, strict=True):
        limit_ticks(axes, 5)
        for attention, style in chosen.items():
            runs = known[(known.column == column) & (known.attention == attention)].groupby(setting)[table.metric]
            mean = runs.mean()
            axes.plot(mean.index, mean, **style.line, linewidth=1.3, marker="o", markersize=2.6)
            axes.fill_between(mean.index, runs.min(), runs.max(), color=style.colour, alpha=0.13, linewidth=0)
        if not table.accuracy and (chance := table.chance_in(column)) is not None:
            axes.axhline(chance, color="0.3", **THIN)
        axes.set_xscale("log")
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.minorticks_off()
        axes.set_title(column.replace("_", " "))
        axes.set_xlabel(words)
    panels[0].set_ylabel(table.title)
    keys = [Line2D([], [], **style.line, label=style.label) for style in chosen.values()]
    guessing = [Line2D([], [], color="0.3", **THIN, label="chance")] if table.chance and not table.accuracy else []
    add_legend(figure, [*keys, *guessing])
    figure.suptitle("mean over runs, band: from the lowest to the highest")
    return figure


def as_svg(figure: Figure) -> str:
    """Return a figure as <svg> with text as paths; the same bytes for the same figure and version of matplotlib."""
    file = StringIO()
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "kvt"}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    _, start, rest = file.getvalue().partition("<svg")
    # without this, comments, indentation and digits below 0.01 points would take a third of the file
    element = re.sub(r"<!--.*?-->|^\s+", "", start + rest, flags=re.DOTALL | re.MULTILINE)
    element = re.sub(r'(?<= d=")[^"]+', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), element)
    return re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{prefix_of_ids(figure)}", element).strip()


def as_pdf(figure: Figure) -> bytes:
    """Return a figure as PDF with embedded fonts; the same bytes for the same figure and version of matplotlib."""
    file = BytesIO()
    with rc_context({"pdf.fonttype": 42}):  # 42: TrueType fonts, because many journals refuse Type 3
        figure.savefig(file, format="pdf", metadata={"CreationDate": None})
    return file.getvalue()


def prefix_of_ids(figure: Figure) -> str:
    """Return a prefix for the ids of an <svg>, so that figures on one page share no id: a hash of data and labels."""
    numbers: list[Any] = []
    for axes in figure.axes:
        numbers += [line.get_xydata() for line in axes.lines]
        numbers += [path.vertices for shape in axes.collections for path in shape.get_paths()]
        numbers += [box.get_corners() for box in axes.patches if isinstance(box, Rectangle)]
        numbers += [image.get_array() for image in axes.images]
    words = [text.get_text() for axes in figure.axes for text in (axes.title, axes.xaxis.label, axes.yaxis.label)]
    data = "\n".join([*words, *(f"{number:.5g}" for part in numbers for number in np.ravel(part))])
    return f"f{sha256(data.encode()).hexdigest()[:8]}-"


def _curve(axes: Axes, style: LineStyle, values: pd.DataFrame, highest: float, main: bool) -> None:
    values = thinned(values, POINTS)
    mean, deviation = values.mean(axis=1), values.std(axis=1).fillna(0)
    if not main:
        axes.plot(mean.index, mean, color=style.colour, **THIN, zorder=2)
        return
    marks: dict[str, Any] = {"marker": "o", "markersize": 2.4} if len(values) <= MARKED else {}
    if len(values) == 1:  # a single point has no line, so only a marker shows the style
        marks = {"marker": MARKERS[style.dashes], "markersize": 4}
    axes.plot(mean.index, mean, **style.line, linewidth=1.3, **marks, zorder=3)
    if deviation.any():
        low, high = mean - deviation, (mean + deviation).clip(upper=highest)
        low = low.clip(lower=0) if (mean >= 0).all() else low
        axes.fill_between(mean.index, low, high, color=style.colour, alpha=0.13, linewidth=0, zorder=1)


def limit_ticks(axes: Axes, number: int) -> None:
    """Set at most `number` + 1 ticks on the vertical axis, and the font size of the tick labels of both axes."""
    axes.tick_params(labelsize=FONT)  # `STYLE` does not apply to ticks that are made later, on saving
    axes.yaxis.set_major_locator(MaxNLocator(number, steps=TICK_STEPS))


def add_legend(figure: Figure, keys: Sequence[Any]) -> None:
    widths = [0.5 + 0.06 * len(key.get_label()) for key in keys]  # estimated widths in inches
    fitting = len(keys) if sum(widths) <= WIDTH else max(1, int(WIDTH / max(widths)))
    figure.set_figheight(figure.get_figheight() + 0.17 * -(-len(keys) // fitting))
    figure.legend(handles=keys, loc="outside lower center", ncols=fitting)


@rc_context(STYLE)
def forest(compared: Sequence[Compared], table: Table, first: str) -> Figure | None:
    """Draw the difference and the interval of each comparison of a table, in points, as a forest plot.

    Comparisons at the ceiling are left out, and so are comparisons of how many runs have solved the task. An interval
    that exceeds ± 2.5 times the largest difference or margin ends there in an arrow. Return None if nothing is left.
    """
    shown = [one for one in compared if one.verdict != CEILING and not isfinite(one.solved)]
    if not shown:
        return None
    chosen = line_styles([first, *(one.attention for one in compared)])
    begins = [not n or shown[n - 1].column != one.column for n, one in enumerate(shown)]
    places = np.arange(len(shown)) + 0.6 * (np.cumsum(begins) - 1)
    figure = Figure(figsize=(WIDTH, 0.75 + 0.19 * (places[-1] + 1)))
    axes = figure.subplots()
    limit_ticks(axes, 5)
    axes.grid(visible=False, axis="y")
    axes.axvspan(-table.margin, table.margin, color="0.9", zorder=0)
    axes.axvline(0, color="0.5", linewidth=0.6)
    point = table.kind.point
    edge = 2.5 * max(*(abs(one.difference) / point for one in shown), table.margin)
    for one, y in zip(shown, places, strict=True):
        colour, value = chosen[one.attention].colour, one.difference / point
        if isfinite(one.low):
            ends = np.clip([one.low / point, one.high / point], -edge, edge)
            axes.plot(ends, [y, y], color=colour, linewidth=1.4)
            for end, arrow in zip(ends, "<>", strict=True):
                if abs(end) == edge:
                    axes.plot([end], [y], arrow, color=colour, markersize=3.5)
        inside = colour if one.verdict in FILLED else "white"
        axes.plot([value], [y], "o", color=colour, markersize=4.5, markerfacecolor=inside)
        words = f" {verdict_in_words(one, table.kind)}"
        axes.annotate(words, (1, y), xycoords=("axes fraction", "data"), va="center")
    names = []
    for one, is_first in zip(shown, begins, strict=True):
        pair = label(one.attention) if one.baseline == first else pair_of(one)
        names.append(f"{one.column.replace('_', ' ')}:   {pair}" if is_first else pair)
    axes.set_yticks(places, names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(places[-1] + 0.7, -0.7)
    axes.set_xlabel(f"difference from {label(first)}, or within the pair, in {table.title}, points")
    keys = [Line2D([], [], color="0.3", marker="o", markersize=4.5, label="mean of pairs, 95 % interval")]
    keys.append(Patch(color="0.9", label=f"within ± {table.margin:g}: as good"))  # type: ignore[arg-type]
    add_legend(figure, keys)
    return figure
