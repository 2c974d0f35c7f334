"""Estimates the training time of future runs from the times of finished and recorded runs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import ceil
from statistics import fmean

import pandas as pd

from kvt.study.grid import Run
from kvt.study.outcomes import TERMINAL, State
from kvt.system.console import tell
from kvt.system.quoting import printable


class Times:
    """Estimates of a run's time: the mean time of known runs with the same `Run.shape`, or else of all known shapes."""

    def __init__(self) -> None:
        self.known: dict[str, list[float]] = {}

    def add(self, run: Run, seconds: float) -> None:
        self.known.setdefault(run.shape, []).append(seconds)

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
