"""Studies at scale: the time to plan and to report many runs, and the file operations of a run in a shared folder.

`python benchmarks/study.py report --runs 100000` trains one small run, and writes its result for every run of a grid.
Then it plans, reads and reports the grid, and prints CPU seconds and peak memory. CPU seconds depend little on other
programs.

`python benchmarks/study.py operations` counts file operations in two real runs: files opened, renamed and removed,
folders created and listed.
"""

import argparse
import gc
import json
import random
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any, NamedTuple, TypeVar

import yaml

from kvt.bench.table import machine
from kvt.reports.report import write_report
from kvt.reports.tables import tables_of
from kvt.study.grid import Run, read_grid
from kvt.study.job import Job, execute
from kvt.study.outcomes import HISTORY, RESULT, State, read_outcomes
from kvt.system.console import collect_garbage_seldom
from kvt.system.files import read_json
from kvt.system.quoting import markdown_table

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
"""Python's audit events for operations of a file system."""


def many_runs(folder: Path, number: int, **axes: Any) -> Sequence[Run]:
    """Return about `number` runs of a grid of learning rates."""
    rates = [float(f"{1e-5 * 1.001**n:.6g}") for n in range(ceil(number / len(ATTENTIONS) / len(TASKS) / len(SEEDS)))]
    content = {"tasks": TASKS, "axes": {"attn": ATTENTIONS, **SMALL, "lr": rates, **axes}, "seeds": SEEDS}
    (folder / "many.yaml").write_text(yaml.safe_dump(content))
    return read_grid(folder / "many.yaml").runs


def make_one(folder: Path, **axes: Any) -> Path:
    """Train a small run and return its folder."""
    run = many_runs(folder, 1, **axes)[0]
    made = run.folder(folder / "one")
    if (outcome := execute(Job(run.config, made, str(folder / "data")))).state != State.FINISHED:
        raise RuntimeError(outcome.message)
    return made


# ---- Plan and report ------------------------------------------------------------------------------


def copy_result(of: Path, runs: Sequence[Run], root: Path) -> None:
    """Write the result of one run into the folders of others, with their configurations and random metrics."""
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
    gc.freeze()  # imported objects are not garbage; `kvt study` does the same
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
        print("", markdown_table([["", "processor seconds", "most memory so far, GB"], *rows]), sep="\n")


# ---- File operations of a run -----------------------------------------------------------------------------


class Operations(NamedTuple):
    """Numbers of file operations in the shared folder: of a run without checkpoints, and of each checkpoint."""

    run: float
    checkpoint: float


def count_operations() -> Operations:
    """Return the file operations of real runs, counted in a run with two checkpoints and in one with eight."""
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
    """Context manager: count audit events of files in a folder.

    Python cannot remove an audit hook, so it does nothing afterwards.
    """
    found, active, within = Counter[str](), [True], str(folder)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if active and event in EVENTS and str(arguments[0]).startswith(within):
            found[event] += 1

    sys.addaudithook(hook)
    yield found
    active.clear()


def operations(asked: argparse.Namespace) -> None:
    found = count_operations()
    print(f"{found.run:.0f} operations a run, and {found.checkpoint:.0f} a checkpoint")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("report", "operations"))
    parser.add_argument("--runs", type=int, default=100_000)
    asked = parser.parse_args(argv)
    {"report": report, "operations": operations}[asked.what](asked)


if __name__ == "__main__":
    main()
