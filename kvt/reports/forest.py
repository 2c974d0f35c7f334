"""Draws the forest plot of a report: the differences of attentions with their intervals and the margin."""

from collections.abc import Sequence
from math import isfinite

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvt.reports.comparisons import CEILING, Compared
from kvt.reports.figures import STYLE, WIDTH, add_legend, limit_ticks, line_styles
from kvt.reports.names import label
from kvt.reports.tables import Table
from kvt.reports.text import pair_of, verdict_in_words

FILLED = ("as good", "better", "worse")  # verdicts with a filled marker


@rc_context(STYLE)
def forest(compared: Sequence[Compared], table: Table, first: str) -> Figure | None:
    """Draw the forest plot: the difference and the interval, in points, of each comparison of a table.

    Comparisons at the ceiling and comparisons of numbers of solved runs are left out. The axis shows all differences.
    An interval that extends beyond the axis ends in an arrow. Return None if no comparison is left.
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
