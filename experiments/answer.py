"""Draws docs/answer.svg: the errors of KV and KV+Pos divided by QKV's error, for most rows of the table of answers.

    python experiments/answer.py

The error is 1 − accuracy, or 100 − BLEU for translation. A ratio puts tasks of different difficulty on one scale. A dot
is a pair of runs with the same settings and seed. A bar is the geometric mean with its 95 % interval, computed as in
the reports. In columns that count solved runs, the counts stand in place of the bar. The intervals are not corrected
for their number, so one in twenty may miss the true value.
"""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from claims import REPOSITORY, open_record
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvt.reports.comparisons import NEARLY, by_seed
from kvt.reports.figures import (
    FONT,
    PUBLISHED,
    STYLE,
    WIDTH,
    LineStyle,
    add_legend,
    as_svg,
    limit_ticks,
    line_styles,
)
from kvt.reports.statistics import Comparison, Shares, compare, compare_shares
from kvt.reports.tables import Table
from kvt.system import write_atomically
from kvt.tasks.metrics import Metric

ATTENTIONS = ("kv", "kv+pos")
LEAST = 0.01  # smaller errors count as this error, because an accuracy above 0.99 is at the ceiling
EDGES = (0.4, 4.5)
WORDS = """\
error divided by that of QKV: right of 1 is worse
intervals are not corrected for their number"""
TICKS = (0.4, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 4)


class Row(NamedTuple):
    words: str
    record: str
    metric: str
    column: str


class Line(NamedTuple):
    row: Row
    attention: str
    ratios: "pd.Series[float]"  # one ratio for each pair of runs
    numbers: Comparison  # comparison of the logarithms of errors
    solved: Shares | None  # shown in place of `numbers` in columns that count solved runs
    published: float


ROWS = (
    Row("lists: reverse", "table2-paper", "test/acc", "reverse"),
    Row("lists: sort", "table2-paper", "test/acc", "sort"),
    Row("images, four sets", "table3-laptop", "test/acc", "all images"),
    Row("images: CIFAR-100", "table3-laptop", "test/acc", "cifar100"),
    Row("odd image, the last", "leak-laptop", "test/acc", "always last"),
    Row("odd image, anywhere", "leak-laptop", "test/acc", "anywhere"),
    Row("characters, 1,000 steps", "figure5-text", "val/acc", "64, d 192, 6 layers, 1,000 steps"),
    Row("numbers, lr 1e-3", "figure6-paper", "val/acc", "lr 1e-3"),
    Row("translation, in warm-up", "figure7-laptop", "test/bleu", "both directions"),
)
"""The rows of the picture. Each has one column or pool of a record."""


@rc_context(STYLE)
def draw() -> Figure:
    """Draw the picture: a line for each row and attention."""
    chosen = line_styles(["qkv", *ATTENTIONS])
    found = [line for row in ROWS for line in _lines(row)]
    figure = Figure(figsize=(WIDTH, 0.9 + 0.135 * (len(found) + 0.5 * len(ROWS))))
    axes = figure.subplots()
    limit_ticks(axes, 5)
    axes.grid(visible=False, axis="y")
    axes.axvline(1, color="0.5", linewidth=0.6)
    first: dict[str, float] = {}
    y = 0.0
    for line in found:
        y += 1 if line.row.words in first else 1.5
        first.setdefault(line.row.words, y)
        _draw_line(axes, line, y, chosen[line.attention])
    axes.set_yticks([*first.values()], [*first])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(y + 0.8, 0.6)
    axes.set_xscale("log")
    axes.set_xlim(*EDGES)
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.minorticks_off()
    axes.set_xlabel(WORDS)
    keys = [Line2D([], [], linewidth=1.6, label=chosen[name].label, **chosen[name].line) for name in ATTENTIONS]
    keys.append(Line2D([], [], color="0.3", marker="o", markersize=2, linestyle="", label="pair of runs"))
    keys.append(Line2D([], [], color="0.3", marker="|", linewidth=1.4, label="mean, 95 % interval"))
    add_legend(figure, [*keys, Line2D([], [], **PUBLISHED, label="published")])
    return figure


def _lines(row: Row) -> list[Line]:
    """Return a line for each of `ATTENTIONS` that has runs in the record and column of a row."""
    record = open_record(row.record)
    assert record is not None
    table, found = record.table(row.metric), []
    _, telling = by_seed(record.rows, table, row.column)
    for attention in (name for name in ATTENTIONS if name in telling):
        pairs = telling[[attention, "qkv"]].dropna()
        logs = np.log(_errors(pairs, table.kind))
        setting, seed = (pairs.index.get_level_values(name).to_series() for name in ("setting", "seed"))
        numbers = compare(logs[attention], logs["qkv"], setting, seed)
        is_counted = row.column in table.solved
        ours, first = (pairs[name] >= NEARLY for name in (attention, "qkv"))
        solved = compare_shares(ours, first, setting, seed) if is_counted else None
        published = _published(row, table, attention)
        ratios = np.exp(logs[attention] - logs["qkv"])
        found.append(Line(row, attention, ratios, numbers, solved, published))
    return found


def _errors(values: pd.DataFrame, kind: Metric) -> pd.DataFrame:
    return (1 - values / kind.highest).clip(lower=LEAST)


def _published(row: Row, table: Table, attention: str) -> float:
    values = [table.published.get(name, {}).get(row.column, (np.nan,))[0] for name in (attention, "qkv")]
    ours, first = _errors(pd.DataFrame([values]), table.kind).loc[0]
    return float(ours / first)


def _draw_line(axes: Axes, line: Line, y: float, style: LineStyle) -> None:
    numbers, ratios, solved, colour = line.numbers, line.ratios, line.solved, style.colour
    fill: dict[str, Any] = {"markerfacecolor": "none"} if style.dashes else {}
    for marker, where in (("<", ratios < EDGES[0]), ("o", ratios.between(*EDGES)), (">", ratios > EDGES[1])):
        axes.plot(ratios[where].clip(*EDGES), [y] * where.sum(), marker, color=colour, markersize=2, alpha=0.45, **fill)
    if solved is None:
        axes.plot(np.exp(numbers.interval), [y, y], linewidth=1.4, **style.line)
        axes.plot([np.exp(numbers.difference)], [y], "|", color=colour, markersize=7, markeredgewidth=1.6)
    if np.isfinite(line.published):
        axes.plot([line.published], [y], **PUBLISHED)
    counts = f"solved {solved.solved} against {solved.solved_by_baseline} of " if solved else ""
    words = f" {counts}{numbers.pairs} pairs"
    axes.annotate(words, (1, y), xycoords=("axes fraction", "data"), fontsize=FONT - 1.5, va="center", color="0.35")


if __name__ == "__main__":
    path = REPOSITORY / "docs" / "answer.svg"
    write_atomically(path, as_svg(draw()))
    print(path)
