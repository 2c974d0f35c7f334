"""Workers on this machine: one process a job, each on its share of the cores or on a GPU."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver, get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import NamedTuple

import torch

from kvt.study.fleets import execute_all
from kvt.study.run import Job, Outcomes, outcomes_of_dead
from kvt.system.console import ctrl_c_handler

ATTEMPTS = 3  # a run fails when its process has died this often


class Place(NamedTuple):
    """What a worker may use."""

    cores: frozenset[int]
    gpu: str | None


class LocalWorkers:
    """Makes groups of jobs, each in a process forked from one that has everything imported.

    A run whose process dies is started again and resumes from its last checkpoint, `ATTEMPTS` times at most. The
    processes end with this one, even when it is killed. Call `submit` while there is `room`, `wait` while `busy`.
    """

    def __init__(self, workers: int) -> None:
        self._context = context_of_workers()
        self._free = places(workers)
        self._running: dict[
            Connection, tuple[BaseProcess, Sequence[Job], Place]
        ] = {}  # by the connection on which a process answers
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

    def submit(self, jobs: Sequence[Job], place: Place | None = None) -> None:
        place = place or self._free.pop(0)
        answer, their_end = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(jobs, place, their_end), daemon=True)
        process.start()
        their_end.close()
        self._running[answer] = process, jobs, place

    def wait(self, seconds: float | None = None) -> Outcomes:
        """Return the outcomes of the next group that ends; nothing if none does within these seconds.

        The jobs of a group of several whose process died come back as begun, to be made one by one.
        """
        while ready := wait([*self._running], seconds):
            answer = next(one for one in self._running if one in ready)
            process, jobs, place = self._running.pop(answer)
            outcomes: Outcomes = []
            with suppress(EOFError, OSError):  # it died
                outcomes = answer.recv()
            process.join()
            if not outcomes and len(jobs) == 1:
                self._deaths[jobs[0].folder.name] += 1
                if self._deaths[jobs[0].folder.name] < ATTEMPTS:
                    self.submit(jobs, place)
                    continue
            self._free.append(place)
            last = f"last with exit code {process.exitcode}; see .logs/{jobs[0].folder.name}.txt"
            message = f"its process died {ATTEMPTS} times, {last}; was the memory full?"
            return outcomes or outcomes_of_dead(jobs, message)
        return []

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
    context.set_forkserver_preload(["kvt.study.local"])
    with ctrl_c_handler(signal.SIG_IGN):  # inherited: workers ignore Ctrl-C from their first moment
        forkserver.ensure_running()
    return context


def bind(place: Place) -> None:
    """Bind this process to a place, and let it end with its parent."""
    Thread(target=_die_with_parent, daemon=True).start()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, place.cores)
    torch.set_num_threads(len(place.cores))
    if place.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = place.gpu


def _work(jobs: Sequence[Job], place: Place, answer: Connection) -> None:
    bind(place)
    folder = jobs[0].folder
    log = folder.parents[2] / ".logs" / f"{folder.name}.txt"
    with suppress(OSError):  # the disk is full: the run itself reports it
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
    os._exit(1)
