"""Estimates of the time that runs take, and the summary of a dry run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import ceil
from statistics import fmean

import pandas as pd

from kvt.study.calibration import calibrate
from kvt.study.config import Shape
from kvt.study.grid import Run
from kvt.study.local import places
from kvt.study.records import DONE, State


class Times:
    """Estimates the time of a run: the mean over runs of its shape, or over those that share most settings with it."""

    def __init__(self) -> None:
        self.known: dict[Shape, list[float]] = {}

    def add(self, run: Run, seconds: float) -> None:
        self.known.setdefault(run.shape, []).append(seconds)

    def left(self, runs: Sequence[Run], workers: int) -> str:
        """Return the time that these runs take: "about 2:05:00", or "unknown time" before the first `add`."""
        if not self.known:
            return "unknown time"
        mean = {shape: fmean(seconds) for shape, seconds in self.known.items()}
        expected = dict(mean)
        for shape in {run.shape for run in runs} - mean.keys():
            shared = {known: len(shape & known) for known in mean}
            most = max(shared.values())
            expected[shape] = fmean(mean[known] for known, count in shared.items() if count == most)
        return f"about {timedelta(seconds=ceil(sum(expected[run.shape] for run in runs) / workers))}"


def print_forecast(
    runs: Sequence[Run], states: Mapping[str, State], todo: Sequence[Run], times: Times, workers: int, data_dir: str
) -> None:
    """Print how many runs of each task have which of these states, and the time that those to do will take.

    Shapes that no finished run has are timed, if their data are there.
    """
    shapes = {run.shape: run for run in todo if run.shape not in times.known}
    untimed: dict[Shape, str] = {}
    for run, found in calibrate([*shapes.values()], data_dir, places(workers)[0]) if shapes else []:
        if isinstance(found, str):
            untimed[run.shape] = found
        else:
            times.add(run, found)

    def time(some: Sequence[Run]) -> str:
        known = [run for run in some if run.shape not in untimed]
        if some and not known:
            return "unknown time"
        left = times.left(known, workers)
        return left if len(known) == len(some) else left.replace("about", "over")

    rows = {}
    for task in dict.fromkeys(run.task for run in runs):
        counts = Counter(states[run.name] for run in runs if run.task == task)
        mine = [run for run in todo if run.task == task]
        shown = {str(state): counts[state] for state in DONE}
        rows[task] = {"runs": counts.total(), **shown, "to do": len(mine), "time": time(mine)}
    print(pd.DataFrame.from_dict(rows, orient="index").to_string())
    print(f"{len(todo)} to make, in {time(todo)} with {workers} worker{'s' * (workers > 1)}")
    for reason, count in Counter(untimed[run.shape] for run in todo if run.shape in untimed).items():
        print(f"no estimate for {count} run{'s' * (count > 1)}: {reason}")
