"""Trains the runs of a grid that are not done yet."""

import os
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from time import monotonic, sleep
from types import MappingProxyType

import torch
from filelock import Timeout
from tqdm import tqdm

from kvt.run.fit import locked
from kvt.run.folder import is_in_use
from kvt.study.forecast import Times, print_forecast
from kvt.study.grid import Run, varying_settings
from kvt.study.job import Job, forget, saved_steps, write_failure
from kvt.study.outcomes import FAULTY, TERMINAL, Fields, Outcome, Outcomes, State, iter_outcomes, seconds_of, tally
from kvt.study.workers import LocalWorkers, LostProcessError, RayCluster
from kvt.system.console import tell
from kvt.system.errors import UserError, require_positive
from kvt.system.files import require_folder, user_path
from kvt.system.hardware import cores

BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} runs, {elapsed} so far{postfix} left"
QUIET = 60.0  # least seconds between two lines of progress, printed if no terminal shows a bar
ATTEMPTS = 3  # a run fails after this number of deaths of its process without a new checkpoint in between
PAUSE = 1.0  # seconds between two checks whether another study has ended a run


def make_runs(
    runs: Sequence[Run],
    root: Path,
    *,
    workers: int | None = None,
    ray: str | None = None,
    retry_failed: bool = False,
    dry_run: bool = False,
    listed: bool = False,
    recorded: Outcomes = MappingProxyType({}),
) -> int:
    """Train the runs that are neither done nor recorded, as `kvt study run` does.

    Args:
        runs: the runs.
        root: folder of the study.
        workers: number of processes; default: the number of GPUs, or the number of cores if there is no GPU.
        ray: address of a Ray cluster that trains the runs; None: this machine.
        retry_failed: whether to train failed, damaged and outdated runs again.
        dry_run: whether to print an estimate of the time instead of training.
        listed: whether to list the runs with their states instead of training.
        recorded: a dict that maps names of runs to outcomes from a record. These runs are not trained again.

    Returns:
        The number of runs whose state is in `FAULTY`.
    """
    workers = (torch.cuda.device_count() or len(cores())) if workers is None else workers
    require_positive(workers=workers)
    require_folder(root, "--folder", write=False)
    data_dir = str(user_path(os.environ.get("KVT_DATA_DIR") or "data").resolve())
    names, times = varying_settings(runs), Times()
    unrecorded = [run for run in runs if not recorded.get(run.name)]
    found = zip(unrecorded, iter_outcomes(unrecorded, root), strict=True)
    known = ((run, recorded[run.name][0]) for run in runs if recorded.get(run.name))
    states, messages = {}, {}
    for run, outcome in chain(known, found):  # keeps no results and no histories, to save memory
        states[run.name], messages[run.name] = outcome.state, outcome.message
        if outcome.result:
            times.add(run, seconds_of(outcome.result))
    tell(tally(states.values()))
    if listed:
        for run in runs:
            tell(f"{states[run.name]:<10} {run.name} {run.describe(names)}")
    faulty = [run for run in runs if states[run.name] in FAULTY]
    alike: dict[tuple[State, str], list[Run]] = {}
    for run in [] if retry_failed else faulty:
        alike.setdefault((states[run.name], messages[run.name]), []).append(run)
    for (state, message), (first, *others) in alike.items():
        which = f"{first.describe(names)}{f' and {len(others)} more' if others else ''}"
        tell(f"{state} before, {which}: {message}; rerun with --retry_failed")
    todo = [run for run in runs if states[run.name] not in TERMINAL or (retry_failed and states[run.name] in FAULTY)]
    if dry_run:
        print_forecast(runs, states, todo, times, workers)
    if dry_run or listed:
        return 0
    if todo:
        try:
            with suppress(Timeout), locked(todo[0].folder(root)):
                pass
        except (OSError, NotImplementedError) as error:  # without locks, two processes could train the same run
            raise UserError(f"--folder {root}: cannot lock files there ({error}): choose another folder") from error
        for run in faulty if retry_failed else []:
            forget(run, root)
        left = {run.name: run for run in todo}
        begin = {"total": len(runs), "initial": len(runs) - len(todo), "smoothing": 0, "bar_format": BAR}
        engine = LocalWorkers(workers) if ray is None else RayCluster(ray)
        told = monotonic()
        ended = execute_runs(todo, root, data_dir, engine)
        estimate = times.left(todo, engine.workers)
        with closing(engine), closing(ended), tqdm(**begin, disable=None, postfix=estimate) as bar:
            for run, outcome in ended:
                if outcome.state == State.STUCK:
                    raise UserError(f"{outcome.message}; then rerun the same command")
                del left[run.name]
                states[run.name] = outcome.state
                if outcome.result:
                    times.add(run, seconds_of(outcome.result))
                bar.update()
                if not bar.disable or outcome.state in FAULTY:
                    about = outcome.message or headline(outcome.result)
                    bar.write(f"{outcome.state:<8} {run.describe(names)}  {about}")
                if monotonic() - told > (QUIET if bar.disable else PAUSE):  # seldom, because the estimate takes O(runs)
                    told = monotonic()
                    bar.set_postfix_str(remaining := times.left([*left.values()], engine.workers))
                    if left and bar.disable:
                        tell(f"{tally(states.values())}; {remaining} left")
        tell(tally(states.values()))
    return sum(state in FAULTY for state in states.values())


def execute_runs(
    runs: Sequence[Run], root: Path, data_dir: str, workers: LocalWorkers | RayCluster
) -> Generator[tuple[Run, Outcome]]:
    """Execute the runs. Yield each run and its outcome when this study, or another study in the folder, ends it."""
    threads = ThreadPoolExecutor(min(workers.threads, len(runs)))
    try:
        busy: list[Run] = []  # runs that another study is training
        while runs or busy:
            jobs = ((run, Job(run.config, run.folder(root), data_dir)) for run in runs)
            futures = {threads.submit(_outlive, workers, job): run for run, job in jobs}
            for future in as_completed(futures):
                run, outcome = futures[future], future.result()
                if outcome.state == State.LOCKED:
                    busy.append(run)
                else:
                    yield run, outcome
            waiting, runs, busy = busy, [], []
            for run in waiting:
                (busy if is_in_use(run.folder(root)) else runs).append(run)
            if not runs and busy:
                sleep(PAUSE)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _outlive(workers: LocalWorkers | RayCluster, job: Job) -> Outcome:
    """Train a run, and resume it if its process dies. After `ATTEMPTS` deaths without progress, the run has failed."""
    deaths, saved = 0, -1
    while True:
        try:
            return workers.make(job)
        except LostProcessError as error:
            steps = saved_steps(job.folder)
            deaths, saved = deaths + 1 if steps == saved else 1, steps
            if deaths == ATTEMPTS:
                return write_failure(job, f"its process died {ATTEMPTS} times, {error}")


def headline(result: Fields) -> str:
    """Return the test metrics of a finished run, or else the validation metrics, and the duration in seconds."""
    stage = "test" if any(name.startswith("test/") for name in result) else "val"
    numbers = [f"{name} {value:.4f}" for name, value in result.items() if name.startswith(f"{stage}/")]
    return "  ".join([*numbers, f"{seconds_of(result):.0f} s"])
