"""Runs that fail, studies that share a folder, and the time that is left."""

import json
import os
from dataclasses import replace
from threading import Thread
from time import sleep

import pytest

from kvt.run.folder import LAST
from kvt.study import runner as studies
from kvt.study import workers as work
from kvt.study.grid import read_grid
from kvt.study.outcomes import State
from kvt.study.runner import ATTEMPTS, Times, execute_runs, make_runs
from kvt.study.workers import Job
from kvt.system import MAX_LINE_CHARS
from tests.helpers.drivers import RESULT, Study, finish, hold
from tests.helpers.in_line import InLine

OWN = """
import os, signal
from kvt.attention import KV

class Deadly(KV):
    def forward(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

class Wrong(KV):
    def forward(self, *args, **kwargs):
        raise RuntimeError("this attention does\\nnot work" + ", at all" * 100_000)
"""


@pytest.fixture
def runs(study):
    return read_grid(study.root / "grids" / "small.yaml").runs


@pytest.fixture
def tried(monkeypatch) -> list[str]:
    """The names of the runs that a study without processes has tried; each fails."""
    tried = []

    def fail(job: Job) -> None:
        tried.append(job.folder.name)
        raise RuntimeError("again")

    monkeypatch.setattr(work, "train_job", fail)
    monkeypatch.setattr(studies, "LocalWorkers", lambda *_: InLine())
    return tried


def test_what_failed_is_tried_again_only_with_retry_failed(study, runs, tried):
    assert make_runs(runs, study.folder) == len(runs) == len(tried)
    assert make_runs(runs, study.folder) == len(runs) == len(tried)
    assert make_runs(runs, study.folder, retry_failed=True) == len(runs)
    assert sorted(tried) == sorted(2 * [run.name for run in runs])


def test_studies_that_begin_together_try_again_once_what_fails_again(study, runs, tried, monkeypatch):
    """The second forgets failures before the first makes its runs, which then are the second's, too."""
    make_runs(runs, study.folder)
    tried.clear()
    failed = []

    class Slow(InLine):
        def __init__(self) -> None:
            super().__init__()
            monkeypatch.setattr(studies, "LocalWorkers", lambda *_: InLine())
            failed.append(make_runs(runs, study.folder, retry_failed=True))

    monkeypatch.setattr(studies, "LocalWorkers", lambda *_: Slow())
    failed.append(make_runs(runs, study.folder, retry_failed=True))
    assert failed == [len(runs)] * 2
    assert sorted(tried) == sorted(run.name for run in runs)


def test_what_another_study_is_making_is_asked_for_again_when_that_ends(study, runs, monkeypatch):
    monkeypatch.setattr(studies, "PAUSE", 0.01)
    monkeypatch.setattr(work, "train_job", lambda job: pytest.fail("it is the other's"))
    finished, left = runs[:2]
    engine, found = InLine(), []
    held = [hold(run.folder(study.folder)) for run in (finished, left)]
    thread = Thread(target=lambda: found.extend(execute_runs([finished, left], study.folder, engine)), daemon=True)
    thread.start()
    sleep(0.3)
    assert not engine.asked
    finish(finished, study.folder)
    monkeypatch.setattr(work, "train_job", lambda job: 1 / 0)
    for end in held:
        end()
    thread.join(10)
    states = {run.name: outcome.state for run, outcome in found}
    assert states == {finished.name: State.FINISHED, left.name: State.FAILED}
    assert engine.asked == {finished.name: 1, left.name: 1}


@pytest.mark.parametrize("checkpoints", [0, 5])
def test_a_run_whose_process_dies_goes_on_while_it_saves_more(study, runs, checkpoints):
    class Deadly(InLine):
        def make(self, job: Job) -> str:
            if (step := self.asked[job.folder.name]) <= checkpoints:
                last = job.folder / LAST
                last.parent.mkdir(parents=True, exist_ok=True)
                last.touch()
                os.utime(last, (step, step))
            return "killed"

    workers, run = Deadly(), runs[0]
    ((ended, outcome),) = execute_runs([run], study.folder, workers)
    assert (ended, outcome.state) == (run, State.FAILED)
    assert outcome.message == f"its process died {ATTEMPTS} times, killed; was the memory full?"
    assert workers.asked == {run.name: max(checkpoints - 1, 0) + ATTEMPTS}


def test_the_time_left_is_estimated_from_the_nearest_size_of_the_task(runs):
    times, (reverse, sort) = Times(), [next(run for run in runs if run.task == task) for task in ("reverse", "sort")]
    wider = replace(reverse, config=reverse.config.changed(dim=32))
    assert times.left(runs, 1) == "unknown time"
    times.add(reverse, RESULT | {"seconds": 60})
    assert times.left([sort], 1) == "about 0:01:00"
    assert times.left([wider], 1) == "about 0:02:00"
    times.add(sort, RESULT | {"seconds": 600})
    assert times.left([reverse, wider, sort], 2) == "about 0:06:30"
    assert times.left([], 1) == "about 0:00:00"


@pytest.fixture
def with_failures(study) -> Study:
    """A study of one good attention and two bad ones, and a run that diverges."""
    (study.root / "own.py").write_text(OWN)
    attentions = ["own.Deadly", "own.Wrong", "kv"]
    study.write_grid({"sort": None, "reverse": {"attn": "kv", "lr": 1e30}}, attn=attentions)
    return study


@pytest.mark.slow
def test_what_fails_or_diverges_is_recorded_and_the_study_goes_on(with_failures, uninterrupted):
    study = with_failures
    printed = study.run(code=1)
    (deadly,) = study.folder.glob("sort/Deadly/*/error.txt")
    (wrong,) = study.folder.glob("sort/Wrong/*/error.txt")
    (good,) = study.folder.glob("sort/kv/*/result.json")
    (diverged,) = study.folder.glob("reverse/kv/*/result.json")
    key = str(good.parent.relative_to(study.folder))
    assert study.results[key] == uninterrupted.results[key]
    error = deadly.read_text()
    assert "exit code -9" in error
    assert f".logs/{deadly.parent.name}.txt" in error
    assert study.log(deadly.parent.name).count("GPU available") == ATTEMPTS
    error, trace = wrong.read_text().split("\n\n", 1)
    assert error == "RuntimeError: this attention does not work" + ", at all" * 100_000
    assert "own.py" in trace
    assert study.log(wrong.parent.name).count("GPU available") == 1
    assert "/loss is nan" in json.loads(diverged.read_text())["diverged"]
    assert not any(name.startswith("test/") for name in json.loads(diverged.read_text()))
    counts = "4 runs: 1 finished, 1 diverged, 2 failed"
    for line in (counts, "failed   sort own.Deadly", "failed   sort own.Wrong", "error: 2 runs failed"):
        assert printed.count(line) == 1, line

    before = study.finished
    printed = study.run(code=1)  # leaves them as they are
    assert "4 runs: 1 finished, 1 diverged, 2 failed" in printed
    assert printed.count("failed before, ") == 2
    assert study.log(deadly.parent.name).count("GPU available") == ATTEMPTS

    own = study.root / "own.py"
    own.write_text(OWN.replace("os.kill(os.getpid(), signal.SIGKILL)", "return super().forward(*args, **kwargs)"))
    printed = study.run("--retry_failed", code=1)
    assert "4 runs: 2 finished, 1 diverged, 1 failed" in printed
    assert "failed   sort own.Wrong" in printed
    assert max(map(len, printed.splitlines())) < MAX_LINE_CHARS + 300
    assert {run: study.finished[run] for run in before} == before


@pytest.mark.slow
def test_two_studies_in_one_folder_share_the_work(study, uninterrupted):
    study.write_grid(attn=["qkv", "kv"])
    drivers = [study.start(), study.start()]
    assert [driver.join() for driver in drivers] == [0, 0], [driver.printed for driver in drivers]
    assert len(study.results) == 4
    assert all(uninterrupted.results[run] == found for run, found in study.results.items())
    for run in study.finished:
        assert study.log(run).count("GPU available") == 1, "each is made once"
