"""Figures of a study: what is drawn are the means of the tables, in the paper's order and fixed colours."""

import re
from xml.etree import ElementTree

import matplotlib.colors
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PolyCollection
from numpy.testing import assert_allclose

from kvt.attention import ATTENTION
from kvt.reports.figures import as_svg, bars, curves, line_styles
from kvt.reports.tables import Table, in_words, label, metric_of
from kvt.study.outcomes import State

STEPS = [10, 20, 30]

COLOURS = {name: cls.colour for name, cls in ATTENTION.items()}


def run(name, attention, losses, task="sort", steps=STEPS, pace=0.1, metric="val/loss", **others):
    """A run's history; `pace` is in seconds a step."""
    steps = np.asarray(steps)
    about = {"name": name, "task": task, "attention": attention, "seed": 0, "setting": "{}"}
    return pd.DataFrame({**about, "step": steps, "seconds": pace * steps, metric: losses, **others})


def loss_curves(histories):
    return curves(histories, ("val/loss", "train/loss"), metric_of("val/loss"))


def line(figure, attention, panel=0):
    """What is drawn of an attention in a panel, thick: x and y."""
    lines = figure.axes[panel].lines
    (found,) = (one for one in lines if one.get_color() == COLOURS[attention] and one.get_linewidth() > 1)
    return found.get_xdata(), found.get_ydata()


def labels(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize(
    ("metric", "first", "second"),
    [("val/loss", [2.0, 1.0, 0.5], [2.4, 0.2, 0.0]), ("val/acc", [0.1, 0.5, 1], [0.9, 1, 1])],
)
def test_curve_is_the_mean_over_runs_and_its_band_a_deviation_cut_at_the_limits(metric, first, second):
    runs = [run("a", "kv", first, metric=metric), run("b", "kv", second, metric=metric)]
    figure = curves(pd.concat(runs), (metric,), metric_of(metric))
    mean, deviation = np.mean([first, second], axis=0), np.std([first, second], axis=0, ddof=1)
    x, y = line(figure, "kv")
    assert_allclose(x, STEPS)
    assert_allclose(y, mean)
    assert figure.axes[0].get_ylabel() == in_words(metric)
    (band,) = (c for c in figure.axes[0].collections if isinstance(c, PolyCollection))
    corners = band.get_paths()[0].vertices
    lows, highs = np.maximum(mean - deviation, 0), np.minimum(mean + deviation, metric_of(metric).highest)
    assert np.any([lows > mean - deviation, highs < mean + deviation])
    for step, low, high in zip(STEPS, lows, highs, strict=True):
        at = corners[corners[:, 0] == step, 1]
        assert_allclose([at.min(), at.max()], [low, high])


def test_order_is_that_of_the_runs_and_colours_are_those_of_the_names():
    runs = [run(name, name, [2.0, 1.0, 0.5]) for name in ("qkv", "kv+pos", "kv", "kv, kv_heads 1", "q-kv")]
    assert labels(loss_curves(pd.concat(runs)))[:5] == ["QKV", "KV+Pos", "KV", "KV, kv_heads 1", "Q≠K=V"]
    alone = loss_curves(runs[2])
    assert_allclose(line(alone, "kv")[1], [2.0, 1.0, 0.5])
    both = [one for one in loss_curves(pd.concat(runs)).axes[0].lines if one.get_color() == COLOURS["kv"]]
    assert sorted(one.is_dashed() for one in both) == [False, True]


def test_names_and_colours_differ_and_no_name_has_a_dash_which_readers_take_for_a_minus():
    assert not [text for text in {label(name) for name in ATTENTION} if set(text) & set("-–—−")]
    assert len({label(name) for name in ATTENTION}) == len({*COLOURS.values()}) == len(ATTENTION)


def test_attentions_of_a_user_have_colours_of_their_own():
    names = ["a.First", "a.Second", "a.First, slope 2", "kv"]
    styles = [line_styles(names)[name] for name in names]
    first, second, again, kv = (style.colour for style in styles)
    assert len({first, second, kv}) == 3
    assert again == first
    assert styles[0].dashes != styles[2].dashes


def test_against_seconds_each_step_stands_at_its_mean_time():
    falling = [3.0, 2.0, 1.0]
    fast, slow = (run(f"{pace}", "kv", falling, pace=pace) for pace in (0.1, 0.3))
    x, y = line(loss_curves(pd.concat([fast, slow])), "kv", panel=1)
    assert_allclose(x, 0.2 * np.array(STEPS))
    assert_allclose(y, falling)


@pytest.mark.parametrize("panel", [0, 1])
def test_only_what_half_of_the_runs_logged_is_shown(panel):
    runs = [run(name, "kv", [3.0, 2.0, 1.0]) for name in "abc"]
    x, y = line(loss_curves(pd.concat([*runs, run("d", "kv", [3.0, 9.0, 1.0], steps=[10, 25, 30])])), "kv", panel)
    assert len(x) == 3
    assert_allclose(y, [3.0, 2.25, 1.0])


def test_a_run_that_has_ended_keeps_its_last_value():
    """Runs that stop when they have solved a task leave those that do not, whose mean alone would fall, and go back."""
    runs = [run("a", "kv", [0.1], steps=[10]), run("b", "kv", [0.2], steps=[10], pace=0.3), run("c", "kv", [3, 3, 3])]
    for panel in (0, 1):
        x, y = line(loss_curves(pd.concat(runs)), "kv", panel)
        assert_allclose(y, [1.1, 1.1, 1.1])
        assert (np.diff(x) > 0).all()


def test_what_diverged_or_was_not_logged_is_not_drawn():
    runs = [run("a", "kv", [3.0, np.nan, 1.0]), run("b", "qkv", [np.nan, np.inf, np.nan])]
    figure = loss_curves(pd.concat(runs))
    assert_allclose(line(figure, "kv"), [[10, 30], [3.0, 1.0]])
    assert labels(figure) == ["KV", "validation", "training"]


def test_a_long_history_is_thinned_and_keeps_its_end():
    x, y = line(loss_curves(run("a", "kv", np.linspace(3, 1, 5000), steps=range(5000))), "kv")
    assert len(x) < 200
    assert (x[-1], y[-1]) == (4999, 1.0)


def test_bars_are_means_over_settings_of_means_over_seeds_and_whiskers_their_deviation():
    cells = [("qkv", "sort", "small", value) for value in (0.2, 0.4, 0.6)] + [("qkv", "sort", "large", 1.0)]
    cells += [("kv", task, "small", 0.5) for task in ("sort", "copy")]
    results = pd.DataFrame(cells, columns=["attention", "task", "setting", "test/acc"])
    results = results.assign(name=results.index.map(str), state=State.FINISHED)
    columns = {task: frozenset(results.name[results.task == task]) for task in ("sort", "copy", "swap")}
    axes = bars(results, Table("test/acc", metric_of("test/acc"), columns, {}, {}, "")).axes[0]
    assert_allclose([bar.get_height() for bar in axes.patches], [0.7, 0.5, 0.5])  # not 0.55, the mean over runs
    colours = [matplotlib.colors.to_hex(bar.get_facecolor()).upper() for bar in axes.patches]
    assert colours == [COLOURS["qkv"], COLOURS["kv"], COLOURS["kv"]]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["sort", "copy"]
    dots = np.concatenate([one.get_ydata() for one in axes.lines if one.get_marker() == "o"])
    assert_allclose(np.sort(dots), sorted(results["test/acc"]))
    (whisker,) = axes.collections
    assert_allclose(whisker.get_segments()[0][:, 1], [0.7 - np.std([0.4, 1], ddof=1), 1])


def test_svg_is_well_formed_the_same_every_time_and_has_ids_of_its_own():
    histories = run("a", "kv", [3.0, 2.0, 1.0])
    first, again = (as_svg(loss_curves(histories)) for _ in range(2))
    other = as_svg(loss_curves(run("a", "kv", [3.0, 2.0, 1.5])))
    assert first == again
    assert ElementTree.fromstring(first).tag.endswith("svg")
    ids, others = (set(re.findall(r'\bid="(.*?)"', svg)) for svg in (first, other))
    assert ids
    assert not ids & others
    assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', first)) <= ids
