from itertools import pairwise

import pytest

from kvt.training.history import remember

LONGEST = 10_000


@pytest.fixture(params=[1, 7], ids="a row every {}".format)
def long(request):
    """What is left of a run of training with a validation every tenth row, where 100 of each may be left."""
    history = []
    for step in range(request.param, LONGEST, request.param):
        validated = {"val/loss": 0.0} if step % (10 * request.param) == 0 else {}
        remember(history, {"step": step, "train/loss": 0.0} | validated, most=100)
    return history


@pytest.mark.parametrize("kind", ["train/loss", "val/loss"])
def test_each_kind_has_points_all_along_the_run(long, kind):
    steps = [row["step"] for row in long if ("val/loss" in row) == (kind == "val/loss")]
    assert steps == sorted(set(steps))
    assert 50 <= len(steps) <= 101
    assert max(b - a for a, b in pairwise([0, *steps, LONGEST])) <= 4 * LONGEST / 100


def test_the_newest_is_there(long):
    assert long[-1]["step"] > LONGEST - 8


def test_a_row_is_filled_after_it_was_added():
    """Metrics of one step come one after the other: the row before the newest is the last that may be forgotten."""
    history = []
    for step in range(1000):
        remember(history, {"step": step}, most=10)
        history[-1]["train/loss"] = step
    assert all(row["step"] == row["train/loss"] for row in history)


def test_a_short_history_is_left_alone():
    rows = [{"step": step} for step in range(100)]
    history = []
    for row in rows:
        remember(history, row, most=100)
    assert history == rows
