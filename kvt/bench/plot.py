"""The measured table as a plot: cost against sequence length."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from kvt.bench.table import Row, heads_of

COSTS = {"training_ms": ("training step (ms)", 1), "training_peak_bytes": ("peak memory of a step (MiB)", 2**20)}
DASHES = ("-", "--", ":", "-.")
MARKERS = "os^Dv*PX<>hd"


def draw(rows: Sequence[Row]) -> Figure:
    """Plot training time (above) and peak memory (below) against n, one column of panels per width d.

    Colour and marker stand for the attention, the line style for the number of heads. A later line is thinner: it does
    not hide one that it coincides with.
    """
    table = pd.DataFrame(rows).assign(heads=[heads_of(row) for row in rows]).sort_values("n", kind="stable")
    names, heads, widths = ([*table[key].unique()] for key in ("attention", "heads", "d"))
    figure = Figure(figsize=(3.2 * len(widths) + 2.2, 6.2), layout="constrained")
    panels = figure.subplots(len(COSTS), len(widths), sharex=True, sharey="row", squeeze=False)
    for axes, ((cost, (label, unit)), width) in zip(panels.flat, product(COSTS.items(), widths), strict=True):
        for (name, size), line in table[table.d == width].groupby(["attention", "heads"], sort=False):
            place = names.index(name)
            style: dict[str, Any] = {"color": colormaps["tab20"](place % 20), "label": f"{name}, heads {size}"}
            style |= {"linestyle": DASHES[heads.index(size) % len(DASHES)], "linewidth": 2.4 - 1.6 * place / len(names)}
            style |= {"marker": MARKERS[place % len(MARKERS)], "markerfacecolor": "none", "markersize": 5}
            axes.plot(line.n, line[cost].astype(float) / unit, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(table.n.unique(), table.n.unique())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
        axes.grid(color="0.88")
        axes.set(title=f"d = {width}", xlabel="tokens n", ylabel=label)
        axes.label_outer()
    looks: dict[str, Any] = {"frameon": False, "fontsize": "small", "handlelength": 3.5}  # shows thick dashes
    figure.legend(handles=panels[0, 0].lines, loc="outside right upper", **looks)
    return figure
