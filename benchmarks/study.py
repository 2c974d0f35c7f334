"""Studies at scale: the time to plan and to report many runs, and a cluster whose workers die.

`python benchmarks/study.py report --runs 100000` makes one small run, writes its result for every run of a grid, and
plans, reads and reports that: processor seconds, to which other programs add little, and the most memory.

`python benchmarks/study.py cluster` gives the loop of `kvt study run` simulated workers, each of which dies at random
and comes back. What a run asks of the shared folder is counted in real ones: files opened, renamed and removed, folders
made and listed. With --latency each of these takes so long.
"""

import argparse
import gc
import json
import random
import resource
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from math import ceil, inf
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any, NamedTuple, TypeVar

import yaml

from kvt.bench.table import machine, table
from kvt.reports.report import write_report
from kvt.reports.tables import tables_of
from kvt.run.results import read_json
from kvt.study.grid import Run, read_grid
from kvt.study.job import Job, execute
from kvt.study.outcomes import HISTORY, RESULT, Outcome, State, read_outcomes
from kvt.study.runner import execute_runs
from kvt.study.workers import ATTEMPTS, QUEUED, Deaths, Ended
from kvt.system.console import collect_garbage_seldom

Value = TypeVar("Value")

ATTENTIONS, TASKS, SEEDS = ["qkv", "kv", "kv+pos", "k", "q-kv"], ["reverse", "sort"], [0, 1, 2, 3, 4]
SMALL: dict[str, Any] = {
    "dim": 16,
    "depth": 1,
    "heads": 2,
    "train_size": 480,
    "val_size": 64,
    "test_size": 64,
    "batch_size": 16,
}
SMALL |= {"max_epochs": 2, "log_every_n_steps": 3, "accelerator": "cpu"}
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "os.chmod", "os.utime"}
"""Python's audit events that ask something of a file system."""


def many_runs(folder: Path, number: int, **axes: Any) -> Sequence[Run]:
    """Return about so many runs, of as many learning rates."""
    rates = [float(f"{1e-5 * 1.001**n:.6g}") for n in range(ceil(number / len(ATTENTIONS) / len(TASKS) / len(SEEDS)))]
    content = {"tasks": TASKS, "axes": {"attn": ATTENTIONS, **SMALL, "lr": rates, **axes}, "seeds": SEEDS}
    (folder / "many.yaml").write_text(yaml.safe_dump(content))
    return read_grid(folder / "many.yaml").runs


def make_one(folder: Path, **axes: Any) -> Path:
    """Make a small run and return its folder."""
    run = many_runs(folder, 1, **axes)[0]
    made = run.folder(folder / "one")
    if (outcome := execute(Job(run.config, made, str(folder / "data")))).state != State.FINISHED:
        raise RuntimeError(outcome.message)
    return made


# ---- Plan and report ------------------------------------------------------------------------------


def copy_result(of: Path, runs: Sequence[Run], root: Path) -> None:
    """Write the result of one run for others, each with its own configuration and random numbers."""
    result, history, rng = read_json(of / RESULT) or {}, (of / HISTORY).read_bytes(), random.Random(0)
    stored = result["config"]
    for run in runs:
        (folder := run.folder(root)).mkdir(parents=True)
        config = replace(run.config, trainer=stored["trainer"] | run.config.trainer).as_dict()
        own = {"task": run.task, "attn": run.attention, "seed": run.seed, "config": config}
        (folder / RESULT).write_text(json.dumps(result | {n: rng.random() for n in result if "/" in n} | own, indent=2))
        (folder / HISTORY).write_bytes(history)


def measured(name: str, rows: list[list[str]], call: Callable[[], Value]) -> Value:
    begun = process_time()
    value = call()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    rows.append([name, f"{process_time() - begun:.1f}", f"{memory / 1e9:.2f}"])
    return value


def report(asked: argparse.Namespace) -> None:
    gc.freeze()  # what is imported is no garbage, as in `kvt study`
    collect_garbage_seldom()
    with TemporaryDirectory() as name:
        folder, rows = Path(name), list[list[str]]()
        one = make_one(folder)
        copy_result(one, many_runs(folder, asked.runs), folder / "runs")
        grid = measured("plan", rows, lambda: read_grid(folder / "many.yaml"))
        measured("its tables", rows, lambda: tables_of(grid))
        outcomes = measured("read", rows, lambda: read_outcomes(grid.runs, folder / "runs"))
        measured("report", rows, lambda: write_report(grid, outcomes, folder / "report"))
        lines = len((one / HISTORY).read_text().splitlines()) - 1
        print(f"{machine('cpu')}; {len(grid.runs):,} runs, each with a history of {lines} rows")
        print("", table(["", "processor seconds", "most memory so far, GB"], rows), sep="\n")


# ---- A cluster ------------------------------------------------------------------------------------


class Operations(NamedTuple):
    """What a run asks of the shared folder: from start to end, and besides at each checkpoint."""

    run: float
    checkpoint: float


def count_operations() -> Operations:
    """Count the operations in the folder of a study of two real runs, with two checkpoints and with eight."""
    counts = []
    with TemporaryDirectory() as name:
        for checkpoints in (2, 8):
            with counted(Path(name) / "one") as found:
                make_one(Path(name), val_check_interval=SMALL["max_epochs"] / checkpoints)
            counts.append(found.total())
    each = (counts[1] - counts[0]) / 6
    return Operations(counts[0] - 2 * each, each)


@contextmanager
def counted(folder: Path) -> Iterator[Counter[str]]:
    """Count the audit events that concern files in a folder; Python keeps the hook, which then does nothing."""
    found, active, within = Counter[str](), [True], str(folder)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if active and event in EVENTS and str(arguments[0]).startswith(within):
            found[event] += 1

    sys.addaudithook(hook)
    yield found
    active.clear()


class Cluster:
    """Simulated workers, in place of `RayCluster`: a job goes on from its last checkpoint when its worker dies.

    Args:
        workers: how many there are.
        seconds: of training in a run.
        checkpoints: of a run.
        deaths: of a worker in a second, on average.
        operations: of a run.
        start: seconds from a job to its first step.
        away: seconds until a worker that died is back.
        latency: seconds of an operation.
    """

    def __init__(
        self,
        workers: int,
        seconds: float,
        checkpoints: int,
        deaths: float,
        operations: Operations,
        start: float = 15.0,
        away: float = 120.0,
        latency: float = 0.0,
    ) -> None:
        self.workers, self._checkpoints, self._rate, self._away = workers, checkpoints, deaths, away
        self._operations, self._training = operations, seconds / checkpoints
        self._before = start + latency * operations.run
        self._each = self._training + latency * operations.checkpoint
        self._idle, self._jobs = workers, 0
        self._queue: deque[Job] = deque()
        self._events: list[tuple[float, int, Job | None, int | None]] = []
        self._number, self._random, self._deaths = count(), random.Random(0), Deaths()
        self._saved: Counter[str] = Counter()  # checkpoints, by run
        self.now = self.lost = 0.0
        self.died, self.finished, self.asked = Counter[str](), Counter[str](), Counter[int]()

    @property
    def room(self) -> bool:
        return self._jobs < QUEUED * self.workers

    @property
    def busy(self) -> bool:
        return self._jobs > 0

    def submit(self, job: Job) -> None:
        self._jobs += 1
        self._queue.append(job)
        self._begin()

    def wait(self, seconds: float | None = None) -> Ended:
        """Return the next job that ends."""
        while True:
            self.now, _, job, saved = heappop(self._events)
            ended = None
            if job is None:
                self._idle += 1
            elif saved is None:
                self._idle += 1
                self.finished[job.folder.name] += 1
                ended = job, Outcome(State.FINISHED)
            elif self._has_died(job, saved):
                ended = job, Outcome(State.FAILED)
            self._begin()
            if ended:
                self._jobs -= 1
                return ended

    def close(self) -> None:
        pass

    def _begin(self) -> None:
        """Give waiting jobs to idle workers: each ends, or its worker dies before."""
        while self._queue and self._idle:
            job = self._queue.popleft()
            self._idle -= 1
            left = self._checkpoints - self._saved[job.folder.name]
            needed = self._before + left * self._each
            lives = self._random.expovariate(self._rate) if self._rate else inf
            saved = None
            if lives < needed:
                saved = max(0, int((lives - self._before) / self._each))
                self.lost += max(0.0, lives - self._before) - saved * self._each
            made = left if saved is None else saved
            self.asked[int(self.now // 60)] += round(self._operations.run)
            for n in range(made):
                self.asked[int((self.now + self._before + n * self._each) // 60)] += round(self._operations.checkpoint)
            heappush(self._events, (self.now + min(lives, needed), next(self._number), job, saved))

    def _has_died(self, job: Job, saved: int) -> bool:
        """Count a death and give the job to the next worker, unless it has failed."""
        name = job.folder.name
        heappush(self._events, (self.now + self._away, next(self._number), None, None))
        self.died[name] += 1
        self._saved[name] += saved
        if self._deaths.are_enough(name, self._saved[name]):
            return True
        self._queue.appendleft(job)
        return False


def simulate(runs: Sequence[Run], cluster: Cluster) -> Counter[State]:
    """Execute runs on a cluster as `kvt study run` does; return how many came to which state."""
    return Counter(outcome.state for _, outcome in execute_runs(runs, Path("runs"), "data", cluster))  # type: ignore[arg-type]


def cluster(asked: argparse.Namespace) -> None:
    operations = count_operations()
    with TemporaryDirectory() as name:
        runs = many_runs(Path(name), asked.runs)
    asks = f"{operations.run:.0f} operations a run and {operations.checkpoint:.0f} a checkpoint"
    print(f"{len(runs):,} runs of {asked.checkpoints} checkpoints; {asks}.", end=" ")
    print(f"{asked.workers:,} workers, of which {asked.deaths:g} % die a minute.")
    rows = []
    for minutes in asked.minutes:
        for latency in asked.latency:
            size = asked.workers, 60 * minutes, asked.checkpoints, asked.deaths / 100 / 60, operations
            fleet = Cluster(*size, latency=latency / 1000)
            states = simulate(runs, fleet)
            often = sum(number >= ATTEMPTS for number in fleet.died.values())
            load = f"{fleet.asked.total() / fleet.now:,.0f}", f"{max(fleet.asked.values()) / 60:,.0f}"
            trained = 60 * minutes * len(runs)
            counts = f"{fleet.died.total():,}", f"{often:,}", f"{states[State.FAILED]:,}"
            about = f"{minutes:g}", f"{latency:g}", f"{fleet.now / 3600:.1f}", f"{100 * fleet.lost / trained:.2f}"
            rows.append([*about, *counts, *load])
    heads = ["minutes a run", "ms an operation", "hours", "trained again, %", "deaths"]
    heads += [f"runs that died {ATTEMPTS} times", "failed", "operations a second", "in the worst minute"]
    print("", table(heads, rows), sep="\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("report", "cluster"))
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--deaths", type=float, default=1.0, help="of a hundred workers in a minute")
    parser.add_argument("--minutes", type=float, nargs="+", default=[5.0, 30.0, 120.0], help="of training in a run")
    parser.add_argument("--checkpoints", type=int, default=10, help="of a run")
    parser.add_argument("--latency", type=float, nargs="+", default=[0.0, 20.0], help="milliseconds of an operation")
    asked = parser.parse_args(argv)
    {"report": report, "cluster": cluster}[asked.what](asked)


if __name__ == "__main__":
    main()
