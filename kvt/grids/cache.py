"""Report section of the grid `cache`: the validation loss against the bytes of key-value cache per token."""

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvt.markdown import Markdown, markdown_table
from kvt.reports.figures import STYLE, WIDTH, add_legend, line_styles
from kvt.reports.report import Results, Section
from kvt.reports.statistics import compare
from kvt.reports.tables import label
from kvt.study.grid import Grid, Run

LOSS = "val/loss"

TEXT = Markdown("""\
*cache*: bytes of the key-value cache per token, of all layers, in float32. A cache that layers share counts once.
*loss*: mean over runs, in nats. *above {first}*: difference from the loss of {first}, mean over pairs of runs with the
same settings and seed. With at least two seeds, its 95 % confidence interval (t) follows. Models that share
projections or layers also have fewer weights.""")


def frontier(grid: Grid, results: Results) -> Iterator[Section]:
    """Yield a section on validation losses and cache sizes; nothing if no finished run has a validation loss."""
    if LOSS not in results.finished:
        return
    cached = results.finished.name.map({run.name: cache_bytes(run) for run in grid.runs})
    found = costs(results.finished.assign(cache=cached), results.first)
    if len(found):
        text = [TEXT.format(first=label(results.first)), costs_table(found, results.first)]
        yield Section("Loss against the cache", text, [found], {"cache": draw_costs(found, results.first)})


@torch.no_grad()
def cache_bytes(run: Run) -> int:
    """Return the bytes per token of all layers' key-value caches in float32, measured with a window of one token."""
    settings = run.config.model["init_args"]
    with torch.device("meta"):
        model: Any = run.config.classes["model"]({"tokenizer": "bytes", "length": 1}, **settings).model.eval()
        caches = model.make_caches()
        model.next_logits(torch.zeros(1, 1, dtype=torch.long), caches)
    return sum(cache.nbytes for cache in caches)


def costs(runs: pd.DataFrame, first: str) -> pd.DataFrame:
    """Return a table with a row for each attention and setting.

    Columns: setting; attention; cache, in bytes per token; loss, the mean in nats; difference, the loss minus that of
    the attention `first`, averaged over pairs of runs with the same seed; reach, half the width of the 95 % interval of
    this difference; and n, the number of runs. Difference and reach are NaN if unknown, and for `first`.
    """
    rows, keys = [], ["task", "setting", "seed"]
    known = runs.dropna(subset=[LOSS])
    for (setting, attention), own in known.groupby(["setting", "attention"], sort=False):
        pairs = own.merge(known[known.attention == first], on=keys, suffixes=("", " first"))
        row = {"setting": setting, "attention": attention, "cache": own.cache.iloc[0], "loss": own[LOSS].mean()}
        if len(pairs) and attention != first:
            compared = compare(pairs[LOSS], pairs[f"{LOSS} first"], pairs.setting, pairs.seed)
            row |= {"difference": compared.difference, "reach": compared.reach()}
        rows.append({**row, "n": len(own)})
    return pd.DataFrame(rows, columns=["setting", "attention", "cache", "loss", "difference", "reach", "n"])


def costs_table(found: pd.DataFrame, first: str) -> Markdown:
    """Return a Markdown table with a row for each attention and setting; within a setting, larger caches come first."""
    lines = []
    for _, of_setting in found.groupby("setting", sort=False):
        for row in of_setting.sort_values("cache", ascending=False, kind="stable").itertuples():
            above = "" if pd.isna(row.difference) else f"{row.difference:+.3f}"
            above += "" if pd.isna(row.reach) else f" ± {row.reach:.3f}"
            lines.append([row.setting, label(row.attention), f"{row.cache:,}", f"{row.loss:.3f}", above, str(row.n)])
    return markdown_table([["", "", "cache B/token", "loss", f"above {label(first)}", "n"], *lines])


@rc_context(STYLE)
def draw_costs(found: pd.DataFrame, first: str) -> Figure:
    """Plot the result of `costs`: loss against cache size, in a panel per setting. Error bars are ± reach."""
    settings = [*found.setting.unique()]
    figure = Figure(figsize=(WIDTH, 2.8))
    panels = figure.subplots(1, len(settings), squeeze=False)[0]
    styles = line_styles([first, *found.attention])
    for axes, setting in zip(panels, settings, strict=True):
        for row in found[found.setting == setting].itertuples():
            style = styles[row.attention]
            reach = None if pd.isna(row.reach) else row.reach
            axes.errorbar(row.cache, row.loss, reach, ecolor=style.colour, elinewidth=0.8, **style.mark, markersize=5)
        axes.set_xscale("log")
        caches = sorted(found[found.setting == setting].cache.unique())
        axes.set_xticks(caches, [f"{cache:,}" for cache in caches])
        axes.minorticks_off()
        axes.set(title=setting, xlabel="bytes of cache per token", ylabel="validation loss (nats)")
    add_legend(figure, [Line2D([], [], **styles[name].mark, label=label(name)) for name in styles])
    return figure
