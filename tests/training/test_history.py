from itertools import pairwise

import pytest

from kvt.training.history import remember

STEPS = 10_000


@pytest.mark.parametrize("interval", [1, 7])
def test_each_kind_of_row_is_kept_all_along_the_run(interval):
    """Every tenth row has a validation; 100 of each kind are kept."""
    history = []
    for step in range(interval, STEPS, interval):
        validated = {"val/loss": 0.0} if step % (10 * interval) == 0 else {}
        remember(history, {"step": step, "train/loss": 0.0} | validated, most=100)
    assert history[-1]["step"] > STEPS - 8
    for validated in (False, True):
        steps = [row["step"] for row in history if ("val/loss" in row) == validated]
        assert steps == sorted(set(steps))
        assert 50 <= len(steps) <= 101
        assert max(b - a for a, b in pairwise([0, *steps, STEPS])) <= 4 * STEPS / 100


@pytest.mark.parametrize(("steps", "kept"), [(100, 100), (1000, 10)])
def test_a_row_is_filled_after_it_was_added_and_a_short_history_is_whole(steps, kept):
    """Metrics of one step come one after the other: the row before the newest is the last that may be removed."""
    history = []
    for step in range(steps):
        remember(history, {"step": step}, most=kept)
        history[-1]["train/loss"] = step
    assert all(row["step"] == row["train/loss"] for row in history)
    assert len(history) == steps if steps <= kept else len(history) < 2 * kept
