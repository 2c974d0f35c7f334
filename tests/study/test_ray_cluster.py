"""Studies on a Ray cluster."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvt.run.checkpoint_files import HPARAMS
from kvt.run.run_dir import last_checkpoint
from kvt.study.job import Job
from kvt.study.outcomes import State
from kvt.study.workers import ATTEMPTS, RayCluster
from kvt.system.console import run
from kvt.system.errors import UserError
from tests.helpers.drivers import CONFIG, Study, alive, children, until


def test_without_ray_the_package_is_named(mistake, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert 'a package is missing: pip install "kvt[ray]"' in mistake(lambda: run(lambda: RayCluster("auto")))


@pytest.mark.slow
@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere"])
def test_no_cluster_is_a_mistake(study, address):
    pytest.importorskip("ray")
    (error,) = [line for line in study.run("--ray", address, code=2).splitlines() if "so far" not in line][1:]
    assert error.startswith(f"error: --ray {address}: cannot connect")


class RayError(Exception):
    pass


class LocalRayletDiedError(RayError):
    pass


class DeadlyRay:
    """Stands for Ray: every task dies."""

    exceptions = SimpleNamespace(RayError=RayError, LocalRayletDiedError=LocalRayletDiedError)

    def init(self, **_: object) -> None:
        pass

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}

    def remote(self, **_: object) -> None:
        pass

    def wait(self, tasks, timeout):
        return tasks[:1], []

    def get(self, _):
        raise RayError("the worker died")


@pytest.mark.parametrize("checkpoints", [0, 5])
def test_a_run_whose_workers_die_goes_on_while_it_saves_more(tmp_path, monkeypatch, checkpoints):
    job = Job(CONFIG, tmp_path / "sort" / "kv" / "run", "")
    last = last_checkpoint(job.folder)
    begun = []

    def begin(given: Job) -> object:
        begun.append(given)
        if len(begun) <= checkpoints:
            last.parent.mkdir(parents=True, exist_ok=True)
            empty = {key: {} for key in ("state_dict", *HPARAMS.values())}
            torch.save({**empty, "epoch": 0, "global_step": len(begun)}, last)
        return object()

    ray = DeadlyRay()
    monkeypatch.setattr(ray, "remote", lambda **_: lambda _: SimpleNamespace(remote=begin))
    monkeypatch.setitem(sys.modules, "ray", ray)
    engine = RayCluster("auto")
    engine.submit(job)
    ended, outcome = engine.wait()
    assert ended is job
    assert outcome.state == State.FAILED
    assert "the worker died" in outcome.message
    assert len(begun) == max(checkpoints - 1, 0) + ATTEMPTS
    assert not engine.busy


@pytest.fixture
def cluster():
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    Path("/tmp/ray").mkdir(exist_ok=True)
    cluster = Cluster(initialize_head=True, head_node_args=MACHINE)
    yield cluster
    cluster.shutdown()


MACHINE = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False}


@pytest.mark.slow
def test_runs_go_on_when_a_machine_dies_and_none_fails_when_the_cluster_does(cluster, study, uninterrupted):
    machine = cluster.add_node(**MACHINE)
    raylet = machine.all_processes["raylet"][0].process.pid
    study.write_grid(tasks=["sort"])
    driver = study.start("--ray", cluster.address)
    until(lambda: under_way(study, raylet))
    worker, run = under_way(study, raylet).popitem()
    cluster.remove_node(machine, allow_graceful=False)
    until(lambda: not alive(worker), seconds=30)
    assert not (run / "result.json").exists()
    assert driver.join() == 0, driver.printed
    assert study.results == {run: found for run, found in uninterrupted.results.items() if run.startswith("sort")}

    engine = RayCluster(cluster.address)
    job = Job({}, study.folder / "sort" / "kv" / "other", "")
    assert engine.room
    engine.submit(job)
    assert engine.busy
    assert engine.wait(seconds=0) is None
    cluster.head_node.kill_raylet()
    with pytest.raises(UserError, match="lost the Ray cluster"):
        engine.wait()
    engine.close()
    assert not job.folder.exists()


def under_way(study: Study, raylet: int) -> dict[int, Path]:
    """The processes of one machine of the cluster that train, and the folders of their runs."""
    begun = {pid: file.parent for pid in children(raylet) for file in study.folder.glob(f"*/*/*/events*.{pid}.0")}
    return {
        pid: run for pid, run in begun.items() if (run / "checkpoints").exists() and not (run / "result.json").exists()
    }
