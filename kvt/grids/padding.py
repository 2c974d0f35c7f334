"""Report section of the grid `follow-up`: perplexities over all targets, and over targets that are not padding."""

from collections.abc import Iterator

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvt.markdown import Markdown, markdown_table
from kvt.reports.figures import STYLE, WIDTH, add_legend, limit_ticks, line_styles
from kvt.reports.report import Results, Section
from kvt.reports.tables import label
from kvt.study.grid import Grid

COUNTED, REAL = "val/ppl", "val/real_ppl"

TEXT = Markdown("""\
The perplexity of each attention relative to that of {first}, in per cent above it: over all targets, which include
padding, and over real targets, which do not. Mean over pairs of runs with the same settings and seed.""")


def costs(grid: Grid, results: Results) -> Iterator[Section]:
    """Yield a section with the `perplexity_costs` against the first attention, if there are pairs with both metrics."""
    first = results.first
    if not {COUNTED, REAL} <= {*results.finished}:
        return
    if len(pairs := perplexity_costs(results.finished, first)):
        text = [TEXT.format(first=label(first)), costs_table(pairs)]
        yield Section("What counting padding hides", text, figures={"padding": draw_costs(pairs, first)})


def perplexity_costs(results: pd.DataFrame, first: str) -> pd.DataFrame:
    """Return the relative excess of each attention's perplexities over the perplexities of the attention `first`.

    The table has a row for each pair of finished runs with the same settings and seed. Its columns are attention,
    setting, seed, padding (the share of targets that are padding), `COUNTED` (the excess if all targets count) and
    `REAL` (the excess if only targets that are not padding count).
    """
    known = results.dropna(subset=[COUNTED, REAL])
    keys = ["task", "setting", "seed"]
    pairs = known[known.attention != first].merge(known[known.attention == first], on=keys, suffixes=("", " first"))
    excess = {name: pairs[name] / pairs[f"{name} first"] - 1 for name in (COUNTED, REAL)}
    return pd.DataFrame({**pairs[["attention", "setting", "seed"]], "padding": pairs["val/padding"], **excess})


def costs_table(pairs: pd.DataFrame) -> Markdown:
    """Return a table of mean excesses in per cent: a row for each attention, a column for each padding share."""
    pairs = pairs.assign(padding=pairs.padding.round(2))
    shares, rows = sorted(pairs.padding.unique()), []
    for attention, of_attention in pairs.groupby("attention", sort=False):
        cells = []
        for share in shares:
            found = of_attention[of_attention.padding == share]
            both = [f"{100 * found[name].mean():+.1f}" for name in (COUNTED, REAL)]
            cells.append((" / ".join(dict.fromkeys(both)) + f", n = {len(found)}") if len(found) else "–")
        rows.append([Markdown("**{}**").format(label(str(attention))), *cells])
    heads = [f"{share:.0%} padding: all / real" if share else "no padding" for share in shares]
    return markdown_table([["", *heads], *rows])


@rc_context(STYLE)
def draw_costs(pairs: pd.DataFrame, first: str) -> Figure:
    """Plot excess perplexity against the share of padding: filled marks for all targets, empty marks for real ones."""
    figure = Figure(figsize=(WIDTH, 2.6))
    axes = figure.subplots()
    limit_ticks(axes, 5)
    axes.axhline(0, color="0.5", linewidth=0.6)
    chosen = line_styles([first, *pairs.attention])
    names = [name for name in chosen if name != first]
    for place, attention in enumerate(names):
        found = pairs[pairs.attention == attention]
        x = 100 * found.padding + 0.5 * (place - len(names) / 2)  # draws the attentions side by side
        style = chosen[attention]
        axes.vlines(x, 100 * found[COUNTED], 100 * found[REAL], color=style.colour, linewidth=0.8)
        axes.plot(x, 100 * found[COUNTED], **style.mark, markersize=4.5)
        axes.plot(x, 100 * found[REAL], **style.mark, markersize=4.5, markerfacecolor="white")
    axes.set_xlabel("targets that are padding, %")
    axes.set_ylabel(f"perplexity above {label(first)}'s, %")
    keys = [Line2D([], [], **chosen[name].mark, label=label(name)) for name in names]
    for words, inside in (("over all targets", "0.3"), ("over real ones", "white")):
        keys.append(Line2D([], [], color="0.3", marker="o", linestyle="", markerfacecolor=inside, label=words))
    add_legend(figure, keys)
    return figure
