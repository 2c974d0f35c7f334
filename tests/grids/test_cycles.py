"""The law of cycles in reports: levels, tables of what was measured, pictures of it."""

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from numpy.testing import assert_allclose

from kvt.attention import cycle_lengths
from kvt.grids.cycles import add_cycles, level, levels, longer_cycles
from kvt.reports.report import measure
from kvt.study.grid import read_grid
from kvt.study.outcomes import Outcome, State
from kvt.tasks.lists import DigitLists, permutation
from tests.helpers.cycles import cycles_of
from tests.reports.test_figures import COLOURS

LENGTH = 16
SIZES = [{"depth": depth, "heads": 1} for depth in (1, 2)]
STEPS = (100, 200, 300)


@pytest.fixture
def grid(tmp_path):
    """Two seeds of two sizes, attentions and lengths of cycles."""
    axes = {"size": SIZES, "attn": ["qkv", "kv"], "cycle": [2, 16], "length": LENGTH}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"tasks": ["permute"], "axes": axes, "seeds": [0, 1]}))
    return read_grid(tmp_path / "own.yaml")


def section(grid, accuracies, course=lambda accuracy, step: accuracy * step / 300):
    """The section of runs with these accuracies."""
    outcomes = {}
    for run, accuracy in zip(grid.runs, accuracies, strict=True):
        history = pd.DataFrame({"step": STEPS, "seconds": STEPS, "val/acc": [course(accuracy, s) for s in STEPS]})
        outcomes[run.name] = [Outcome(State.FINISHED, "", {"test/acc": accuracy}, history)]
    grid, results = measure(grid, outcomes)
    return results, *levels(grid, results)


AT_LEVELS = level(LENGTH, np.arange(16))


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


def test_the_text_counts_what_stands_and_the_tables_have_every_mean_bold_above_the_level(grid):
    between = [*AT_LEVELS]
    between[0] = 0.97  # between two levels
    results, first, second = section(grid, between)
    assert first.text[0].startswith("15 of 16 runs")
    runs = add_cycles(results.runs, grid)
    qkv = runs[(runs.attention == "qkv") & (runs.depth == 1) & (runs.cycle == 2)]["test/acc"]
    line = str(second.text[1]).splitlines()[2]
    assert line.startswith(f"| 2 | 0 | 1.000 | {qkv.mean():.3f} [")
    _, _, above = section(grid, [1.0] * 16)
    text = "".join(above.text)
    assert text.count("| 16 | 1 | 0.944 | **1.000** [1.000, 1.000], n = 2 | **1.000**") == 2
    assert "| 2 | 0 | 1.000 | 1.000 [" in text


def test_steps_are_medians_over_the_runs_of_a_size(grid):
    slow = [0.5 if run.seed and run.value("cycle") == 2 else 1.0 for run in grid.runs]
    *_, tables = section(grid, slow, lambda accuracy, step: accuracy if step > 100 else 0.5)
    assert str(tables.text[-1]).splitlines()[2] == "| QKV | 200 (3 of 4) | 200 (3 of 4) |"


def test_pictures_show_every_run(grid):
    results, first, _ = section(grid, AT_LEVELS)
    runs = add_cycles(results.runs, grid)
    for axes, depth in zip(first.figures["levels"].axes, (1, 2), strict=True):
        (marks,) = (line for line in axes.lines if line.get_color() == COLOURS["kv"])
        assert_allclose(marks.get_ydata(), runs[(runs.depth == depth) & (runs.attention == "kv")]["test/acc"])
    courses = [line for axes in first.figures["ladder"].axes for line in axes.lines if len(line.get_xdata()) == 3]
    assert len(courses) == 8  # of the smallest size
    assert {line.get_ydata()[-1] for line in courses} == {*runs[runs.depth == 1]["test/acc"]}


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
