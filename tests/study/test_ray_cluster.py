"""Studies on a Ray cluster."""

from contextlib import suppress
from pathlib import Path

import pytest

from kvt.run.folder import LOCK
from kvt.study.workers import Job, RayCluster
from kvt.system import UserError
from tests.helpers.drivers import Study, alive, children, until


@pytest.mark.slow
@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere"])
def test_no_cluster_is_a_mistake(study, address):
    pytest.importorskip("ray")
    (error,) = [line for line in study.run("--ray", address, code=2).splitlines() if "so far" not in line][1:]
    assert error.startswith(f"error: --ray {address}: cannot connect")


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
    until(lambda: under_way(study, raylet), seconds=400)  # a busy machine starts Ray and torch in minutes
    worker, run = under_way(study, raylet).popitem()
    cluster.remove_node(machine, allow_graceful=False)
    until(lambda: not alive(worker), seconds=30)
    assert not (run / "result.json").exists()
    assert driver.join() == 0, driver.printed
    assert study.results == {run: found for run, found in uninterrupted.results.items() if run.startswith("sort")}

    workers, folder = RayCluster(cluster.address), study.folder / "sort" / "kv" / "other"
    cluster.head_node.kill_raylet()
    workers.start(Job({}, folder, ""))
    with pytest.raises(UserError, match="lost the cluster"):
        [*workers.wait(60)]
    workers.close()
    assert not folder.exists()


def under_way(study: Study, raylet: int) -> dict[int, Path]:
    """Return the processes of one machine of the cluster that train, and the folders of their runs.

    A process that makes a run has the run's lock open. The run trains from its first checkpoint to its result.
    """
    saved = {path.parent for path in study.folder.glob("*/*/*/checkpoints")}
    training = [run for run in saved if not (run / "result.json").exists()]
    return {pid: run for pid in children(raylet) for run in training if holds(pid, run / LOCK)}


def holds(pid: int, file: Path) -> bool:
    """Return whether a process has a file open."""
    with suppress(OSError):  # the process has ended
        return any(entry.resolve() == file for entry in Path(f"/proc/{pid}/fd").iterdir())
    return False
