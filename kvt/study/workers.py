"""Workers that train runs: processes that share the cores and GPUs of this machine, or tasks of a Ray cluster."""

import logging
import os
import signal
import sys
from collections.abc import Iterable
from concurrent.futures import CancelledError
from contextlib import suppress
from multiprocessing import active_children, forkserver, get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from socket import create_connection
from threading import Lock, Thread
from typing import NamedTuple

import torch

from kvt.study.job import Job, execute, reason
from kvt.study.outcomes import Outcome
from kvt.system.console import signals_handled
from kvt.system.errors import UserError
from kvt.system.hardware import cores
from kvt.system.quoting import one_line


class LostProcessError(Exception):
    """The process of a run has died. The message says how it died."""


class Place(NamedTuple):
    cores: frozenset[int]
    gpu: str | None


class LocalWorkers:
    """Workers that train each run in a new process, forked from a server process that has imported all modules.

    The new processes end when the process that made this object ends, even if it is killed.
    """

    def __init__(self, workers: int) -> None:
        self.workers = self.threads = workers
        self._context = context_of_workers()
        self._places = SimpleQueue[Place]()
        self._open(places(self.workers))
        self._changing = Lock()  # multiprocessing polls all children when it starts one, which is not thread-safe
        self._closed = False

    def make(self, job: Job) -> Outcome:
        """Train a run in a process; called in one of `threads` threads. Raises LostProcessError if the process dies."""
        place = self._places.get()
        answer, their_end = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(job, place, their_end), daemon=True)
        with self._changing:
            if self._closed:
                raise CancelledError
            process.start()
        their_end.close()
        outcome: Outcome | None = None
        with suppress(EOFError, OSError):  # `recv` raises these errors if the process died
            outcome = answer.recv()
        wait([process.sentinel])
        with self._changing:
            process.join()
        self._open([place])
        if outcome is None:
            raise LostProcessError(
                f"last with exit code {process.exitcode}; see .logs/{job.folder.name}.txt; was the memory full?"
            )
        return outcome

    def close(self) -> None:
        """End all processes. Each run first saves a checkpoint, unless the user presses Ctrl-C again."""
        with self._changing:
            self._closed = True
            processes = active_children()
            try:
                for process in processes:
                    process.terminate()
                for process in processes:
                    process.join()
            finally:
                for process in processes:
                    process.kill()
        self._open(places(self.threads))  # wakes the threads that wait for a free `Place`, so that the threads end

    def _open(self, places: Iterable[Place]) -> None:
        for place in places:
            self._places.put(place)


def places(workers: int) -> list[Place]:
    """Return a `Place` for each worker. The places divide the cores that this process may use, and the GPUs."""
    mine = cores()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
    return [
        Place(frozenset(mine[n::workers] or [mine[n % len(mine)]]), gpus[n % len(gpus)] if gpus else None)
        for n in range(workers)
    ]


def context_of_workers() -> ForkServerContext:
    """Return a multiprocessing context whose processes start with all modules imported and ignore Ctrl-C.

    The function removes SLURM's environment variables. With them, Lightning would treat all processes of a job as one
    distributed run.
    """
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        del os.environ[name]
    context = get_context("forkserver")
    # without the preload, each run would import torch.utils.tensorboard when it first logs
    context.set_forkserver_preload(["kvt.study.workers", "torch.utils.tensorboard"])
    with signals_handled(signal.SIG_IGN, [signal.SIGINT]):  # workers inherit SIG_IGN, and ignore Ctrl-C from the start
        forkserver.ensure_running()
    return context


def _work(job: Job, place: Place, answer: Connection) -> None:
    Thread(target=_die_with_parent, args=[parent_process()], daemon=True).start()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, place.cores)
    torch.set_num_threads(len(place.cores))
    if place.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = place.gpu
    log = job.folder.parents[2] / ".logs" / f"{job.folder.name}.txt"
    with suppress(OSError):  # if the disk is full, the run reports this error itself
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            sys.stdout.flush()
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    answer.send(execute(job))
    answer.close()


def _die_with_parent(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


class RayCluster:
    """Workers that train each run as a Ray task with one core, and with a GPU if the cluster has GPUs."""

    threads = 1000  # may exceed the number of cores: Ray queues runs, and a cluster may grow

    def __init__(self, address: str) -> None:
        import ray  # the extra kvt[ray] installs this package

        self._ray, self._address = ray, address
        try:
            host, _, port = address.removeprefix("ray://").rpartition(":")
            if host:  # fails at once if nothing listens there; Ray would try for minutes
                create_connection((host, int(port)), timeout=10).close()
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
        except (OSError, RuntimeError, ValueError) as error:  # ConnectionError is an OSError
            message = f"--ray {address}: cannot connect; `ray start --head` starts a cluster: {one_line(str(error))}"
            raise UserError(message) from error
        gpus = int("GPU" in ray.cluster_resources())
        self._kind = "GPU" if gpus else "CPU"
        # max_calls=1 makes a new process for each run: torch's settings or a broken GPU do not affect the next run
        self._task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0, max_calls=1)(_work_on_ray)

    @property
    def workers(self) -> int:
        return max(1, int(self._ray.cluster_resources().get(self._kind, 0)))

    def make(self, job: Job) -> Outcome:
        """Train a run in a Ray task; called in one of `threads` threads.

        Raises LostProcessError if the process or its machine dies, and UserError if the connection to Ray is lost.
        """
        errors = self._ray.exceptions
        try:
            outcome: Outcome = self._ray.get(self._task.remote(job))
            return outcome
        except errors.LocalRayletDiedError as error:
            lost = "lost the Ray cluster; rerun the same command to resume"
            raise UserError(f"--ray {self._address}: {lost}") from error
        except errors.RayError as error:  # `execute` records the errors that a run itself raises
            raise LostProcessError(f"or its machine: {reason(getattr(error, 'cause', error))}") from error

    def close(self) -> None:
        self._ray.shutdown()


def _work_on_ray(job: Job) -> Outcome:
    torch.set_num_threads(1)
    return execute(job)
