"""A study whose runs are trained together finds what it finds alone."""

import json
from collections.abc import Mapping

import pytest

from kvt.study.grid import read_grid
from kvt.study.study import fleets, work_off
from kvt.study.work import Job, State, execute
from tests.conftest import CONFIGS, SMALL_LISTS


class InLine:
    """An engine that makes a job, or a fleet, when it is waited for."""

    workers = 1

    def __init__(self) -> None:
        self.job: Job | None = None
        self.sizes: list[int] = []

    @property
    def room(self) -> bool:
        return self.job is None

    @property
    def busy(self) -> bool:
        return self.job is not None

    def submit(self, job: Job) -> None:
        self.job = job
        self.sizes.append(1 + len(job.others))

    def wait(self, seconds: float | None = None):
        job, self.job = self.job, None
        return job, execute(job)


@pytest.fixture
def grid(in_tmp_dir):
    """Writes a grid of small runs in float64, and reads it."""

    def write(axes: Mapping[str, object], tasks: tuple[str, ...] = ("sort", "copy")):
        small = {
            name.removeprefix("--"): int(value) for name, value in zip(SMALL_LISTS[::2], SMALL_LISTS[1::2], strict=True)
        }
        common = {"precision": "64-true", "accelerator": "cpu", "max_epochs": 2, "depth": 1, "heads": 2}
        path = in_tmp_dir / "grid.yaml"
        files = [str(CONFIGS / f"{task}.yaml") for task in tasks]
        content = {"tasks": files, "axes": {**common, **small, **axes}, "seeds": [0, 1], "scales": {"laptop": None}}
        path.write_text(json.dumps(content))
        return read_grid(path, "laptop").runs

    return write


def results(runs, root) -> dict[str, dict[str, float]]:
    found = {}
    for run in runs:
        whole = json.loads((run.folder(root) / "result.json").read_text())
        found[run.name] = {name: value for name, value in whole.items() if "/" in name}
    return found


def test_same_results_in_the_same_places(grid, in_tmp_dir):
    runs = grid({"attn": ["kv", "qkv"], "lr": [1e-3, 1e-2]})
    alone, together = InLine(), InLine()
    for engine, size in ((alone, 1), (together, 3)):
        outcomes = [*work_off(runs, in_tmp_dir / str(size), "", engine, fleet=size)]
        assert {run.name for run, _ in outcomes} == {run.name for run in runs}
        assert all(outcome.state == State.FINISHED for _, outcome in outcomes)
    assert alone.sizes == [1] * 16
    assert sorted(together.sizes) == [2, 2, 3, 3, 3, 3]
    found = results(runs, in_tmp_dir / "3")
    for name, result in results(runs, in_tmp_dir / "1").items():
        assert found[name] == pytest.approx(result, rel=1e-6)
    assert not [*(in_tmp_dir / "3").rglob("last.ckpt")]


def test_a_fleet_that_fails_is_made_run_by_run(grid, in_tmp_dir, monkeypatch):
    """The run at fault records its error, the others are finished."""
    runs = grid({"attn": "kv", "lr": [1e-3, -1.0]}, tasks=("sort",))
    engine = InLine()
    states = {run.value("lr"): [] for run in runs}
    for run, outcome in work_off(runs, in_tmp_dir, "", engine, fleet=4):
        states[run.value("lr")].append(outcome.state)
    assert states == {1e-3: [State.FINISHED] * 2, -1.0: [State.FAILED] * 2}
    assert engine.sizes[0] == 4


def test_what_does_not_go_together_is_not_put_together(grid, tmp_path):
    runs = grid({"attn": ["kv", "qkv"], "dim": [16, 32]})
    jobs = [Job(run.config, run.folder(tmp_path), "") for run in runs]
    assert fleets(jobs, 1) == jobs
    for job in fleets(jobs, 9):
        members = [job, *job.others]
        assert len({repr(one.config["model"]) for one in members}) == 1
        assert len(members) == 4  # two tasks, two seeds
