"""The forest plot, the main figure of a study: differences of attentions, their intervals and the margin."""

from math import isfinite

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvt.reports.figures import FONT, WIDTH, add_legend, line_styles, style_axes
from kvt.reports.names import label
from kvt.reports.tables import CEILING, Table, verdict_in_words

FILLED = ("as good", "better", "worse")  # verdicts; the mark of any other is empty


def forest(compared: pd.DataFrame, table: Table, margin: float, first: str) -> Figure | None:
    """Draw the forest plot: for each comparison with the attention `first` its difference and interval, in points.

    Left out are comparisons at the ceiling. Return None if there are no others.
    """
    shown = compared[compared.verdict != CEILING]
    if not len(shown):
        return None
    chosen = line_styles([first, *compared.attention])
    begins = ~shown.column.duplicated()
    places = np.arange(len(shown)) + 0.6 * (begins.cumsum().to_numpy() - 1)
    figure = Figure(figsize=(WIDTH, 0.75 + 0.19 * (places[-1] + 1)), layout="constrained")
    axes = figure.subplots()
    style_axes(axes, 5)
    axes.grid(visible=False, axis="y")
    axes.axvspan(-margin, margin, color="0.9", zorder=0)
    axes.axvline(0, color="0.5", linewidth=0.6)
    point = table.kind.point
    for one, y in zip(shown.itertuples(), places, strict=True):
        colour, value = chosen[one.attention].colour, one.difference / point
        if isfinite(one.low):
            axes.plot([one.low / point, one.high / point], [y, y], color=colour, linewidth=1.4)
        inside = colour if one.verdict in FILLED else "white"
        axes.plot([value], [y], "o", color=colour, markersize=4.5, markerfacecolor=inside)
        words = f" {verdict_in_words(one, table.kind)}"
        axes.annotate(words, (1, y), xycoords=("axes fraction", "data"), fontsize=FONT, va="center")
    columns = shown.column.str.replace("_", " ") + ":   "
    names = columns.where(begins, "") + shown.attention.map(label)
    axes.set_yticks(places, names, fontsize=FONT)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(places[-1] + 0.7, -0.7)
    axes.set_xlabel(f"difference from {label(first)} in {table.title}, points", fontsize=FONT)
    keys = [Line2D([], [], color="0.3", marker="o", markersize=4.5, label="mean of pairs, 95 % interval")]
    keys.append(Patch(color="0.9", label=f"within ± {margin:g}: as good"))  # type: ignore[arg-type]
    add_legend(figure, keys)
    return figure
