"""Workers on a Ray cluster: the same jobs, on whatever machines belong to it.

Ray is an extra, imported where a cluster is asked for.
"""

import logging
import traceback
from socket import create_connection
from typing import Any

import torch

from kvt.study.run import Job, Outcome, State, execute, write_failure
from kvt.system.errors import UserError

RETRIES = 3
"""How often a job whose worker or machine died is started again."""
PATIENCE = 10.0
"""Seconds until an address that does not answer counts as none."""


class RayCluster:
    """Runs each job as a Ray task that may be started again: it goes on from its last checkpoint.

    A task asks for one core and, where the cluster has GPUs, for one of those. All machines must see the folder of the
    study and the data under the same path, and have kvt installed.

    Args:
        address: of the cluster, "auto" for the one that this machine belongs to.

    Raises:
        UserError: there is none, or Ray is not installed.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ModuleNotFoundError as error:
            raise UserError('--ray needs: pip install "kvt[ray]"') from error
        self._ray = ray
        self._address = address
        try:
            _require_answer(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
        except (OSError, RuntimeError, ValueError) as error:  # ConnectionError is an OSError
            reason = str(error).partition("\n")[0]
            raise UserError(f"--ray {address}: no such cluster, `ray start --head` begins one: {reason}") from error
        gpus = int("GPU" in ray.cluster_resources())
        self._kind = "GPU" if gpus else "CPU"
        # a worker that is used again would hand settings of torch, and a GPU gone wrong, on to the next run
        self._task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES, max_calls=1)(_make)
        self._running: dict[Any, Job] = {}

    @property
    def workers(self) -> int:
        """How many jobs the cluster can make at once, as it stands."""
        return max(1, int(self._ray.cluster_resources().get(self._kind, 0)))

    @property
    def room(self) -> bool:
        """Whether the cluster's queue is short: as many jobs may wait as are under way."""
        return len(self._running) < 2 * self.workers

    @property
    def busy(self) -> bool:
        """Whether a job is under way."""
        return bool(self._running)

    def submit(self, job: Job) -> None:
        """Puts a job into the cluster's queue."""
        self._running[self._task.remote(job)] = job

    def wait(self, seconds: float | None = None) -> tuple[Job, Outcome] | None:
        """The next job that has ended; None if none does within these seconds.

        Raises:
            UserError: the cluster is gone, which is no fault of the job.
        """
        ended, _ = self._ray.wait([*self._running], timeout=seconds)
        if not ended:
            return None
        job = self._running.pop(ended[0])
        errors = self._ray.exceptions
        try:
            return job, self._ray.get(ended[0])
        except errors.LocalRayletDiedError as error:
            raise UserError(
                f"--ray {self._address}: the cluster is gone: with one, the same command goes on"
            ) from error
        except errors.RayTaskError as error:  # a run's own errors are recorded where it runs; this is another
            message, trace = f"{type(error.cause).__name__}: {error.cause}", str(error)
        except errors.RayError as error:
            message, trace = f"its process or its machine died {RETRIES + 1} times: {error}", traceback.format_exc()
        if job.others:  # alone, each will meet its own end
            return job, Outcome(State.STARTED)
        return job, write_failure(job, " ".join(message.split()), trace)

    def stop(self) -> None:
        """Leaves the cluster, which ends what is under way, at once: it can be gone on with."""
        self._ray.shutdown()


def _require_answer(address: str) -> None:
    """Asks a host:port, which Ray itself would do for minutes.

    Raises:
        OSError: nobody is there.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        create_connection((host, int(port)), timeout=PATIENCE).close()


def _make(job: Job) -> Outcome:
    """A Ray task."""
    torch.set_num_threads(1)
    return execute(job)
