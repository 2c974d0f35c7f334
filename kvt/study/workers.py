"""Workers: processes of this machine, each on its share of the cores or on a GPU, or tasks of a Ray cluster."""

import logging
import os
import signal
import sys
from contextlib import suppress
from multiprocessing import forkserver, get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from socket import create_connection
from threading import Thread
from time import perf_counter
from typing import Any, NamedTuple

import torch

from kvt.run.checkpoint_files import read_checkpoint
from kvt.run.run_dir import last_checkpoint
from kvt.study.job import Job, execute, reason, write_failure
from kvt.study.outcomes import Outcome
from kvt.system.console import ctrl_c_handler
from kvt.system.errors import UserError
from kvt.system.quoting import one_line

ATTEMPTS = 3  # a run fails when its process has died this often and saved nothing in between
QUEUED = 2  # jobs in a cluster for each of its workers: as many wait there as run

Ended = tuple[Job, Outcome]  # without the run's history


class Place(NamedTuple):
    cores: frozenset[int]
    gpu: str | None


class Deaths:
    """Counts the deaths of each run's process since it last saved more training steps."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[float, int]] = {}

    def are_enough(self, run: str, saved: float) -> bool:
        """Record a death of a run after `saved` steps; return whether it has used up its `ATTEMPTS`."""
        before, count = self._found.get(run, (saved, 0))
        self._found[run] = saved, count + 1 if saved == before else 1
        return self._found[run][1] >= ATTEMPTS

    def are_enough_for(self, job: Job) -> bool:
        """Record a death of a job's process; return whether its run has used up its `ATTEMPTS`."""
        steps = 0
        with suppress(UserError):  # there is no checkpoint yet
            steps = read_checkpoint(last_checkpoint(job.folder))["global_step"]
        return self.are_enough(job.folder.name, steps)


class LocalWorkers:
    """Runs jobs, each in a process forked from one that has everything imported.

    A run whose process dies goes on from its last checkpoint, see `ATTEMPTS`. The processes end with this one, even
    when it is killed. Call `submit` while there is `room`, `wait` while `busy`.
    """

    def __init__(self, workers: int) -> None:
        self._context = context_of_workers()
        self._free = places(workers)
        self._running: dict[Connection, tuple[BaseProcess, Job, Place]] = {}
        self._deaths = Deaths()

    @property
    def workers(self) -> int:
        return len(self._free) + len(self._running)

    @property
    def room(self) -> bool:
        return bool(self._free)

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def submit(self, job: Job, place: Place | None = None) -> None:
        place = place or self._free.pop(0)
        answer, their_end = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(job, place, their_end), daemon=True)
        process.start()
        their_end.close()
        self._running[answer] = process, job, place

    def wait(self, seconds: float | None = None) -> Ended | None:
        """Return the outcome of the next job that ends; None if none does within these seconds."""
        while ready := wait([*self._running], seconds):
            answer = next(one for one in self._running if one in ready)
            process, job, place = self._running.pop(answer)
            name = job.folder.name
            try:
                outcome = answer.recv()
                process.join()
            except (EOFError, OSError):  # it died
                process.join()
                if not self._deaths.are_enough_for(job):
                    self.submit(job, place)
                    continue
                last = f"last with exit code {process.exitcode}; see .logs/{name}.txt"
                outcome = write_failure(job, f"its process died {ATTEMPTS} times, {last}; was the memory full?")
            self._free.append(place)
            return job, outcome
        return None

    def close(self) -> None:
        for process, *_ in self._running.values():
            process.kill()
            process.join()
        self._running.clear()


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


def places(workers: int) -> list[Place]:
    """Divide the cores that this process may use, and the GPUs, among workers."""
    mine = cores()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
    return [
        Place(frozenset(mine[n::workers] or [mine[n % len(mine)]]), gpus[n % len(gpus)] if gpus else None)
        for n in range(workers)
    ]


def context_of_workers() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(["kvt.study.workers"])
    with ctrl_c_handler(signal.SIG_IGN):  # inherited: workers ignore Ctrl-C from their first moment
        forkserver.ensure_running()
    return context


def seconds_to_start() -> float:
    """Return how long a study takes to start: it imports everything, and so does the process that workers fork from."""
    begun = perf_counter()
    process = context_of_workers().Process(target=os.getpid)
    process.start()
    process.join()
    return 2 * (perf_counter() - begun)


def _work(job: Job, place: Place, answer: Connection) -> None:
    Thread(target=_die_with_parent, args=[parent_process()], daemon=True).start()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, place.cores)
    torch.set_num_threads(len(place.cores))
    if place.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = place.gpu
    log = job.folder.parents[2] / ".logs" / f"{job.folder.name}.txt"
    with suppress(OSError):  # the disk is full: the run itself reports it
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
    """Runs jobs as `LocalWorkers` does, each a Ray task with one core, and a GPU if the cluster has any."""

    def __init__(self, address: str) -> None:
        import ray  # an extra

        self._ray, self._address = ray, address
        try:
            host, _, port = address.removeprefix("ray://").rpartition(":")
            if host:  # Ray itself would try for minutes
                create_connection((host, int(port)), timeout=10).close()
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
        except (OSError, RuntimeError, ValueError) as error:  # ConnectionError is an OSError
            message = f"--ray {address}: cannot connect; `ray start --head` starts a cluster: {one_line(str(error))}"
            raise UserError(message) from error
        gpus = int("GPU" in ray.cluster_resources())
        self._kind = "GPU" if gpus else "CPU"
        # max_calls=1: a process that made two runs would hand torch's settings, or a broken GPU, on to the second
        self._task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0, max_calls=1)(_work_on_ray)
        self._running: dict[Any, Job] = {}
        self._deaths = Deaths()

    @property
    def workers(self) -> int:
        return max(1, int(self._ray.cluster_resources().get(self._kind, 0)))

    @property
    def room(self) -> bool:
        return len(self._running) < QUEUED * self.workers

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def submit(self, job: Job) -> None:
        self._running[self._task.remote(job)] = job

    def wait(self, seconds: float | None = None) -> Ended | None:
        errors = self._ray.exceptions
        while ended := self._ray.wait([*self._running], timeout=seconds)[0]:
            job = self._running.pop(ended[0])
            try:
                return job, self._ray.get(ended[0])
            except errors.LocalRayletDiedError as error:
                lost = "lost the Ray cluster; rerun the same command to resume"
                raise UserError(f"--ray {self._address}: {lost}") from error
            except errors.RayError as error:  # errors of a run itself are recorded by `execute`
                if self._deaths.are_enough_for(job):
                    died = f"its process or its machine died: {reason(getattr(error, 'cause', error))}"
                    return job, write_failure(job, died)
                self.submit(job)
        return None

    def close(self) -> None:
        self._ray.shutdown()


def _work_on_ray(job: Job) -> Outcome:
    torch.set_num_threads(1)
    return execute(job)
