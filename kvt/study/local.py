"""Workers on this machine: one process a job, each on its share of the cores or on a GPU."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver, get_all_start_methods, get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any, NamedTuple

import torch

from kvt.study.fleets import execute_all
from kvt.study.records import State
from kvt.study.run import Job, Outcome, outcome_of, write_failure
from kvt.system.console import ctrl_c_handler

ATTEMPTS = 3
"""A run fails when its process has died so many times."""

Outcomes = list[tuple[Job, Outcome]]


class Place(NamedTuple):
    """The cores of a worker, and its GPU if there is one."""

    cores: frozenset[int]
    gpu: str | None


class _Running(NamedTuple):
    process: BaseProcess
    answer: Connection
    jobs: Sequence[Job]
    place: Place


class LocalWorkers:
    """Makes groups of jobs, each in a process forked from one that has everything imported.

    A run whose process dies is started again and resumes from its last checkpoint, `ATTEMPTS` times at most. The
    processes end with this one, even when it is killed. Call `submit` while there is `room`, `wait` while `busy`.

    Args:
        workers: the number of processes at once.
    """

    def __init__(self, workers: int) -> None:
        self._context = context_of_workers()
        self._free = places(workers)
        self._running: list[_Running] = []
        self._deaths: Counter[str] = Counter()

    @property
    def workers(self) -> int:
        return len(self._free) + len(self._running)

    @property
    def room(self) -> bool:
        return bool(self._free)

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def submit(self, jobs: Sequence[Job]) -> None:
        self._start(jobs, self._free.pop(0))

    def wait(self, seconds: float | None = None) -> Outcomes:
        """Return the next group that ends; nothing if none does within these seconds.

        A group of several whose process died comes back as begun, to be made job by job.
        """
        while wait([running.process.sentinel for running in self._running], seconds):
            for running in [r for r in self._running if not r.process.is_alive()]:
                self._running.remove(running)
                if outcomes := self._outcomes(running):
                    self._free.append(running.place)
                    return [*zip(running.jobs, outcomes, strict=True)]
                self._start(running.jobs, running.place)
        return []

    def stop(self) -> None:
        """Kill the processes; their runs can be resumed."""
        for running in self._running:
            running.process.kill()
            running.process.join()
        self._running.clear()

    def _start(self, jobs: Sequence[Job], place: Place) -> None:
        answer, their_end = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(jobs, place, their_end), daemon=True)
        process.start()
        their_end.close()
        self._running.append(_Running(process, answer, jobs, place))

    def _outcomes(self, running: _Running) -> list[Outcome]:
        """Return the answer of a process that has ended; nothing if it died and is to be started again."""
        running.process.join()
        with suppress(EOFError):
            if running.answer.poll():
                outcomes: list[Outcome] = running.answer.recv()
                return outcomes
        if len(running.jobs) > 1:  # together they may need too much memory, or one of them kills the process
            return [outcome_of(job) or Outcome(State.STARTED) for job in running.jobs]
        job, code = running.jobs[0], running.process.exitcode or 0
        name = job.folder.name
        self._deaths[name] += 1
        if self._deaths[name] < ATTEMPTS:
            return []
        how = f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"
        message = f"its process died {ATTEMPTS} times, last {how}; see .logs/{name}.txt; was the memory full?"
        return [write_failure(job, message)]


def cores() -> list[int]:
    """Return the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


def places(workers: int) -> list[Place]:
    """Divide the cores that this process may use, and the GPUs, among workers.

    >>> {len(place.cores) >= 1 for place in places(3)}
    {True}
    """
    mine = cores()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
    return [
        Place(frozenset(mine[n::workers] or [mine[n % len(mine)]]), gpus[n % len(gpus)] if gpus else None)
        for n in range(workers)
    ]


def context_of_workers() -> Any:
    """Return a context whose processes are forked from one that has imported this module, if the system can."""
    methods = get_all_start_methods()
    context: Any = get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload(["kvt.study.local"])
        with ctrl_c_handler(signal.SIG_IGN):  # inherited: workers ignore Ctrl-C from their first moment
            forkserver.ensure_running()
    return context


def settle(place: Place) -> None:
    """Bind this process to a place, and let it end with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a spawned process inherits no handler
    Thread(target=_die_with_parent, daemon=True).start()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, place.cores)
    torch.set_num_threads(len(place.cores))
    if place.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = place.gpu


def _work(jobs: Sequence[Job], place: Place, answer: Connection) -> None:
    """Run a worker process, whose output goes to .logs/<name of the first run>.txt."""
    settle(place)
    folder = jobs[0].folder
    with suppress(OSError):  # the disk is full: the run itself reports it
        log = folder.parents[2] / ".logs" / f"{folder.name}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            sys.stdout.flush()
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    answer.send(execute_all(jobs))
    answer.close()


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
