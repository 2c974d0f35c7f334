"""The best of a small sweep: of runs that differ in one setting, such as the learning rate, the best in validation."""

from collections.abc import Sequence
from dataclasses import replace

from kvt.reports.page import Markdown
from kvt.study.grid import Grid, Run
from kvt.study.outcomes import Outcome, Outcomes, State
from kvt.system.errors import unknown
from kvt.training.config import find_classes

SWEPT = Markdown("""\
Of each cell, {tried} with {setting} from {values}: shown is the best in validation, which alone chooses. {made} runs
stand behind the {shown} that are shown.""")


def best_of(grid: Grid, outcomes: Outcomes) -> tuple[Grid, Markdown | None]:
    """Return a grid with the best run of each sweep that it asks for with `best_of`, and what to say of it.

    The runs of a sweep differ in that setting alone; the metric is the task's `monitor`. A sweep without finished runs
    keeps its first. The setting is no longer among those that tell runs apart.

    Raises:
        UserError: `best_of` is no axis of the grid.
    """
    if (setting := grid.content.get("best_of")) is None:
        return grid, None
    if strange := [run for run in grid.of_all_scales if setting not in run.settings]:
        raise unknown(f"axis in best_of of {grid.name}:", setting, strange[0].settings)
    sweeps: dict[str, list[Run]] = {}
    for run in grid.runs:
        rest = {name: value for name, value in run.settings.items() if name != setting}
        sweeps.setdefault(repr((run.task, rest, run.seed)), []).append(replace(run, settings=rest))
    chosen = [_best(runs, outcomes) for runs in sweeps.values()]
    values = ", ".join(dict.fromkeys(str(run.value(setting)) for run in grid.runs))
    counts = sorted({sum(_score(run, outcomes) is not None for run in runs) for runs in sweeps.values()})
    tried = f"{counts[0]} to {counts[-1]} runs were made" if len(counts) > 1 else f"{counts[0]} runs were made"
    made = sum(_score(run, outcomes) is not None for run in grid.runs)
    text = SWEPT.format(tried=tried, setting=setting, values=values, made=made, shown=len(chosen))
    return replace(grid, runs=tuple(chosen)), text


def _best(runs: Sequence[Run], outcomes: Outcomes) -> Run:
    """Return the run with the best score, of equal ones the first; the first if none has a score."""
    scored = [(score, run) for run in runs if (score := _score(run, outcomes)) is not None]
    return max(scored, key=lambda found: found[0])[1] if scored else runs[0]


def _score(run: Run, outcomes: Outcomes) -> float | None:
    """Return the metric by which the run's task chooses checkpoints, more being better; None if it has not finished."""
    outcome = next(iter(outcomes.get(run.name, ())), Outcome(State.NEW))
    task = find_classes({"model": run.config["model"]["class_path"]})["model"]
    value = outcome.result.get(task.monitor) if outcome.state == State.FINISHED else None
    if value is None:
        return None
    return float(value) if task.mode == "max" else -float(value)
