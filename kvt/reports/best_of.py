"""Selects from each sweep over one setting, such as the learning rate, the run with the best validation metric."""

from dataclasses import replace
from math import inf

from kvt.study.grid import Grid, Run
from kvt.study.outcomes import Outcomes, State, outcome_of
from kvt.system.errors import unknown
from kvt.system.quoting import Markdown

SWEPT = Markdown("""\
Of each cell, {tried} with {setting} from {values}: shown is the best in validation, which alone chooses. {made} runs
stand behind the {shown} that are shown.""")


def swept_setting(grid: Grid) -> str | None:
    """Return the setting of which a grid shows the best value alone; raise UserError if it is no axis of the grid."""
    setting = grid.file.best_of
    if setting is not None and (strange := [run for run in grid.of_all_scales if setting not in run.settings]):
        raise unknown(f"axis in best_of of {grid.name}:", setting, strange[0].settings)
    return setting


def best_of(grid: Grid, outcomes: Outcomes) -> tuple[Grid, Markdown | None]:
    """Return a grid with the best run alone of each sweep over its `best_of`, and a sentence for the report.

    The runs of a sweep differ in that setting alone; the metric is the task's `monitor`. A sweep without finished runs
    keeps its first. The setting no longer tells runs apart.
    """
    if (setting := swept_setting(grid)) is None:
        return grid, None
    sweeps: dict[str, list[Run]] = {}
    for run in grid.runs:
        rest = {name: value for name, value in run.settings.items() if name != setting}
        sweeps.setdefault(repr((run.task, rest, run.seed)), []).append(replace(run, settings=rest))
    scores = {run.name: score for run in grid.runs if (score := _score(run, outcomes)) is not None}
    chosen = [max(runs, key=lambda run: scores.get(run.name, -inf)) for runs in sweeps.values()]
    values = ", ".join(dict.fromkeys(str(run.value(setting)) for run in grid.runs))
    counts = [count for runs in sweeps.values() if (count := sum(run.name in scores for run in runs))]
    least, most = min(counts, default=0), max(counts, default=0)
    tried = f"{least} to {most} runs were made" if least < most else f"{most} runs were made"
    text = SWEPT.format(tried=tried, setting=setting, values=values, made=len(scores), shown=len(counts))
    return replace(grid, runs=tuple(chosen)), text


def _score(run: Run, outcomes: Outcomes) -> float | None:
    """Return the metric by which the run's task chooses checkpoints, more being better; None if it has not finished."""
    outcome = outcome_of(run, outcomes)
    task = run.config.classes["model"]
    value = outcome.result.get(task.monitor) if outcome.state == State.FINISHED else None
    if value is None:
        return None
    return float(value) if task.monitored().better == "more" else -float(value)
