"""Runs of a study trained as one fleet; the only file of the study that knows fleets."""

import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from math import ceil
from pydoc import locate

from filelock import Timeout

from kvt.fleet.alike import own_hooks
from kvt.fleet.member import FleetRun
from kvt.fleet.trainer import FleetTrainer
from kvt.study.config import shape_of
from kvt.study.run import Job, Outcomes, StudyCLI, execute, flags, outcome_of, resume_step, run_lock
from kvt.training.run_dir import last_checkpoint


def fleets(jobs: Sequence[Job], size: int, workers: int = 1) -> list[list[Job]]:
    """Group runs of one shape, at one step, of a task that fleets can train; each other run is a group by itself.

    A group has at most `size` runs, and no more than a worker's share of all runs, or other workers would idle.
    """
    size = min(size, ceil(len(jobs) / workers))
    groups: dict[object, list[Job]] = {}
    for job in jobs:
        task = locate(job.config["model"]["class_path"])
        joins = size > 1 and isinstance(task, type) and not own_hooks(task)
        key = (shape_of(job.config), resume_step(job.folder)) if joins else job.folder
        groups.setdefault(key, []).append(job)
    return [group[n : n + size] for group in groups.values() for n in range(0, len(group), size)]


def execute_all(jobs: Sequence[Job]) -> Outcomes:
    """Make a group of runs: as a fleet if there are several, and one by one what the fleet has not finished."""
    if len(jobs) > 1:
        _train_fleet(jobs)
    return [(job, execute(job)) for job in jobs]


def _train_fleet(jobs: Sequence[Job]) -> None:
    with ExitStack() as locks:
        mine = []
        for job in jobs:
            with suppress(Timeout, OSError):
                locks.enter_context(run_lock(job.folder))
                mine.append(job)
        todo = [job for job in mine if outcome_of(job) is None]
        try:
            FleetTrainer([partial(_begin, job) for job in todo]).run()
        except Exception:
            traceback.print_exc()  # into the log; alone, the run at fault meets its error again
        for job in todo:
            if outcome_of(job) is not None:
                last_checkpoint(job.folder).unlink(missing_ok=True)


class _StudyMember(FleetRun, StudyCLI):
    """A run of a study in a fleet."""


def _begin(job: Job, trainer: FleetTrainer) -> None:
    _StudyMember(flags(job), job.folder, fleet=trainer)
