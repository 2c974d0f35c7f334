"""Make the runs of a grid that are not done yet."""

import os
import platform
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import sleep

import torch
from tqdm import tqdm

from kvt.study.fleets import fleets
from kvt.study.forecast import Times, foretell
from kvt.study.grid import Run, varied
from kvt.study.local import LocalWorkers, cores
from kvt.study.ray_cluster import RayCluster
from kvt.study.records import DONE, FAULTY, Result, State, read_record, seconds_of, tally
from kvt.study.run import Job, Outcome, forget, is_free, outcome_of, run_lock
from kvt.system.errors import UserError, require_positive
from kvt.system.files import require_folder, user_path

Engine = LocalWorkers | RayCluster

BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} runs, {elapsed} so far{postfix} left"
FLEET = 16
"""Default number of runs trained as one on a GPU."""
PAUSE = 1.0
"""Seconds between two checks of the runs that another study is making."""


def make_runs(
    runs: Sequence[Run],
    root: Path,
    workers: int | None = None,
    ray: str | None = None,
    retry_failed: bool = False,
    dry_run: bool = False,
    listed: bool = False,
    fleet: int | None = None,
) -> int:
    """Make what is not done yet, with a progress bar and a line for each run; see `kvt.cli.study.study_run`.

    Returns:
        The number of runs that are failed or damaged.

    Raises:
        UserError: the folder cannot be used, or the disk is full.
        SystemExit: with code 130 at Ctrl-C.
    """
    for name, number in {"workers": workers, "fleet": fleet}.items():
        if number is not None:
            require_positive(**{name: number})
    fleet = fleet or (FLEET if torch.cuda.is_available() else 1)  # on a CPU a fleet is hardly faster
    workers = workers or torch.cuda.device_count() or len(cores())
    require_folder(root, "--folder", write=False)
    data_dir = str(user_path(os.environ.get("KVT_DATA_DIR") or "data").resolve())
    names, times, states, faulty = varied(runs), Times(), {}, []
    for run in runs:
        record = read_record(run.folder(root))
        states[run.name] = record.state
        if record.result:
            times.add(run, seconds_of(record.result))
        if record.state in FAULTY:
            faulty.append((run, record))
    print(tally(states.values()))
    if listed:
        for run in runs:
            print(f"{states[run.name]:<10} {run.name} {run.describe(names)}")
    if not retry_failed:
        for run, record in faulty:
            print(f"{record.state} before, {run.describe(names)}: {record.message}; --retry_failed tries it again")
    done = {*DONE} - ({*FAULTY} if retry_failed else set())
    todo = [run for run in runs if states[run.name] not in done]
    if dry_run:
        foretell(runs, states, todo, times, workers, data_dir)
    if dry_run or listed:
        return 0
    failed = 0 if retry_failed else len(faulty)
    if not todo:
        return failed
    _require_locks(root)
    if retry_failed:
        for run, _ in faulty:
            forget(run.folder(root))
    unfinished = {run.name: run for run in todo}
    try:
        engine = _engine(workers, ray)
        try:
            begin = {"initial": len(runs) - len(todo), "postfix": times.left(todo, engine.workers)}
            with tqdm(total=len(runs), **begin, smoothing=0, bar_format=BAR) as bar:
                for run, outcome in work_off(todo, root, data_dir, engine, fleet):
                    if outcome.state == State.STUCK:
                        raise UserError(f"{outcome.message}; then the same command goes on")
                    del unfinished[run.name]
                    result = read_record(run.folder(root)).result  # None where a shared disk does not show it yet
                    if result:
                        times.add(run, seconds_of(result))
                    bar.update()
                    found = outcome.message or (headline(result) if result else "")
                    bar.write(f"{outcome.state:<8} {run.describe(names)}  {found}")
                    bar.set_postfix_str(times.left([*unfinished.values()], engine.workers))
                    failed += outcome.state in FAULTY
        finally:
            engine.stop()
    except KeyboardInterrupt:
        print("stopped: the same command goes on", file=sys.stderr)
        sys.exit(130)
    return failed


def work_off(
    runs: Sequence[Run], root: Path, data_dir: str, engine: Engine, fleet: int = 1
) -> Iterator[tuple[Run, Outcome]]:
    """Make what is not done yet, and yield each run when it is done, by this study or another in the same folder.

    Args:
        runs: to make.
        root: the folder of all runs.
        data_dir: the folder of the data sets.
        engine: the workers.
        fleet: the most runs to train as one.
    """
    by_folder = {run.folder(root): run for run in runs}
    pending = deque(fleets([Job(run.config, f, data_dir) for f, run in by_folder.items()], fleet, engine.workers))
    later: list[Job] = []  # another study is making them, or their fleet did not finish them
    while pending or later or engine.busy:
        while pending and engine.room:
            jobs = []
            for job in pending.popleft():
                if (outcome := outcome_of(job)) is not None:  # made by another study; a worker would take seconds
                    yield by_folder[job.folder], outcome
                else:
                    jobs.append(job)
            if jobs:
                engine.submit(jobs)
        if engine.busy:
            for job, outcome in engine.wait(PAUSE if later else None):
                if outcome.state in (State.ELSEWHERE, State.STARTED):
                    later.append(job)
                else:
                    yield by_folder[job.folder], outcome
        elif later:
            sleep(PAUSE)
        if engine.room:
            for job in [job for job in later if is_free(job)]:
                later.remove(job)
                pending.append([job])


def headline(result: Result) -> str:
    """Return the main metrics of a run and its time."""
    stage = "test" if any(name.startswith("test/") for name in result) else "val"
    numbers = [f"{name} {value:.4f}" for name, value in result.items() if name.startswith(f"{stage}/")]
    return "  ".join([*numbers, f"{seconds_of(result):.0f} s"])


def _require_locks(root: Path) -> None:
    """Raise UserError if no file can be locked in the folder: two processes could make the same run."""
    try:
        with run_lock(root / "task" / "attn" / f"{platform.node()}-{os.getpid()}") as lock:
            Path(lock.lock_file).unlink()
    except (OSError, NotImplementedError) as error:
        raise UserError(f"--folder {root}: no file can be locked there ({error}): name another folder") from error


def _engine(workers: int, ray: str | None) -> Engine:
    return LocalWorkers(workers) if ray is None else RayCluster(ray)
