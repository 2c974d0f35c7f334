"""Trains the runs of a grid that are not done yet."""

import os
import signal
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime, timedelta
from math import ceil, log, prod
from pathlib import Path
from statistics import fmean
from time import sleep
from types import MappingProxyType
from typing import Any

import pandas as pd
import torch

from kvt.run.folder import LAST, empty, is_in_use
from kvt.study.grid import Run, varying_settings
from kvt.study.outcomes import ERROR, TERMINAL, Outcome, Outcomes, State, read_outcome, tally
from kvt.study.workers import Job, LocalWorkers, RayCluster, claimed, write_error
from kvt.system import UserError, printable, require_folder, require_positive, say, signals_handled, tell, user_path
from kvt.tune import cores

CLUSTER_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # announce that a cluster will end a process
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
    failed: dict[str, list[Run]] = {}  # by message
    for run in runs:
        outcome = next(iter(recorded.get(run.name, ())), None) or read_outcome(run.folder(root), run.config)
        states[run.name] = outcome.state
        times.add(run, outcome.result)
        if outcome.state == State.FAILED:
            failed.setdefault(outcome.message, []).append(run)
    tell(tally(states.values()))
    for run in runs if listed else ():
        tell(f"{states[run.name]:<10} {run.name} {run.describe(names)}")
    for message, (first, *others) in {} if retry_failed else failed.items():
        which = f"{first.describe(names)}{f' and {len(others)} more' if others else ''}"
        tell(f"failed before, {which}, {os.path.relpath(first.folder(root))}: {message}; rerun with --retry_failed")
    done = (State.FINISHED, State.DIVERGED) if retry_failed else TERMINAL
    todo = [run for run in runs if states[run.name] not in done]
    if dry_run:
        print_forecast(runs, states, todo, times, workers)
    if dry_run or listed or not todo:
        return 0 if dry_run or listed else sum(map(len, failed.values()))
    try:
        for run in [todo[0], *(run for alike in failed.values() for run in alike if retry_failed)]:
            forget(run, root)
    except (OSError, NotImplementedError) as error:  # without locks, two processes could train the same run
        raise UserError(f"--folder {root}: cannot lock files there ({error}): choose another folder") from error
    left = {run.name: run for run in todo}
    try:
        engine = LocalWorkers(workers) if ray is None else RayCluster(ray)
        with closing(engine), signals_handled(_stop, CLUSTER_SIGNALS):
            for run, outcome in execute_runs(todo, root, engine):
                del left[run.name]
                states[run.name] = outcome.state
                times.add(run, outcome.result)
                about = f"{outcome.state:<8} {run.describe(names)}  {outcome.message or headline(outcome.result)}"
                ended = f"[{len(runs) - len(left)}/{len(runs)}] {about}"
                tell(f"{ended}; {times.left([*left.values()], engine.workers)} left" if left else ended)
    except (KeyboardInterrupt, SystemExit):
        say(f"{len(left)} of {len(runs)} runs are left: the same command continues them")
        raise
    tell(tally(states.values()))
    return sum(state == State.FAILED for state in states.values())


def _stop(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def forget(run: Run, root: Path) -> None:
    """Make a failed run one to resume, or one to train from the beginning if its files are not those of the run."""
    folder = run.folder(root)
    with claimed(folder) as mine:
        if mine:
            (folder / ERROR).unlink(missing_ok=True)
            if read_outcome(folder, run.config).state == State.FAILED:
                empty(folder)


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
            run, last = started.pop(job.folder), job.folder / LAST
            outcome = read_outcome(job.folder, job.config)
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
    """Estimates of the time of runs from known runs on a GPU, if this machine has one, or else on CPUs."""

    def __init__(self) -> None:
        self.known: dict[bool, dict[str, tuple[Run, list[float]]]] = {True: {}, False: {}}  # by GPU and `Run.shape`
        self.machines: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}

    @property
    def kind(self) -> bool:
        here = torch.cuda.is_available()
        return here if self.known[here] else not here

    def add(self, run: Run, result: Mapping[str, Any]) -> None:
        if result:
            span = [datetime.fromisoformat(result[name]) for name in ("started", "finished") if name in result]
            seconds = max(result["seconds"], (span[-1] - span[0]).total_seconds() if span else 0.0)
            gpus = result["machine"]["gpus"]
            self.known[bool(gpus)].setdefault(run.shape, (run, []))[1].append(seconds)
            self.machines[bool(gpus)][gpus[0] if gpus else result["machine"]["processor"]] += 1

    def seconds(self, run: Run) -> float:
        """Return the mean of runs with the same shape, else of the task's runs of the nearest size, scaled by size."""
        known = self.known[self.kind]
        alike = [known[run.shape]] if run.shape in known else [one for one in known.values() if one[0].task == run.task]
        nearest, seconds = min(alike or known.values(), key=lambda one: abs(log(_size(one[0]) / _size(run))))
        return fmean(seconds) * _size(run) / _size(nearest)

    def left(self, runs: Sequence[Run], workers: int) -> str:
        """Return the estimated total time of `runs` with `workers` workers, such as "about 0:12:30"."""
        if not self.known[self.kind]:
            return "unknown time"
        seconds = {run.shape: self.seconds(run) for run in {run.shape: run for run in runs}.values()}
        return f"about {timedelta(seconds=ceil(sum(seconds[run.shape] for run in runs) / workers))}"


def _size(run: Run) -> float:
    """Return width × depth × length, to which the time of a run is roughly proportional."""
    return float(prod(run.value(name) or 1 for name in ("dim", "depth", "length")))


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
    machines = ", ".join(f"{count} runs on {name}" for name, count in times.machines[times.kind].most_common())
    source = f", estimated from {machines}" if machines else ""
    tell(f"{len(todo)} to run: {times.left(todo, workers)} with {workers} worker{'s' * (workers > 1)}{source}")
