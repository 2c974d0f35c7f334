"""Trains the runs of a grid that are not done yet."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime, timedelta
from math import ceil, log
from pathlib import Path
from statistics import fmean
from time import sleep
from typing import Any

import torch

from kvt.run.folder import LAST, is_in_use
from kvt.study.grid import Run, varying_settings
from kvt.study.outcomes import TERMINAL, Outcome, Outcomes, State, read_outcome, tally
from kvt.study.workers import Job, LocalWorkers, RayCluster, forget, write_error
from kvt.system import require_folder, require_positive, say, signals_handled, table, tell, user_path
from kvt.tune import cores

CLUSTER_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # announce that a cluster will end a process
ATTEMPTS = 3  # a run fails after this number of deaths of its process without a new checkpoint in between
PAUSE = 1.0  # seconds between two checks whether other commands still train the runs that are left


def make_runs(
    runs: Sequence[Run],
    root: Path,
    *,
    workers: int | None = None,
    ray: str | None = None,
    retry_failed: bool = False,
    dry_run: bool = False,
    listed: bool = False,
    recorded: Outcomes | None = None,
) -> int:
    """Train the runs that have not ended, as `kvt study run` does; return the number of failed runs.

    `root` is the folder of the study. `recorded` maps names of runs to outcomes from records or other folders. These
    runs are not trained. `listed` is the flag --list. Failed runs include runs that failed before and are not retried.
    With `dry_run` or `listed`, train nothing and return 0.
    """
    workers = (torch.cuda.device_count() or len(cores())) if workers is None else workers
    require_positive(workers=workers)
    require_folder(root, "--folder", write=False)
    names, times, states, failed = varying_settings(runs), Times(), dict[str, State](), list[tuple[Run, str]]()
    for run in runs:
        outcome = next(iter((recorded or {}).get(run.name, ())), None) or read_outcome(run.folder(root), run.config)
        states[run.name] = outcome.state
        times.add(run, outcome.result)
        if outcome.state == State.FAILED:
            failed.append((run, outcome.message))
    tell(tally(states.values()))
    for run in runs if listed else ():
        tell(f"{states[run.name]:<10} {run.name} {run.describe(names)}")
    for run, message in [] if retry_failed else failed:
        where = os.path.relpath(run.folder(root))
        tell(f"failed before, {run.describe(names)}, {where}: {message}; rerun with --retry_failed")
    done = (State.FINISHED, State.DIVERGED) if retry_failed else TERMINAL
    left = {run.name: run for run in runs if states[run.name] not in done}
    if dry_run:
        print_forecast(runs, left, times, workers)
    if dry_run or listed or not left:
        return 0 if dry_run or listed else len(failed)
    for run, _ in failed if retry_failed else ():
        forget(run.folder(root), run.config)
    try:
        engine = LocalWorkers(workers) if ray is None else RayCluster(ray)
        with closing(engine), signals_handled(lambda number, _: sys.exit(128 + number), CLUSTER_SIGNALS):
            for run, outcome in execute_runs([*left.values()], root, engine):
                del left[run.name]
                states[run.name] = outcome.state
                times.add(run, outcome.result)
                about = f"{outcome.state:<8} {run.describe(names)}  {outcome.message or headline(outcome.result)}"
                rest = f"; {times.left(left.values(), engine.workers)} left" if left else ""
                tell(f"[{len(runs) - len(left)}/{len(runs)}] {about}{rest}")
    except (KeyboardInterrupt, SystemExit):
        say(f"{len(left)} of {len(runs)} runs are left: the same command continues them")
        raise
    tell(tally(states.values()))
    return sum(state == State.FAILED for state in states.values())


def execute_runs(runs: Sequence[Run], root: Path, workers: LocalWorkers | RayCluster) -> Iterator[tuple[Run, Outcome]]:
    """Execute the runs. Yield each with its outcome after it has ended, in this command or in another that uses `root`.

    A run whose process dies is resumed; see `ATTEMPTS`.
    """
    data_dir = str(user_path(os.environ.get("KVT_DATA_DIR") or "data").resolve())
    todo, started = [*runs], dict[Path, Run]()
    deaths: Counter[tuple[Path, float]] = Counter()  # of runs' processes, by folder and time of the last checkpoint
    while todo or started:
        while workers.free and (run := next((run for run in todo if not is_in_use(run.folder(root))), None)):
            todo.remove(run)
            started[run.folder(root)] = run
            workers.start(Job(run.config, run.folder(root), data_dir))
        if not started:  # other commands train all runs that are left
            sleep(PAUSE)
        for job, died in workers.wait(PAUSE) if started else ():
            run, last = started.pop(job.folder), job.folder / LAST
            key = job.folder, last.stat().st_mtime if last.exists() else 0.0
            deaths[key] += bool(died)
            if deaths[key] == ATTEMPTS:
                write_error(job.folder, f"its process died {ATTEMPTS} times, {died}; was the memory full?")
            outcome = read_outcome(job.folder, job.config)
            if outcome.state in TERMINAL:
                yield run, outcome
            else:
                todo.append(run)


def headline(result: Mapping[str, Any]) -> str:
    """Return a line with a run's test metrics, or else its validation metrics, and its training time."""
    stage = "test" if any(name.startswith("test/") for name in result) else "val"
    numbers = [f"{name} {value:.4f}" for name, value in result.items() if name.startswith(f"{stage}/")]
    return "  ".join([*numbers, f"{result['seconds']:.0f} s"])


class Times:
    """Estimates run times from runs passed to `add`: runs on GPUs if this machine has a GPU, else runs on CPUs."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, float], list[float]] = {}  # maps task and size to the runs' seconds
        self.machines: Counter[str] = Counter()

    def add(self, run: Run, result: Mapping[str, Any]) -> None:
        gpus = result["machine"]["gpus"] if result else []
        if result and bool(gpus) == torch.cuda.is_available():
            span = [datetime.fromisoformat(result[name]) for name in ("started", "finished") if name in result]
            seconds = max(result["seconds"], (span[-1] - span[0]).total_seconds() if span else 0.0)
            self.known.setdefault((run.task, run.size), []).append(seconds)
            self.machines[gpus[0] if gpus else result["machine"]["processor"]] += 1

    def left(self, runs: Iterable[Run], workers: int) -> str:
        """Return the time that `workers` workers need for `runs`, such as "about 0:12:30", or "unknown time".

        The time of a run is the mean time of known runs of its task with the nearest size, scaled by size. If no run of
        its task is known, runs of all tasks count. If no run at all is known, the time is unknown.
        """
        seconds = 0.0
        for (task, size), count in Counter((run.task, run.size) for run in runs).items():
            if not (alike := [one for one in self.known if one[0] == task] or [*self.known]):
                return "unknown time"
            nearest = min(alike, key=lambda one: abs(log(one[1] / size)))
            seconds += count * fmean(self.known[nearest]) * size / nearest[1]
        return f"about {timedelta(seconds=ceil(seconds / workers))}"


def print_forecast(runs: Sequence[Run], left: Mapping[str, Run], times: Times, workers: int) -> None:
    """Print the number of runs that are left, and their estimated time, for each task and for all tasks."""
    rows = {}
    for task, count in Counter(run.task for run in runs).items():
        mine = [run for run in left.values() if run.task == task]
        rows[task] = f"{len(mine)} of {count} runs to do, {times.left(mine, workers)}"
    tell(table(rows))
    machines = ", ".join(f"{count} runs on {name}" for name, count in times.machines.most_common())
    source = f", estimated from {machines}" if machines else ""
    tell(f"{len(left)} to run: {times.left(left.values(), workers)} with {workers} worker{'s' * (workers > 1)}{source}")
