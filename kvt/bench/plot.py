"""The measured table as a plot: cost against sequence length."""

from collections.abc import Sequence
from itertools import product

import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure

from kvt.bench.table import Row, heads_of

COSTS = {"training_ms": ("training step (ms)", 1), "training_peak_bytes": ("peak memory of a step (MiB)", 2**20)}
DASHES = ("-", "--", ":", "-.")


def draw(rows: Sequence[Row]) -> Figure:
    """Plot training time (above) and peak memory (below) against n, one column of panels per width d.

    The colour stands for the attention, the line style for the number of heads.
    """
    table = pd.DataFrame(rows).assign(heads=[heads_of(row) for row in rows]).sort_values("n", kind="stable")
    names, heads, widths = ([*table[key].unique()] for key in ("attention", "heads", "d"))
    figure = Figure(figsize=(3.2 * len(widths) + 2.2, 6.2), layout="constrained")
    panels = figure.subplots(len(COSTS), len(widths), sharex=True, sharey="row", squeeze=False)
    for axes, ((cost, (label, unit)), width) in zip(panels.flat, product(COSTS.items(), widths), strict=True):
        for (name, size), line in table[table.d == width].groupby(["attention", "heads"], sort=False):
            style = {"color": colormaps["tab20"](names.index(name) % 20), "linestyle": DASHES[heads.index(size) % 4]}
            axes.plot(line.n, line[cost].astype(float) / unit, marker=".", label=f"{name}, heads {size}", **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(table.n.unique(), table.n.unique())
        axes.grid(color="0.88")
        axes.set(title=f"d = {width}", xlabel="tokens n", ylabel=label)
        axes.label_outer()
    figure.legend(handles=panels[0, 0].lines, loc="outside right upper", frameon=False, fontsize="small")
    return figure
