"""How many runs there are at once on a GPU follows from the memory of the first; here the GPU is a number."""

import os
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch

from kvt.study import runner, workers
from kvt.study.grid import read_grid
from kvt.study.job import Job
from kvt.study.outcomes import Outcome, State
from kvt.study.workers import LocalWorkers, LostProcessError, runs_at_once, share_of_gpu
from tests.helpers.drivers import CONFIG, until

CORES = 5


@pytest.fixture
def machine(monkeypatch):
    """A machine with some cores and a GPU, whose processes are forked from this one; `machine(share)`, of a run."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(workers, "cores", lambda: [*os.sched_getaffinity(0)][:1] * CORES)
    monkeypatch.setattr(workers, "context_of_workers", lambda: get_context("fork"))
    monkeypatch.setattr(workers, "execute", count)
    return lambda share: monkeypatch.setattr(workers, "share_of_gpu", lambda: share)


def count(job: Job) -> Outcome:
    """Stands in for a run; its message says how many there were at once, for which it waits a while."""
    begun = job.folder.parents[2] / f"begun-{job.folder.name}"
    begun.touch()
    at_once, ends = 0, monotonic() + 2
    while monotonic() < ends and at_once < int(job.data_dir):
        sleep(0.1)
        at_once = max(at_once, len([*begun.parent.glob("begun-*")]))
    sleep(0.2)  # in which others may see it
    begun.unlink()
    return Outcome(State.FAILED if job.folder.name.startswith("failing") else State.FINISHED, str(at_once))


def at_once(folder: Path, engine: LocalWorkers, names: Sequence[str], most: int) -> list[int]:
    jobs = [Job(CONFIG, folder / "sort" / "kv" / name, str(most + 1)) for name in names]
    with closing(engine), ThreadPoolExecutor(engine.threads) as threads:
        return [int(outcome.message) for outcome in threads.map(engine.make, jobs)]


NAMES = [f"run{number}" for number in range(9)]


@pytest.mark.parametrize(("share", "fitting"), [(0.4, 2), (0.01, CORES), (0.95, 1)])
def test_the_first_run_is_alone_and_then_there_are_as_many_as_fit(machine, tmp_path, capsys, share, fitting):
    machine(share)
    engine = LocalWorkers(None)
    counts = at_once(tmp_path, engine, NAMES[: fitting + 1], fitting)
    assert counts.count(1) >= 1
    assert max(counts) == fitting == engine.workers
    told = (
        f"{fitting} at once from now on: the first run took {share:.1%} of the memory of its GPU, and there are 5 cores"
    )
    assert capsys.readouterr().err.strip() == told


def test_a_run_that_fails_measures_nothing(machine, tmp_path):
    machine(0.01)
    counts = at_once(tmp_path, LocalWorkers(None), ["failing1", "failing2"], 1)
    assert counts == [1, 1]


def test_a_number_that_is_given_is_the_number(machine, tmp_path, capsys):
    machine(0.9)
    assert max(at_once(tmp_path, LocalWorkers(3), NAMES[:4], 3)) == 3
    assert not capsys.readouterr().err


def test_threads_that_wait_for_the_first_run_end_with_the_study(machine, tmp_path):
    machine(0.01)
    engine = LocalWorkers(None)
    threads = ThreadPoolExecutor(3)
    jobs = [threads.submit(engine.make, Job(CONFIG, tmp_path / "sort" / "kv" / name, "9")) for name in NAMES[:3]]
    until(lambda: [*tmp_path.glob("begun-*")])
    engine.close()
    errors = [type(job.exception(10)) for job in jobs]
    assert sorted(errors, key=str) == [CancelledError, CancelledError, LostProcessError]


def test_a_process_without_a_gpu_takes_none_of_its_memory(machine):
    assert share_of_gpu() == 0
    assert runs_at_once(0) == CORES


def test_the_share_is_the_most_that_was_held(monkeypatch):
    sizes = {"mem_get_info": (40, 100), "max_memory_reserved": 30, "memory_reserved": 20, "is_initialized": True}
    for name, size in sizes.items():
        monkeypatch.setattr(torch.cuda, name, lambda size=size: size)
    assert share_of_gpu() == 0.7


@pytest.mark.parametrize(("gpus", "mps", "asked"), [(0, False, CORES), (1, True, CORES), (1, False, None)])
def test_only_a_gpu_without_mps_is_measured(monkeypatch, study, gpus, mps, asked):
    wanted = []

    def engine(workers, mps):
        wanted.append(workers)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(runner, "cores", lambda: [*range(CORES)])
    monkeypatch.setattr(runner, "LocalWorkers", engine)
    grid = read_grid(study.root / "grids" / "small.yaml").runs
    with pytest.raises(KeyboardInterrupt):
        runner.make_runs(grid, study.folder, mps=mps)
    assert wanted == [asked]
