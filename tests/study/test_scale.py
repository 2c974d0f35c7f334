"""Studies of many runs: what is shared and asked for only once, and a simulated cluster whose workers die."""

from pathlib import Path

import pandas as pd
import pytest
import study as benchmark

from kvt.study import outcomes
from kvt.study.grid import TaskFile, read_grid
from kvt.study.outcomes import Outcome, State, read_outcomes, table_of_histories
from kvt.study.workers import ATTEMPTS, Deaths
from tests.helpers.drivers import finish

OPERATIONS = benchmark.Operations(run=40, checkpoint=5)
MINUTE, CHECKPOINTS = 60, 10


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


def test_histories_are_stacked_as_pandas_concatenates_them(tmp_path):
    benchmark.many_runs(tmp_path, 1)
    grid = read_grid(tmp_path / "many.yaml")
    columns = (["step", "seconds", "val/loss"], ["seconds", "step", "train/loss"], ["step", "seconds"])
    histories = [pd.DataFrame([[n, 2.0 * n, 3.0 * n][: len(names)]] * n, columns=names) for n, names in
                 zip((1, 2, 3), columns, strict=True)]  # fmt: skip
    found = {
        run.name: [Outcome(State.FINISHED, history=history)] for run, history in zip(grid.runs, histories, strict=False)
    }
    stacked = table_of_histories(grid, found)
    expected = pd.concat(histories, ignore_index=True).astype(float)
    pd.testing.assert_frame_equal(stacked[[*expected]], expected)
    names = [run.name for run, history in zip(grid.runs, histories, strict=False) for _ in range(len(history))]
    assert [*stacked.name] == names


def simulated(runs, deaths):
    cluster = benchmark.Cluster(100, 10 * MINUTE, CHECKPOINTS, deaths / 100 / MINUTE, OPERATIONS)
    return cluster, benchmark.simulate(runs, cluster)


def test_without_deaths_nothing_is_lost_and_each_run_is_made_once(runs):
    cluster, states = simulated(runs, deaths=0)
    assert states == {State.FINISHED: len(runs)}
    assert set(cluster.finished.values()) == {1}
    assert cluster.lost == 0
    assert cluster.asked.total() == len(runs) * (OPERATIONS.run + CHECKPOINTS * OPERATIONS.checkpoint)


def test_with_deaths_every_run_finishes_once_and_less_than_a_checkpoint_is_lost_each_time(runs):
    cluster, states = simulated(runs, deaths=1)
    assert states == {State.FINISHED: len(runs)}
    assert set(cluster.finished.values()) == {1}
    assert 0 < cluster.lost < cluster.died.total() * 10 * MINUTE / CHECKPOINTS
    assert cluster.died.total() == pytest.approx(0.01 * 10 * len(runs), rel=0.3)


def test_a_run_fails_when_its_process_dies_repeatedly_without_saving_more():
    stuck, moving = Deaths(), Deaths()
    assert [stuck.are_enough("run", 1) for _ in range(ATTEMPTS)] == [False] * (ATTEMPTS - 1) + [True]
    assert not any(moving.are_enough("run", saved) for saved in range(10 * ATTEMPTS))


def test_a_run_that_another_death_concerns_has_all_its_attempts():
    deaths = Deaths()
    assert not any(deaths.are_enough(str(Path("runs") / str(n)), 0) for n in range(10 * ATTEMPTS))
