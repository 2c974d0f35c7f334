"""Studies of many runs: what is shared and asked for only once."""

import pytest
import study as benchmark

from kvt.study import outcomes
from kvt.study.grid import TaskFile
from kvt.study.outcomes import State, read_outcomes
from tests.helpers.drivers import finish


@pytest.fixture
def runs(tmp_path):
    return benchmark.many_runs(tmp_path, 2000)


def test_a_plan_makes_each_setting_once_for_all_seeds_and_shares_what_is_the_same(tmp_path, monkeypatch):
    made, config = [], TaskFile.config
    monkeypatch.setattr(TaskFile, "config", lambda *args: made.append(args) or config(*args))
    runs = benchmark.many_runs(tmp_path, 2000)
    assert len({run.name for run in runs}) == len(runs) == 2000
    assert len(made) == len(runs) / len(benchmark.SEEDS)
    assert len({id(run.config.model) for run in runs}) == len(made)


def test_runs_that_have_not_begun_are_not_asked_for_one_by_one(runs, tmp_path, monkeypatch):
    asked, read = [], outcomes.read_outcome
    monkeypatch.setattr(outcomes, "read_outcome", lambda folder, config: asked.append(folder) or read(folder, config))
    begun = finish(runs[7], tmp_path / "runs")
    found = read_outcomes(runs, tmp_path / "runs")
    assert asked == [begun]
    states = [found[run.name][0].state for run in runs]
    assert states == [State.NEW] * 7 + [State.FINISHED] + [State.NEW] * 1992
