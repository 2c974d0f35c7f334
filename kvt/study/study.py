"""Working off a grid: what is finished is left alone, the rest is handed to workers."""

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import sleep

from kvt.study.grid import Run
from kvt.study.work import Job, Outcome, State
from kvt.study.workers import Engine

PAUSE = 1.0
"""Seconds between two looks at runs that another study is making."""


def work_off(
    runs: Sequence[Run], root: Path, data_dir: str, engine: Engine, retry_failed: bool = False
) -> Iterator[tuple[Run, Outcome]]:
    """Makes what is not done yet, and yields each run as it gets done, here or by another study in the same folder.

    Args:
        runs: to be made.
        root: the folder of all runs.
        data_dir: where data sets lie.
        engine: what makes them.
        retry_failed: whether to try again what failed before.
    """
    by_name = {run.name: run for run in runs}
    pending = deque(Job(run.config, run.folder(root), data_dir, retry_failed) for run in runs)
    try:
        waiting = 0  # jobs in a row that run elsewhere
        while pending or engine.busy:
            while pending and engine.room:
                engine.submit(pending.popleft())
            job, outcome = engine.wait()
            if outcome.state != State.ELSEWHERE:
                waiting = 0
                yield by_name[job.folder.name], outcome
                continue
            pending.append(job)
            waiting += 1
            if waiting > len(pending):
                sleep(PAUSE)
                waiting = 0
    finally:
        engine.stop()
