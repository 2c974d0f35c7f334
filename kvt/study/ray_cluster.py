"""Workers on a Ray cluster. Ray is an extra, imported when a cluster is asked for."""

import logging
from collections.abc import Sequence
from socket import create_connection
from typing import Any, cast

import torch

from kvt.study.fleets import execute_all
from kvt.study.run import Job, Outcomes, outcomes_of_dead, reason
from kvt.system.console import one_line
from kvt.system.errors import UserError

RETRIES = 3  # of a group of jobs whose worker or machine died
PATIENCE = 10.0  # seconds to wait for an address to answer


class RayCluster:
    """Makes groups of jobs as `LocalWorkers` does, each as a Ray task with one core, and a GPU if the cluster has any.

    All machines must see the folder of the study and the data under the same path, and have kvt installed.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ModuleNotFoundError as error:
            raise UserError('--ray needs: pip install "kvt[ray]"') from error
        self._ray, self._address = ray, address
        try:
            _connect(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
        except (OSError, RuntimeError, ValueError) as error:  # ConnectionError is an OSError
            message = f"--ray {address}: no such cluster, `ray start --head` begins one: {one_line(str(error))}"
            raise UserError(message) from error
        gpus = int("GPU" in ray.cluster_resources())
        self._kind = "GPU" if gpus else "CPU"
        # max_calls=1: a process that made two runs would hand torch's settings, or a broken GPU, on to the second
        self._task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES, max_calls=1)(_work)
        self._running: dict[Any, Sequence[Job]] = {}

    @property
    def workers(self) -> int:
        return max(1, int(self._ray.cluster_resources().get(self._kind, 0)))

    @property
    def room(self) -> bool:
        return len(self._running) < 2 * self.workers  # as many may wait in the cluster's queue as run

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def submit(self, jobs: Sequence[Job]) -> None:
        self._running[self._task.remote(jobs)] = jobs

    def wait(self, seconds: float | None = None) -> Outcomes:
        """As `LocalWorkers.wait`; raise UserError if the cluster is gone."""
        ended, _ = self._ray.wait([*self._running], timeout=seconds)
        if not ended:
            return []
        jobs = self._running.pop(ended[0])
        errors = self._ray.exceptions
        try:
            return cast(Outcomes, self._ray.get(ended[0]))
        except errors.LocalRayletDiedError as error:
            raise UserError(f"--ray {self._address}: the cluster is gone: the same command goes on with one") from error
        except errors.RayError as error:  # errors of a run itself are recorded by `execute`
            return outcomes_of_dead(jobs, f"its process or its machine died: {reason(getattr(error, 'cause', error))}")

    def close(self) -> None:
        self._ray.shutdown()


def _connect(address: str) -> None:
    """Raise OSError if nothing listens at a host:port; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        create_connection((host, int(port)), timeout=PATIENCE).close()


def _work(jobs: Sequence[Job]) -> Outcomes:
    torch.set_num_threads(1)
    return execute_all(jobs)
