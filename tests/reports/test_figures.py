"""Figures of a study: what is drawn are the means of the tables, in the paper's order and fixed colours."""

import re
from xml.etree import ElementTree

import matplotlib.colors
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PolyCollection
from numpy.testing import assert_allclose

from kvt.reports.figures import COLOURS, as_svg, bars, curves

STEPS = [10, 20, 30]


def run(name, attention, losses, task="sort", steps=STEPS, pace=0.1, metric="val/loss", **others):
    """A run's history; `pace` is in seconds a step."""
    steps = np.asarray(steps)
    about = {"name": name, "task": task, "attention": attention, "seed": 0, "setting": "{}"}
    return pd.DataFrame({**about, "step": steps, "seconds": pace * steps, metric: losses, **others})


def result(attention, setting, value, task="sort", metric="test/acc"):
    return {"task": task, "attention": attention, "setting": setting, metric: value}


def loss_curves(histories, tasks):
    return curves(histories, ("val/loss", "train/loss"), tasks)


def line(figure, attention, panel=0):
    """What is drawn of an attention in a panel, thick: x and y."""
    lines = figure.axes[panel].lines
    (found,) = (one for one in lines if one.get_color() == COLOURS[attention] and one.get_linewidth() > 1)
    return found.get_xdata(), found.get_ydata()


def labels(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def heights(figure):
    return [bar.get_height() for bar in figure.axes[0].patches]


def test_curve_is_the_mean_over_runs_and_its_band_a_deviation_cut_at_zero():
    first, second = np.array([2.0, 1.0, 0.5]), np.array([2.4, 0.2, 0.0])
    figure = loss_curves(pd.concat([run("a", "kv", first), run("b", "kv", second)]), ["sort"])
    mean, deviation = (first + second) / 2, np.std([first, second], axis=0, ddof=1)
    x, y = line(figure, "kv")
    assert_allclose(x, STEPS)
    assert_allclose(y, mean)
    (band,) = (c for c in figure.axes[0].collections if isinstance(c, PolyCollection))
    corners = band.get_paths()[0].vertices
    for step, low, high in zip(STEPS, np.maximum(mean - deviation, 0), mean + deviation, strict=True):
        at = corners[corners[:, 0] == step, 1]
        assert_allclose([at.min(), at.max()], [low, high])
    assert (mean - deviation).min() < 0


def test_training_loss_is_thin_and_dashed_in_the_same_colour():
    figure = loss_curves(run("a", "qkv", [2.0, 1.0, 0.5], **{"train/loss": [2.1, 1.2, 0.9]}), ["sort"])
    thin, thick = sorted(figure.axes[0].lines, key=lambda one: one.get_linewidth())
    assert_allclose(thin.get_ydata(), [2.1, 1.2, 0.9])
    assert thin.get_color() == thick.get_color() == COLOURS["qkv"]
    assert thin.is_dashed()
    assert not thick.is_dashed()


def test_order_is_that_of_the_runs_and_colours_are_those_of_the_names():
    runs = [run(name, name, [2.0, 1.0, 0.5]) for name in ("qkv", "kv+pos", "kv", "kv, kv_heads 1", "q-kv")]
    assert labels(loss_curves(pd.concat(runs), ["sort"]))[:5] == ["QKV", "KV+Pos", "KV", "KV, kv_heads 1", "Q–K=V"]
    alone = loss_curves(runs[2], ["sort"])
    assert_allclose(line(alone, "kv")[1], [2.0, 1.0, 0.5])
    both = [one for one in loss_curves(pd.concat(runs), ["sort"]).axes[0].lines if one.get_color() == COLOURS["kv"]]
    assert sorted(one.is_dashed() for one in both) == [False, True]
    assert loss_curves(runs[3], ["sort"]).axes[0].lines[0].is_dashed()


def test_against_seconds_each_step_stands_at_its_mean_time():
    falling = [3.0, 2.0, 1.0]
    fast, slow = (run(f"{pace}", "kv", falling, pace=pace) for pace in (0.1, 0.3))
    x, y = line(loss_curves(pd.concat([fast, slow]), ["sort"]), "kv", panel=1)
    assert_allclose(x, 0.2 * np.array(STEPS))
    assert_allclose(y, falling)


@pytest.mark.parametrize("panel", [0, 1])
def test_only_what_half_of_the_runs_logged_is_shown(panel):
    runs = [run("a", "kv", [3.0, 2.0, 1.0]), run("b", "kv", [1.0, 1.0, 0.0]), run("c", "kv", [2.0], steps=[10])]
    x, y = line(loss_curves(pd.concat([*runs, run("d", "kv", [2.0, 9.0], steps=[10, 35])]), ["sort"]), "kv", panel)
    assert len(x) == 3
    assert_allclose(y, [2.0, 1.5, 0.5])


def test_what_diverged_or_was_not_logged_is_not_drawn():
    runs = [run("a", "kv", [3.0, np.nan, 1.0]), run("b", "qkv", [np.nan, np.inf, np.nan])]
    figure = loss_curves(pd.concat(runs), ["sort"])
    assert_allclose(line(figure, "kv"), [[10, 30], [3.0, 1.0]])
    assert labels(figure) == ["KV", "validation", "training"]


def test_a_long_history_is_thinned_and_keeps_its_end():
    x, y = line(loss_curves(run("a", "kv", np.linspace(3, 1, 5000), steps=range(5000)), ["sort"]), "kv")
    assert len(x) < 200
    assert (x[-1], y[-1]) == (4999, 1.0)


def test_accuracy_is_cut_at_one():
    runs = [run("a", "kv", [0.1, 0.5, 1], metric="val/acc"), run("b", "kv", [0.9, 1, 1], metric="val/acc")]
    figure = curves(pd.concat(runs), ("val/acc",), ["sort"])
    assert figure.axes[0].get_ylabel() == "validation accuracy"
    assert figure.axes[0].collections[0].get_paths()[0].vertices[:, 1].max() == 1


def test_bars_are_means_over_settings_of_means_over_seeds():
    values = {"small": [0.2, 0.4, 0.6], "large": [1.0]}
    rows = [result("qkv", setting, value) for setting, seeds in values.items() for value in seeds]
    results = pd.DataFrame([*rows, result("kv", "small", 0.5), result("kv", "small", 0.5, task="copy")])
    figure = bars(results, "test/acc", {task: results[results.task == task] for task in ("sort", "copy", "swap")})
    assert_allclose(heights(figure), [0.7, 0.5, 0.5])  # not 0.55, the mean over runs
    colours = [matplotlib.colors.to_hex(bar.get_facecolor()).upper() for bar in figure.axes[0].patches]
    assert colours == [COLOURS["qkv"], COLOURS["kv"], COLOURS["kv"]]
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["sort", "copy"]
    dots = np.concatenate([one.get_ydata() for one in figure.axes[0].lines if one.get_marker() == "o"])
    assert_allclose(np.sort(dots), sorted(results["test/acc"]))


def test_whisker_is_the_deviation_over_settings():
    results = pd.DataFrame([result("kv", "small", 0.3), result("kv", "small", 0.5), result("kv", "large", 0.6)])
    (whisker,) = bars(results, "test/acc", {"sort": results}).axes[0].collections
    deviation = np.std([0.4, 0.6], ddof=1)
    assert_allclose(whisker.get_segments()[0][:, 1], [0.5 - deviation, 0.5 + deviation])


def test_svg_is_well_formed_the_same_every_time_and_has_ids_of_its_own():
    histories = run("a", "kv", [3.0, 2.0, 1.0])
    first, again = (as_svg(loss_curves(histories, ["sort"])) for _ in range(2))
    other = as_svg(loss_curves(run("a", "kv", [3.0, 2.0, 1.5]), ["sort"]))
    assert first == again
    assert ElementTree.fromstring(first).tag.endswith("svg")
    ids, others = (set(re.findall(r'\bid="(.*?)"', svg)) for svg in (first, other))
    assert ids
    assert not ids & others
    assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', first)) <= ids
