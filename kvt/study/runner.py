"""Working off a grid: what is finished is left alone, the rest is handed to workers."""

import os
import platform
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from pydoc import locate
from time import sleep

import torch
from tqdm import tqdm

from kvt.fleet.alike import own_hooks
from kvt.study.config import shape_of
from kvt.study.forecast import Times, foretell
from kvt.study.grid import Run, varied
from kvt.study.local import Engine, LocalWorkers, cores
from kvt.study.ray_cluster import RayCluster
from kvt.study.records import Result, seconds_of
from kvt.study.run import (
    DONE,
    FAULTY,
    Job,
    Outcome,
    State,
    forget,
    is_free,
    lock_of,
    outcome_of,
    record_of,
    step_of,
    tally,
)
from kvt.system.errors import UserError, require_positive
from kvt.system.files import require_folder, user_path

BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} runs, {elapsed} so far{postfix} left"
FLEET = 16
"""How many runs are trained as one on a GPU, where nothing is said."""
PAUSE = 1.0
"""Seconds between two looks at runs that another study is making."""


def work_off(
    runs: Sequence[Run], root: Path, data_dir: str, engine: Engine, fleet: int = 1
) -> Iterator[tuple[Run, Outcome]]:
    """Makes what is not done yet, and yields each run as it gets done, here or by another study in the same folder.

    Args:
        runs: to be made.
        root: the folder of all runs.
        data_dir: where data sets lie.
        engine: what makes them.
        fleet: how many runs are trained as one, at most.
    """
    by_name = {run.name: run for run in runs}
    jobs = [Job(run.config, run.folder(root), data_dir) for run in runs]
    pending = deque(fleets(jobs, fleet, engine.workers))
    later: list[Job] = []  # another study is at them, or a fleet died of them
    while pending or later or engine.busy:
        while pending and engine.room:
            job, left = pending.popleft(), []
            for one in (replace(job, others=()), *job.others):
                if (found := outcome_of(one)) is not None:  # another study made it; asking a worker would cost seconds
                    yield by_name[one.folder.name], found
                else:
                    left.append(one)
            if left:
                engine.submit(replace(left[0], others=tuple(left[1:])))
        if engine.busy:
            if (ended := engine.wait(PAUSE if later else None)) is not None:
                job, outcome = ended
                others = [(other, outcome_of(other) or Outcome(State.ELSEWHERE)) for other in job.others]
                for one, became in [(replace(job, others=()), outcome), *others]:
                    if became.state in (State.ELSEWHERE, State.STARTED):
                        later.append(one)
                    else:
                        yield by_name[one.folder.name], became
        elif later:
            sleep(PAUSE)
        if engine.room:
            for job in [job for job in later if is_free(job)]:
                later.remove(job)
                pending.append(job)


def fleets(jobs: Sequence[Job], most: int, workers: int = 1) -> list[Job]:
    """Puts together what can be trained as one: runs of one kind, at one step, of a task that fleets can train.

    Args:
        jobs: to be made.
        most: how many may be trained as one.
        workers: how many there are: no fleet takes more than a worker's share of the jobs, the others would idle.
    """
    size = min(most, ceil(len(jobs) / workers))
    if size <= 1:
        return [*jobs]
    groups: dict[tuple[object, ...], list[Job]] = {}
    for job in jobs:
        key = (shape_of(job.config), step_of(job.folder)) if _joins(job) else (job.folder.name,)
        groups.setdefault(key, []).append(job)
    cut = [group[n : n + size] for group in groups.values() for n in range(0, len(group), size)]
    return [replace(first, others=tuple(others)) for first, *others in cut]


def _joins(job: Job) -> bool:
    """Whether a fleet can train a run, by its task."""
    task = locate(job.config["model"]["class_path"])
    return isinstance(task, type) and not own_hooks(task)


def make_runs(
    runs: Sequence[Run],
    root: Path,
    workers: int | None,
    ray: str | None,
    retry_failed: bool,
    dry_run: bool,
    listed: bool,
    fleet: int | None = None,
) -> int:
    """Makes what is not done yet, with a progress bar and a line a run; see `kvt.cli.study.study_run`.

    Returns:
        How many runs have failed, now or before, or are damaged.

    Raises:
        UserError: the folder cannot be used, or the disk is full.
        SystemExit: with code 130, at Ctrl-C.
    """
    if workers is not None:
        require_positive(workers=workers)
    if fleet is not None:
        require_positive(fleet=fleet)
    fleet = fleet or (FLEET if torch.cuda.is_available() else 1)  # a processor gains little
    workers = workers or torch.cuda.device_count() or len(cores())
    require_folder(root, "--folder", write=False)
    data_dir = str(user_path(os.environ.get("KVT_DATA_DIR") or "data").resolve())
    names, times, states, faulty = varied(runs), Times(), {}, []
    for run in runs:
        record = record_of(run.folder(root))
        states[run.name] = record.state
        times.add(run, record.result)
        if record.state in FAULTY:
            faulty.append((run, record))
    print(tally(states.values()))
    if listed:
        for run in runs:
            print(f"{states[run.name]:<10} {run.name} {run.describe(names)}")
    done = set(DONE) - (set(FAULTY) if retry_failed else set())
    todo = [run for run in runs if states[run.name] not in done]
    if not retry_failed:
        for run, record in faulty:
            print(f"{record.state} before, {run.describe(names)}: {record.message}; --retry_failed tries it again")
    if dry_run:
        foretell(runs, states, todo, times, workers, data_dir)
    if dry_run or listed:
        return 0
    left = 0 if retry_failed else len(faulty)
    if not todo:
        return left
    _require_locks(root)
    if retry_failed:
        for run, _ in faulty:
            forget(run.folder(root))
    try:
        return left + _make(runs, todo, root, data_dir, times, workers, ray, fleet)
    except KeyboardInterrupt:
        print("stopped: the same command goes on", file=sys.stderr)
        sys.exit(130)


def _make(
    runs: Sequence[Run],
    todo: Sequence[Run],
    root: Path,
    data_dir: str,
    times: Times,
    workers: int,
    ray: str | None,
    fleet: int,
) -> int:
    """Makes some of the runs, and says how it goes; returns how many have failed, or are damaged."""
    names, failed = varied(runs), 0
    left = {run.name: run for run in todo}
    engine = _engine(workers, ray)
    try:
        begin = {"initial": len(runs) - len(todo), "postfix": times.left(todo, engine.workers)}
        with tqdm(total=len(runs), **begin, smoothing=0, bar_format=BAR) as bar:
            for run, outcome in work_off(todo, root, data_dir, engine, fleet):
                if outcome.state == State.STUCK:
                    raise UserError(f"{outcome.message}; then the same command goes on")
                del left[run.name]
                result = record_of(run.folder(root)).result
                times.add(run, result)
                bar.update()
                found = outcome.message or headline(result)
                bar.write(f"{outcome.state:<8} {run.describe(names)}  {found}")
                bar.set_postfix_str(times.left([*left.values()], engine.workers))
                failed += outcome.state in FAULTY
    finally:
        engine.stop()
    return failed


def headline(result: Result | None) -> str:
    """A result in a few words: its main metrics and its time."""
    if result is None:  # a shared disk may not show it yet
        return ""
    stage = "test" if any(name.startswith("test/") for name in result) else "val"
    numbers = [f"{name} {value:.4f}" for name, value in result.items() if name.startswith(f"{stage}/")]
    return "  ".join([*numbers, f"{seconds_of(result):.0f} s"])


def _require_locks(root: Path) -> None:
    """Makes sure that runs can be locked in a folder, so that no two processes make the same.

    Raises:
        UserError: they cannot: it is closed, on a disk that is full or that knows no locks.
    """
    try:
        with lock_of(root, f"{platform.node()}-{os.getpid()}") as lock:
            Path(lock.lock_file).unlink()
    except (OSError, NotImplementedError) as error:
        raise UserError(f"--folder {root}: no file can be locked there ({error}): name another folder") from error


def _engine(workers: int, ray: str | None) -> Engine:
    return LocalWorkers(workers) if ray is None else RayCluster(ray)
