"""Trains the runs of a grid that are not done yet."""

import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from math import ceil
from pathlib import Path
from statistics import fmean
from time import monotonic, sleep
from types import MappingProxyType
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

from kvt.run.folder import empty, is_in_use, last_checkpoint
from kvt.study.grid import Run, varying_settings
from kvt.study.outcomes import ERROR, TERMINAL, Outcome, Outcomes, State, read_outcome, tally
from kvt.study.workers import Job, LocalWorkers, RayCluster, claimed, write_error
from kvt.system.console import say, tell
from kvt.system.errors import UserError, require_positive
from kvt.system.files import require_folder, user_path
from kvt.system.hardware import cores
from kvt.system.quoting import printable

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
        retry_failed: whether to train failed runs again.
        dry_run: whether to print an estimate of the time instead of training.
        listed: whether to list the runs with their states instead of training.
        recorded: a dict that maps names of runs to outcomes from a record. These runs are not trained again.

    Returns:
        The number of failed runs.
    """
    workers = (torch.cuda.device_count() or len(cores())) if workers is None else workers
    require_positive(workers=workers)
    require_folder(root, "--folder", write=False)
    names, times, states = varying_settings(runs), Times(), dict[str, State]()
    alike: dict[str, list[Run]] = {}  # failed runs by message
    for run in runs:
        known = recorded.get(run.name)
        outcome = known[0] if known else read_outcome(run.folder(root), run.config)
        states[run.name] = outcome.state
        times.add(run, outcome.result)
        if outcome.state == State.FAILED:
            alike.setdefault(outcome.message, []).append(run)
    tell(tally(states.values()))
    for run in runs if listed else ():
        tell(f"{states[run.name]:<10} {run.name} {run.describe(names)}")
    for message, (first, *others) in {} if retry_failed else alike.items():
        which = f"{first.describe(names)}{f' and {len(others)} more' if others else ''}"
        place = printable(os.path.relpath(first.folder(root)))
        tell(f"failed before, {which}, {place}: {message}; rerun with --retry_failed")
    done = (State.FINISHED, State.DIVERGED) if retry_failed else TERMINAL
    todo = [run for run in runs if states[run.name] not in done]
    if dry_run:
        print_forecast(runs, states, todo, times, workers)
    if dry_run or listed:
        return 0
    if todo:
        try:
            for run in [todo[0], *(run for failed in alike.values() for run in failed if retry_failed)]:
                forget(run, root)
        except (OSError, NotImplementedError) as error:  # without locks, two processes could train the same run
            raise UserError(f"--folder {root}: cannot lock files there ({error}): choose another folder") from error
        train_all(todo, root, LocalWorkers(workers) if ray is None else RayCluster(ray), states, times, names)
        tell(tally(states.values()))
    return sum(state == State.FAILED for state in states.values())


def forget(run: Run, root: Path) -> None:
    """Make a failed run one to resume, or one to train from the beginning if its files are not those of the run."""
    folder = run.folder(root)
    with claimed(folder) as mine:
        if mine:
            (folder / ERROR).unlink(missing_ok=True)
            if read_outcome(folder, run.config).state == State.FAILED:
                empty(folder)


def train_all(
    todo: Sequence[Run],
    root: Path,
    workers: LocalWorkers | RayCluster,
    states: dict[str, State],
    times: "Times",
    names: Sequence[str],
) -> None:
    """Train runs, show the progress, and keep `states` and `times` up to date."""
    left = {run.name: run for run in todo}
    begin = {"total": len(states), "initial": len(states) - len(todo), "smoothing": 0, "bar_format": BAR}
    ended, told = execute_runs(todo, root, workers), monotonic()
    try:
        with closing(workers), tqdm(**begin, disable=None, postfix=times.left(todo, workers.workers)) as bar:
            for run, outcome in ended:
                del left[run.name]
                states[run.name] = outcome.state
                times.add(run, outcome.result)
                bar.update()
                if not bar.disable or outcome.state == State.FAILED:
                    about = outcome.message or headline(outcome.result)
                    bar.write(f"{outcome.state:<8} {run.describe(names)}  {about}")
                if monotonic() - told > (QUIET if bar.disable else PAUSE):  # seldom, because the estimate takes O(runs)
                    told = monotonic()
                    bar.set_postfix_str(remaining := times.left([*left.values()], workers.workers))
                    if left and bar.disable:
                        tell(f"{tally(states.values())}; {remaining} left")
    except (KeyboardInterrupt, SystemExit):
        say(f"{len(left)} of {len(states)} runs are left: the same command continues them")
        raise


def execute_runs(runs: Sequence[Run], root: Path, workers: LocalWorkers | RayCluster) -> Iterator[tuple[Run, Outcome]]:
    """Execute the runs. Yield each run and its outcome when this study, or another study in the folder, ends it.

    A run whose process dies is resumed. After `ATTEMPTS` deaths without a new checkpoint in between, it has failed.
    """
    data_dir = str(user_path(os.environ.get("KVT_DATA_DIR") or "data").resolve())
    todo, busy = deque(runs), list[Run]()  # another study trains the runs in `busy`
    started: dict[Path, Run] = {}
    deaths: Counter[tuple[Path, float]] = Counter()  # by folder and time of the last checkpoint
    while todo or busy or started:
        while todo and workers.free:
            run = todo.popleft()
            started[run.folder(root)] = run
            workers.start(Job(run.config, run.folder(root), data_dir))
        if not started:
            sleep(PAUSE)
        for job, died in workers.wait(PAUSE if busy else None) if started else ():
            run, outcome = started.pop(job.folder), read_outcome(job.folder, job.config)
            last = last_checkpoint(job.folder)
            key = job.folder, last.stat().st_mtime if last.exists() else 0.0
            deaths[key] += bool(died)
            if deaths[key] == ATTEMPTS and outcome.state not in TERMINAL:
                write_error(job.folder, f"its process died {ATTEMPTS} times, {died}; was the memory full?")
                outcome = read_outcome(job.folder, job.config)
            if outcome.state in TERMINAL:
                yield run, outcome
            else:
                (todo if died else busy).append(run)
        waiting, busy = busy, []
        for run in waiting:
            (busy if is_in_use(run.folder(root)) else todo).append(run)


def headline(result: Mapping[str, Any]) -> str:
    """Return the test metrics of a finished run, or else the validation metrics, and the seconds of training."""
    stage = "test" if any(name.startswith("test/") for name in result) else "val"
    numbers = [f"{name} {value:.4f}" for name, value in result.items() if name.startswith(f"{stage}/")]
    return "  ".join([*numbers, f"{result['seconds']:.0f} s"])


class Times:
    """Estimates of a run's time: the mean time of known runs with the same `Run.shape`, or else of all known shapes."""

    def __init__(self) -> None:
        self.known: dict[str, list[float]] = {}

    def add(self, run: Run, result: Mapping[str, Any]) -> None:
        if result:
            self.known.setdefault(run.shape, []).append(result["seconds"])

    def left(self, runs: Sequence[Run], workers: int) -> str:
        """Return the estimated total time of `runs` with `workers` workers, such as "about 0:12:30"."""
        if not self.known:
            return "unknown time"
        mean = {shape: fmean(seconds) for shape, seconds in self.known.items()}
        default = fmean(mean.values())
        seconds = sum(mean.get(run.shape, default) for run in runs) / workers
        return f"about {timedelta(seconds=ceil(seconds))}"


def print_forecast(
    runs: Sequence[Run], states: Mapping[str, State], todo: Sequence[Run], times: Times, workers: int
) -> None:
    """Print for each task the number of runs in each state, and the estimated time of the runs in `todo`."""
    rows = {}
    for task in dict.fromkeys(run.task for run in runs):
        counts = Counter(states[run.name] for run in runs if run.task == task)
        mine = [run for run in todo if run.task == task]
        shown = {str(state): counts[state] for state in TERMINAL}
        rows[printable(task)] = {"runs": counts.total(), **shown, "to do": len(mine), "time": times.left(mine, workers)}
    tell(pd.DataFrame.from_dict(rows, orient="index").to_string())
    tell(f"{len(todo)} to run: {times.left(todo, workers)} with {workers} worker{'s' * (workers > 1)}")
