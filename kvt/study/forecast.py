"""How long the runs of a study will take, and what a dry run says of them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import ceil
from statistics import fmean

import pandas as pd

from kvt.study.calibration import Timed, calibrate
from kvt.study.config import Shape
from kvt.study.grid import Run
from kvt.study.local import places
from kvt.study.records import Result, seconds_of
from kvt.study.run import FAULTY, State


class Times:
    """Estimates how long runs take from others: of the same shape, else from those that share the most settings."""

    def __init__(self) -> None:
        self._known: dict[Shape, list[float]] = {}

    def add(self, run: Run, result: Result | None) -> None:
        """Takes a run into account, if it has a result."""
        if result is not None:
            self.learn(run, seconds_of(result))

    def learn(self, run: Run, seconds: float) -> None:
        """Takes into account how long a run takes."""
        self._known.setdefault(run.shape, []).append(seconds)

    def knows(self, run: Run) -> bool:
        """Whether a run of the same shape was taken into account."""
        return run.shape in self._known

    def left(self, runs: Sequence[Run], workers: int) -> str:
        """How long these will take: "about 2:05:00", or "unknown time" while nothing was taken into account."""
        if not self._known:
            return "unknown time"
        mean = {shape: fmean(seconds) for shape, seconds in self._known.items()}
        expected: dict[Shape, float] = {}
        for shape in {run.shape for run in runs} - mean.keys():
            shared = {known: len(shape & known) for known in mean}
            most = max(shared.values())
            expected[shape] = fmean(mean[known] for known, count in shared.items() if count == most)
        expected |= mean
        return f"about {timedelta(seconds=ceil(sum(expected[run.shape] for run in runs) / workers))}"


def foretell(
    runs: Sequence[Run], states: Mapping[str, State], todo: Sequence[Run], times: Times, workers: int, data_dir: str
) -> None:
    """Prints how the runs of each task stand, and how long those to do will take.

    What has no finished run of its shape is timed, where the data are there.

    Args:
        runs: of the study.
        states: how each stands, by its name.
        todo: those to be made.
        times: of those that are finished.
        workers: how many are made at once.
        data_dir: where data sets lie.
    """
    shapes = {run.shape: run for run in todo if not times.knows(run)}
    timed = calibrate([*shapes.values()], data_dir, places(workers)[0]) if shapes else Timed({}, {})
    for run in shapes.values():
        if run.name in timed.seconds:
            times.learn(run, timed.seconds[run.name])
    lost = {shape: timed.reasons[run.name] for shape, run in shapes.items() if run.name in timed.reasons}
    rows = {}
    for task in dict.fromkeys(run.task for run in runs):
        counts = Counter(states[run.name] for run in runs if run.task == task)
        mine = [run for run in todo if run.task == task]
        rows[task] = {
            "runs": counts.total(),
            **{str(state): counts[state] for state in (State.FINISHED, State.DIVERGED, *FAULTY)},
            "to do": len(mine),
            "time": _time(mine, times, lost, workers),
        }
    print(pd.DataFrame.from_dict(rows, orient="index").to_string())
    print(f"{len(todo)} to make, in {_time(todo, times, lost, workers)} with {workers} worker{'s' * (workers > 1)}")
    for reason, count in Counter(lost[run.shape] for run in todo if run.shape in lost).items():
        print(f"no estimate for {count} run{'s' * (count > 1)}: {reason}")


def _time(runs: Sequence[Run], times: Times, lost: Mapping[Shape, str], workers: int) -> str:
    known = [run for run in runs if run.shape not in lost]
    if runs and not known:
        return "unknown time"
    left = times.left(known, workers)
    return left if len(known) == len(runs) else left.replace("about", "over")
