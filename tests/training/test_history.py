from itertools import pairwise

import pytest

from kvt.training import recorder
from kvt.training.recorder import Recorder

STEPS = 10_000


@pytest.mark.parametrize("interval", [1, 7])
def test_each_kind_of_row_is_kept_all_along_the_run(interval, monkeypatch):
    """Every tenth row is of a validation."""
    monkeypatch.setattr(recorder, "MAX_ROWS", 200)
    history = Recorder()
    for step in range(interval, STEPS, interval):
        history.add("val/loss" if step % (10 * interval) == 0 else "train/loss", float(step), step)
        assert len(history.rows) <= 200
        assert history.rows[-1]["step"] == step
    for name in ("train/loss", "val/loss"):
        rows = [row for row in history.rows if name in row]
        steps = [row["step"] for row in rows]
        assert [row[name] for row in rows] == steps == sorted(set(steps))
        assert max(b - a for a, b in pairwise([0, *steps, STEPS])) <= STEPS / 10


def test_a_short_history_is_whole():
    history = Recorder()
    for step in range(1000):
        history.add("train/loss", 0.0, step)
        history.add("train/acc", 1.0, step)
    assert [row["step"] for row in history.rows] == [*range(1000)]
    assert all("train/loss" in row and "train/acc" in row for row in history.rows)
