"""The measured table as a plot: cost against sequence length."""

from collections.abc import Sequence
from itertools import cycle, product
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from kvt.bench.table import Row

COSTS = {"training_ms": ("training step (ms)", 1), "training_peak_bytes": ("peak memory of a step (MiB)", 2**20)}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7B3294", "#777777", "#000000")
LOOKS: list[dict[str, Any]] = [{"color": c, "marker": m} for c, m in zip(COLOURS, "osD^vP*Xd", strict=True)]
STYLES: list[dict[str, Any]] = [{"linestyle": "-", "linewidth": 1.2, "markersize": 4.5}]
STYLES += [{"linestyle": dashes, "linewidth": 0.8, "markersize": 2.5} for dashes in ("--", ":", "-.")]


def draw(rows: Sequence[Row]) -> Figure:
    """Plot training time (above) and peak memory (below) against n, one column of panels per width d.

    Colour and marker stand for the attention, the line style for the number of heads.
    """
    widths = list(dict.fromkeys(row["d"] for row in rows))
    lengths = sorted({row["n"] for row in rows})
    looks = dict(zip(dict.fromkeys(row["attention"] for row in rows), cycle(LOOKS)))
    styles = dict(zip(dict.fromkeys(_heads(row) for row in rows), cycle(STYLES)))
    figure = Figure(figsize=(3.2 * len(widths) + 1.8, 6.2), layout="constrained")
    panels = figure.subplots(len(COSTS), len(widths), sharex=True, sharey="row", squeeze=False)
    for axes, (cost, width) in zip(panels.flat, product(COSTS, widths), strict=True):
        _, unit = COSTS[cost]
        for (name, look), (heads, style) in product(looks.items(), styles.items()):
            line = [r for r in rows if (r["attention"], _heads(r), r["d"]) == (name, heads, width)]
            known = sorted((row["n"], row[cost] / unit) for row in line if row[cost] is not None)
            axes.plot([n for n, _ in known], [value for _, value in known], **look, **style)
        _scale(axes, lengths)
    for column, width in enumerate(widths):
        panels[0, column].set_title(f"d = {width}")
        panels[-1, column].set_xlabel("tokens n")
    for row, (label, _) in enumerate(COSTS.values()):
        panels[row, 0].set_ylabel(label)
    keys = [Line2D([], [], **look, **STYLES[0], label=name) for name, look in looks.items()]
    keys += [Line2D([], [], color="0.3", **style, label=heads) for heads, style in styles.items()]
    figure.legend(handles=keys, loc="outside right upper", frameon=False)
    return figure


def _scale(axes: Axes, lengths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.grid(which="major", color="0.88", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _heads(row: Row) -> str:
    return f"{row['heads']} heads" if row["kv_heads"] is None else f"{row['heads']} heads, kv_heads {row['kv_heads']}"
