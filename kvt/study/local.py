"""Workers on this machine: a process a run, each on its share of the cores or on a GPU."""

import os
import signal
import sys
from collections import Counter
from contextlib import suppress
from multiprocessing import forkserver, get_all_start_methods, get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any, NamedTuple, Protocol

import torch

from kvt.study.run import Job, Outcome, State, execute, write_failure
from kvt.system.console import ctrl_c_handler

ATTEMPTS = 3
"""How often the process of a run may die before the run counts as failed."""


class Engine(Protocol):
    """What works off jobs. `submit` while there is `room`; `wait` while it is `busy`."""

    @property
    def workers(self) -> int:
        """How many jobs it makes at once."""

    @property
    def room(self) -> bool:
        """Whether it takes another job."""

    @property
    def busy(self) -> bool:
        """Whether a job is under way."""

    def submit(self, job: Job) -> None:
        """Takes a job."""

    def wait(self, seconds: float | None = None) -> tuple[Job, Outcome] | None:
        """The next job that has ended; None if none does within these seconds.

        A fleet that its process did not survive comes back as begun.
        """

    def stop(self) -> None:
        """Ends what is under way, at once: it can be gone on with."""


class Place(NamedTuple):
    """Where a worker runs: cores, and a GPU if there is one."""

    cores: frozenset[int]
    gpu: str | None


class _Running(NamedTuple):
    process: BaseProcess
    answer: Connection
    job: Job
    place: Place


class LocalWorkers:
    """Runs each job in a process of its own, forked from one that has everything imported.

    A process that dies is started again, and goes on from its last checkpoint; after `ATTEMPTS` deaths the run has
    failed. One that dies with a fleet is not: its runs are handed back as begun, to be made one by one. The processes
    die with this one, however it dies.

    Args:
        workers: how many at once.
    """

    def __init__(self, workers: int) -> None:
        self._context = context_of_workers()
        self._free = places(workers)
        self._running: list[_Running] = []
        self._deaths: Counter[str] = Counter()

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self._free) + len(self._running)

    @property
    def room(self) -> bool:
        """Whether a worker is free."""
        return bool(self._free)

    @property
    def busy(self) -> bool:
        """Whether a job is under way."""
        return bool(self._running)

    def submit(self, job: Job) -> None:
        """Starts a job on a free worker."""
        self._start(job, self._free.pop(0))

    def wait(self, seconds: float | None = None) -> tuple[Job, Outcome] | None:
        """The next job that has ended; None if none does within these seconds."""
        while wait([running.process.sentinel for running in self._running], seconds):
            for running in [r for r in self._running if not r.process.is_alive()]:
                self._running.remove(running)
                if (outcome := self._outcome(running)) is not None:
                    self._free.append(running.place)
                    return running.job, outcome
                self._start(running.job, running.place)
        return None

    def stop(self) -> None:
        """Ends what is under way, at once: it can be gone on with."""
        for running in self._running:
            running.process.kill()
            running.process.join()
        self._running.clear()

    def _start(self, job: Job, place: Place) -> None:
        answer, their_end = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(job, place, their_end), name=job.folder.name, daemon=True)
        process.start()
        their_end.close()
        self._running.append(_Running(process, answer, job, place))

    def _outcome(self, running: _Running) -> Outcome | None:
        """What a process that has ended answered; None if it died and may try again."""
        running.process.join()
        with suppress(EOFError):
            if running.answer.poll():
                outcome: Outcome = running.answer.recv()
                return outcome
        if running.job.others:  # which may have died of their number, or of one that only shows alone
            return Outcome(State.STARTED)
        name, code = running.job.folder.name, running.process.exitcode or 0
        self._deaths[name] += 1
        if self._deaths[name] < ATTEMPTS:
            return None
        how = f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"
        message = f"its process died {ATTEMPTS} times, last {how}; see .logs/{name}.txt; was the memory full?"
        return write_failure(running.job, message)


def cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


def places(workers: int) -> list[Place]:
    """Divides the cores that this process may use, and the GPUs, among workers.

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
    """What starts processes: forked from one that has everything imported, where the system can."""
    methods = get_all_start_methods()
    context: Any = get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload(["kvt.study.local"])
        with ctrl_c_handler(signal.SIG_IGN):  # workers ignore it from their first moment
            forkserver.ensure_running()
    return context


def settle(place: Place) -> None:
    """Makes this process one that works in a place, and dies with the one that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where processes are not forked, but spawned
    Thread(target=_die_with_parent, daemon=True).start()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, place.cores)
    torch.set_num_threads(len(place.cores))
    if place.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = place.gpu


def _work(job: Job, place: Place, answer: Connection) -> None:
    """The life of a worker process."""
    settle(place)
    log = job.folder.parents[2] / ".logs" / f"{job.folder.name}.txt"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            sys.stdout.flush()
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    except OSError:  # a full disk, which the run itself will meet
        pass
    answer.send(execute(job))
    answer.close()


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
