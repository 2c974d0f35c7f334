"""Parts of benchmarks/gpu.py: runs per hour, speed of text generation, and runs of the paper's Table 2."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter

import decoding
import torch
from gpu_checks import end_by
from gpu_report import CHECKOUT, FAILED, SO_FAR, Case, Part, Setting

from kvt.bench.table import number
from kvt.study.grid import Grid, Run, read_grid
from kvt.study.outcomes import State
from kvt.study.records import MANIFEST, widen_record
from kvt.study.runner import execute_runs
from kvt.study.workers import LocalWorkers, context_of_workers
from kvt.system.errors import UserError

CELL = {"dim": 64, "depth": 2, "length": 64}
"""Settings of a cell of medium size in Table 2."""


def processes(setting: Setting) -> Iterator[Case]:
    runs = read_grid("table2", scale_of(setting)).runs
    if setting.on_gpu:
        runs = tuple(run for run in runs if CELL.items() <= run.settings.items())
    for count in (1, 4, 16, 32) if setting.on_gpu else (2,):
        yield Case((str(count),), partial(runs_an_hour, runs[:count]))


def runs_an_hour(runs: Sequence[Run]) -> list[str]:
    """Train runs at the same time, each in a process; return the seconds until all have ended, and runs per hour."""
    with TemporaryDirectory() as folder, closing(LocalWorkers(len(runs))) as engine:
        process = context_of_workers().Process(target=os.getpid)
        process.start()
        process.join()  # modules are imported now, so further processes start at once
        begun = perf_counter()
        for _, outcome in execute_runs(runs, Path(folder), "data", engine):
            if outcome.state != State.FINISHED:
                raise RuntimeError(outcome.message)
        seconds = perf_counter() - begun
    return [number(seconds), f"{3600 * len(runs) / seconds:.0f}"]


PROCESSES = Part(
    """Whole runs of Table 2 (dim 64, depth 2, lists of 64 digits) that start together on one GPU, each in its own
    process. The time is until the last run has ended.""",
    ("processes", "seconds", "runs an hour"),
    processes,
    share=14,
)


def texts(setting: Setting) -> Iterator[Case]:
    torch.manual_seed(0)
    device = torch.device(setting.device)
    for part, attn in product(decoding.PARTS, ["kv", "kv+pos"] if setting.on_gpu else ["kv"]):
        for case in decoding.PARTS[part](attn, device):
            yield Case((part, attn, case.name), lambda case=case: decoding.row(case, 1)[1:])  # type: ignore[misc]
            if not setting.on_gpu:
                break


DECODING = Part(
    """Tokens per second of text generation, in one round; benchmarks/decoding.py describes the cases. "Theirs" is the
    paper's method.""",
    ("text", "attention", "how", "kvt, tokens/s", "theirs, tokens/s", "times as fast"),
    texts,
    share=8,
)

RUNS = CHECKOUT / "lightning_logs" / "gpu-runs"
PATIENCE = 15
"""Time in seconds for an interrupted study to end and to record its runs."""


def scale_of(setting: Setting) -> str:
    return "paper" if setting.on_gpu else "smoke"


def table2(setting: Setting) -> Iterator[Case]:
    yield Case((scale_of(setting),), partial(recorded, setting))


def recorded(setting: Setting) -> list[str]:
    """Train runs of Table 2 until the time is up, and record them each minute.

    The number of processes is the one with the most runs per hour in the part "processes".
    """
    grid = read_grid("table2", scale_of(setting))
    record = setting.out / grid.report
    measured = [row for row in setting.rows.get("processes", ()) if row[-1].isdecimal()]
    workers = max(measured, key=lambda row: int(row[-1]), default=("1",))[0]
    command = [sys.executable, "-m", "kvt", "study", "run", "table2", "--scale", grid.scale, "--workers", workers]
    command += ["--folder", str(RUNS), *(["--from", str(record)] if (record / MANIFEST).exists() else [])]
    with subprocess.Popen(command, cwd=CHECKOUT) as study:
        ends = setting.ends - PATIENCE
        while study.poll() is None and monotonic() < ends:
            try:
                study.wait(min(60, max(0, ends - monotonic())))
            except subprocess.TimeoutExpired:
                _record(grid, record)
        ended = end_by(study, 0)
    line = _record(grid, record)
    return [line if ended and study.returncode == 0 else f"{FAILED if ended else SO_FAR}{line}", workers]


def _record(grid: Grid, record: Path) -> str:
    """Record the runs that have ended; return the number of recorded runs, such as "12 of 540 runs"."""
    try:
        line = widen_record(grid, record, [RUNS])
    except UserError:  # no run has ended
        line = widen_record(grid, record, [])
    return line.partition(": ")[2].partition(", ")[0]


TABLE2 = Part(
    """Runs of the paper's grid of Table 2, in a record beside this report; the same command continues it.""",
    ("scale", "recorded", "processes"),
    table2,
    share=5,
)
