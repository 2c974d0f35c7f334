"""Selects the run with the best validation metric from each sweep over a setting, such as the learning rate."""

from dataclasses import replace
from math import inf, isfinite

from kvt.markdown import Markdown
from kvt.study.grid import Grid, Run
from kvt.study.outcomes import Outcomes, State, outcome_of
from kvt.system import unknown

SWEPT = Markdown("""\
For each task, setting, attention and seed, {tried} with {setting} from {values}. This report uses the one with the best
validation metric: {shown} of {made} runs.""")


def swept_setting(grid: Grid) -> str | None:
    """Return the setting that a grid names in `best_of`: reports use only its best value. None without `best_of`.

    Raises:
        UserError: the setting is not an axis of the grid.
    """
    setting = grid.file.best_of
    if setting is not None and (strange := [run for run in grid.of_all_scales if setting not in run.settings]):
        raise unknown(f"axis in best_of of {grid.name}:", setting, strange[0].settings)
    return setting


def best_of(grid: Grid, outcomes: Outcomes) -> tuple[Grid, Markdown | None]:
    """Return the grid reduced to the best run of each sweep over `best_of`, and a sentence that describes the sweeps.

    The runs of a sweep differ only in the setting that `best_of` names. The best run has the best value of the task's
    `monitor`. If no run of a sweep has finished, the first run is kept. The swept setting is removed from the settings
    of each run, so that runs with different values of this setting can be paired.
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
    """Return the value of the metric `monitor`, negated if less is better, or −inf if the value is not finite.

    Return None for an unfinished run.
    """
    outcome = outcome_of(run, outcomes)
    task = run.config.classes["model"]
    value = outcome.result.get(task.monitor) if outcome.state == State.FINISHED else None
    if value is None:
        return None
    score = float(value) if task.monitored().better == "more" else -float(value)
    return score if isfinite(score) else -inf
