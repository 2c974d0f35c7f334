"""Plots of the measured costs against sequence length."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from kvt.bench.costs import Cost
from kvt.bench.table import Row, heads_of

DASHES = ("-", "--", ":", "-.")
MARKERS = "os^Dv*PX<>hd"


def draw(cost: Cost, rows: Sequence[Row]) -> Figure:
    """Plot each column of a cost that has a label against the number of tokens n.

    Each of these columns has a row of panels, with one panel for each width d and batch size. Colour and marker stand
    for the attention, the line style for the number of heads. Each line is thinner than the line before, so that lines
    that coincide are all visible.
    """
    table = pd.DataFrame(rows).assign(heads=[heads_of(row) for row in rows]).sort_values("n", kind="stable")
    names, heads = ([*table[key].unique()] for key in ("attention", "heads"))
    shown, sizes = [column for column in cost.columns if column.label], [*table.groupby(["d", "batch"], sort=False)]
    figure = Figure(figsize=(3.2 * len(sizes) + 2.2, 6.2), layout="constrained")
    panels = figure.subplots(len(shown), len(sizes), sharex=True, sharey="row", squeeze=False)
    for axes, (column, ((width, batch), part)) in zip(panels.flat, product(shown, sizes), strict=True):
        for (name, size), line in part.groupby(["attention", "heads"], sort=False):
            place = names.index(name)
            style: dict[str, Any] = {"color": colormaps["tab20"](place % 20), "label": f"{name}, heads {size}"}
            style |= {"linestyle": DASHES[heads.index(size) % len(DASHES)], "linewidth": 2.4 - 1.6 * place / len(names)}
            style |= {"marker": MARKERS[place % len(MARKERS)], "markerfacecolor": "none", "markersize": 5}
            axes.plot(line.n, line[column.name].astype(float) / column.unit, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(table.n.unique(), table.n.unique())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
        axes.grid(color="0.88")
        axes.set(title=f"d = {width}, batch {batch}", xlabel="tokens n", ylabel=column.label)
        axes.label_outer()
    looks: dict[str, Any] = {"frameon": False, "fontsize": "small", "handlelength": 3.5}  # long enough for thick dashes
    figure.legend(handles=panels[0, 0].lines, loc="outside right upper", **looks)
    return figure
