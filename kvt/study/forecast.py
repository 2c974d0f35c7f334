"""A dry run: estimates of the time that runs take, from finished runs or a few timed batches."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import ceil, isfinite
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter

import pandas as pd
import torch
from lightning.pytorch.callbacks import Timer
from tqdm import tqdm

from kvt.run.config import RunConfig
from kvt.run.run import build, fit
from kvt.study.grid import Run
from kvt.study.job import on_one_device, reason
from kvt.study.outcomes import TERMINAL, State
from kvt.study.workers import places, seconds_to_start
from kvt.system.console import tell
from kvt.system.errors import UserError
from kvt.system.quoting import printable

TIMEOUT_SECONDS = 60.0  # after which no other run is timed
TIMED_SECONDS = 0.5  # of training
HELD_OUT = 2  # timed batches of validation


def time_runs(runs: Sequence[Run], data_dir: str, threads: int, times: "Times") -> None:
    """Estimate each run's time from a few of its steps, for a minute in all; print why one cannot be timed."""
    torch.set_num_threads(threads)
    deadline = monotonic() + TIMEOUT_SECONDS
    for run in tqdm(random.Random(0).sample(runs, len(runs)), desc="timing a few steps", leave=False, disable=None):
        if monotonic() > deadline:
            return
        try:
            times.add(run, _seconds(run.config, data_dir))
        except Exception as error:
            tqdm.write(printable(f"{run.task} {run.attention} cannot be timed: {reason(error)}"))


def _seconds(config: RunConfig, data_dir: str) -> float:
    """Train for half a second, validate a few batches, and scale both up to the whole run."""
    timer = Timer(timedelta(seconds=TIMED_SECONDS))
    trainer = {"logger": "none", "limit_val_batches": HELD_OUT, "min_epochs": None, "min_steps": None}
    begun = perf_counter()
    with TemporaryDirectory() as folder:
        run = build(on_one_device(config, data_dir, enable_checkpointing=False, **trainer))
        result = fit(run, Path(folder) / "run", test=False, callbacks=[timer], quiet=True)
    around = perf_counter() - begun - timer.time_elapsed("train")
    steps = run.task.trainer.estimated_stepping_batches
    if not isfinite(steps):
        raise UserError("training has no end: set max_epochs or max_steps")
    each_step = result.metrics["seconds"] / run.task.trainer.global_step
    batches = int(steps) * run.task.trainer.accumulate_grad_batches
    interval = (run.task.trainer.val_check_batch or batches) * (run.task.trainer.check_val_every_n_epoch or 1)
    timed = sum(run.task.trainer.num_val_batches) * sum("val/loss" in row for row in result.history)
    passes = {"val": ceil(batches / interval), "test": 1}  # one more at the end if the interval does not divide the run
    held_out = 0.0  # batches
    for split in passes.keys() & run.data.splits.keys():
        whole = len(run.data.splits[split][0]) / run.data.batch_size
        limit = config.trainer.get(f"limit_{split}_batches") or 1.0  # 0 is for debugging
        held_out += passes[split] * (whole * limit if isinstance(limit, float) else min(whole, limit))
    return around + int(steps) * each_step + timer.time_elapsed("validate") / timed * held_out


class Times:
    """Estimates the time of a run: the mean over runs of its shape, or over all shapes if none of it is known."""

    def __init__(self) -> None:
        self.known: dict[str, list[float]] = {}

    def add(self, run: Run, seconds: float) -> None:
        self.known.setdefault(run.shape, []).append(seconds)

    def left(self, runs: Sequence[Run], workers: int, start: float = 0.0) -> str:
        """Return in words how long runs take, after so many seconds to start."""
        if not self.known:
            return "unknown time"
        mean = {shape: fmean(seconds) for shape, seconds in self.known.items()}
        default = fmean(mean.values())
        seconds = sum(mean.get(run.shape, default) for run in runs) / workers
        return f"about {timedelta(seconds=ceil(start + seconds))}"


def print_forecast(
    runs: Sequence[Run], states: Mapping[str, State], todo: Sequence[Run], times: Times, workers: int, data_dir: str
) -> None:
    """Print the states of each task's runs, and the time that those to do take, after timing shapes not finished."""
    if shapes := {run.shape: run for run in todo if run.shape not in times.known}:
        time_runs([*shapes.values()], data_dir, len(places(workers)[0].cores), times)
    rows = {}
    for task in dict.fromkeys(run.task for run in runs):
        counts = Counter(states[run.name] for run in runs if run.task == task)
        mine = [run for run in todo if run.task == task]
        shown = {str(state): counts[state] for state in TERMINAL}
        rows[printable(task)] = {"runs": counts.total(), **shown, "to do": len(mine), "time": times.left(mine, workers)}
    tell(pd.DataFrame.from_dict(rows, orient="index").to_string())
    start = seconds_to_start() if todo else 0.0
    tell(f"{len(todo)} to run: {times.left(todo, workers, start)} with {workers} worker{'s' * (workers > 1)}")
