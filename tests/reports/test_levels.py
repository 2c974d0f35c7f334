"""The law of cycles in reports: levels, tables of what was measured, pictures of it."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.testing import assert_allclose

from kvt.attention import cycle_lengths
from kvt.reports.levels import add_cycles, describe_levels, draw_ladder, draw_levels, level, longer_cycles
from kvt.study.grid import read_grid
from kvt.tasks.synthetic import DigitLists, permutation
from tests.helpers.cycles import cycles_of
from tests.reports.test_figures import COLOURS

LENGTH = 16


@pytest.fixture
def measured():
    """Two seeds of two sizes, attentions and lengths of cycles, at 1 − 0.9 · b / 16 for b = 0, 1, …"""
    cells = product((1, 2), ("qkv", "kv"), (2, 16), (0, 1))
    results = pd.DataFrame(cells, columns=["depth", "attention", "cycle", "seed"]).assign(heads=1)
    results["name"] = "run" + results.index.astype(str)
    results["test/acc"] = level(LENGTH, results.index)
    courses = results[["name", "test/acc"]].merge(pd.DataFrame({"step": [100, 200, 300]}), how="cross")
    courses["val/acc"] = courses.pop("test/acc") * courses.step / 300
    return results, courses


@pytest.mark.parametrize("cycle", range(1, LENGTH + 1))
def test_the_level_is_the_accuracy_if_one_token_of_each_longer_cycle_guesses(cycle):
    rng = np.random.default_rng(0)
    successor = permutation(LENGTH, cycle, seed=0)
    digits = rng.integers(10, size=(40_000, LENGTH))
    guesses = digits[:, successor]
    for tokens in cycles_of(successor):
        if len(tokens) > 2:
            guesses[:, tokens[0]] = rng.integers(10, size=len(guesses))
    accuracy = (guesses == digits[:, successor]).mean()
    assert_allclose(accuracy, level(LENGTH, longer_cycles(LENGTH, cycle)), atol=0.003)


def test_the_text_counts_what_stands_and_the_tables_have_every_mean_bold_above_the_level(measured):
    results, histories = measured
    results.loc[0, "test/acc"] = 0.97  # between two levels
    finding, _, *tables = describe_levels(results, histories, LENGTH)
    assert finding.startswith("15 of 16 runs")
    first = str(tables[1]).splitlines()
    assert first[2].startswith("| 2 | 0 | 1.000 | 0.957 [0.790, 1.000], n = 2 | 0.747 [")
    assert first[3].startswith("| 16 | 1 | 0.944 | 0.859 [")
    above = "".join(describe_levels(results.assign(**{"test/acc": 1.0}), histories, LENGTH))
    assert above.count("| 16 | 1 | 0.944 | **1.000** [1.000, 1.000], n = 2 | **1.000**") == 2
    assert "| 2 | 0 | 1.000 | 1.000 [" in above


def test_steps_are_medians_over_the_runs_of_a_size(measured):
    results, histories = measured
    histories["val/acc"] = [1.0 if n % 4 < 3 and s > 100 else 0.5 for n in range(16) for s in (100, 200, 300)]
    *_, steps = describe_levels(results, histories, LENGTH)
    assert str(steps).splitlines()[2] == "| QKV | 200 (3 of 4) | 200 (3 of 4) |"


def test_pictures_show_every_run(measured):
    results, histories = measured
    levels = draw_levels(results, LENGTH)
    for axes, depth in zip(levels.axes, (1, 2), strict=True):
        (marks,) = (line for line in axes.lines if line.get_color() == COLOURS["kv"])
        runs = results[(results.depth == depth) & (results.attention == "kv")]
        assert_allclose(marks.get_ydata(), runs["test/acc"])
    ladder = draw_ladder(histories, results, LENGTH)
    courses = [line for axes in ladder.axes for line in axes.lines if len(line.get_xdata()) == 3]
    assert len(courses) == 8  # of the smallest size
    assert_allclose(courses[0].get_ydata(), histories[histories.name == "run0"]["val/acc"])
    assert draw_ladder(histories.drop(columns="val/acc"), results, LENGTH) is None
    long = pd.DataFrame({"name": "run0", "step": range(150), "val/acc": np.linspace(0, 1, 150)})
    lines = [line.get_xydata() for axes in draw_ladder(long, results, LENGTH).axes for line in axes.lines]
    assert max(lines, key=len)[-1].tolist() == [149, 1]


@pytest.mark.parametrize(("name", "cycles"), [("cycles", {1, 2, 3, 4, 8, 16}), ("shift", {2, 4, 8, 16})])
def test_the_cycles_of_a_run_are_those_of_its_data(name, cycles):
    grid = read_grid(name)
    results = add_cycles(pd.DataFrame({"name": [run.name for run in grid.runs]}), grid)
    assert set(results.cycle) == cycles
    for run, cycle, heads in zip(grid.runs, results.cycle, results.heads, strict=True):
        data = DigitLists(**run.config.data["init_args"])
        successor = data.permutation if data.task_name == "permute" else data.targets(torch.arange(LENGTH))
        assert set(cycle_lengths(successor)) - {1} == {cycle} - {1}
        assert heads == run.config.model["init_args"]["heads"]
