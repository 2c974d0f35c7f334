"""Writes the report of a study. A grid lists the functions of its sections by name, or by import path."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite
from pathlib import Path
from traceback import format_exception
from types import MappingProxyType
from typing import NamedTuple

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from kvt.markdown import Markdown
from kvt.reports.comparisons import Compared, comparisons, with_means
from kvt.reports.figures import as_pdf, as_svg
from kvt.reports.tables import Table, against_of, counted, curves_of, tables_of
from kvt.study.grid import Grid, Run
from kvt.study.outcomes import (
    Outcomes,
    State,
    outcome_of,
    table_of_histories,
    table_of_repeats,
    table_of_results,
    tally,
)
from kvt.system import UserError, import_object, mistake_in, say, unknown, write_atomically

OURS = ("tables", "curves", "notes")
PARAGRAPHS = Markdown("\n\n")
HEAD = Markdown("""\
# {title}

Scale **{scale}**: {about} {runs}.""")
SWEPT = Markdown("""\
For each task, setting, attention and seed, {tried} finished, with {setting} from {values}. This report uses the one
with the best validation metric: {shown} of {made}.""")


class Results(NamedTuple):
    """The results of a grid, with only the best run of each sweep (see `best_of`)."""

    runs: pd.DataFrame  # see `table_of_results`, and `with_means`
    repeats: pd.DataFrame  # see `table_of_repeats`
    histories: pd.DataFrame  # see `table_of_histories`
    tables: Sequence[Table]
    compared: Sequence[Compared]
    swept: Markdown | None = None  # a text about the sweeps; None if the grid has no `best_of`
    root: Path | None = None  # the folder of the runs; None: the report uses no checkpoints

    @property
    def finished(self) -> pd.DataFrame:
        return self.runs[self.runs.state == State.FINISHED]

    @property
    def first(self) -> str:
        """The first attention of the grid. Reports compare all other attentions with it."""
        return str(self.runs.attention.iloc[0])


class Section(NamedTuple):
    """A part of a report."""

    title: str = ""  # the heading; if it is empty, the text continues the previous section
    text: Sequence[str] = ()  # paragraphs and tables as `Markdown`; a plain string is escaped
    tables: Sequence[pd.DataFrame] = ()  # the numbers of the section's tables, for tables.csv
    figures: Mapping[str, Figure] = MappingProxyType({})  # by file name without its ending; shown below the text


def measure(grid: Grid, outcomes: Outcomes, root: Path | None = None) -> tuple[Grid, Results]:
    """Return the grid reduced to the best run of each sweep (see `best_of`), and the results of these runs."""
    grid, swept = best_of(grid, outcomes)
    histories, tables = table_of_histories(grid, outcomes), tables_of(grid, outcomes)
    runs = with_means(table_of_results(grid, outcomes), histories, tables)
    repeats, compared = table_of_repeats(grid, outcomes), comparisons(runs, tables)
    return grid, Results(runs, repeats, histories, tables, compared, swept, root)


def best_of(grid: Grid, outcomes: Outcomes) -> tuple[Grid, Markdown | None]:
    """Return the grid with only the best run of each sweep, and a text about the sweeps.

    The runs of a sweep differ only in the setting that the grid's `best_of` names. The best run has the best value of
    `monitor`. If no value is finite, the first run is taken. The setting is removed from all runs, so that the best
    runs of two attentions form a pair. For a grid without `best_of`, return the grid and None.
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
    tried = f"{least} to " * (least < most) + counted(most, "run")
    text = SWEPT.format(
        tried=tried, setting=setting, values=values, made=counted(len(scores), "run"), shown=len(counts)
    )
    return replace(grid, runs=tuple(chosen)), text


@rc_context({"text.parse_math": False})  # a $ in a name is not the start of a formula
def write_report(grid: Grid, outcomes: Outcomes, out: Path, root: Path | None = None, pdf: bool = False) -> list[Path]:
    """Write report.md, tables.csv, runs.csv and pictures into the folder `out`; return the paths of the first three.

    `root` is the folder of the runs, for pictures that need checkpoints. With `pdf`, also write each picture as PDF.
    """
    out.mkdir(parents=True, exist_ok=True)
    grid, results = measure(grid, outcomes, root)
    sections = [*write_sections(grid, results)]
    head = HEAD.format(title=grid.title, scale=grid.scale, about=grid.about, runs=tally(results.runs.state))
    parts = [head, *(part for section in sections for part in _parts(section))]
    runs = results.runs.drop(columns=["setting", "packages", "machine", "notes"], errors="ignore")
    contents = {
        "report.md": f"{PARAGRAPHS.join(parts)}\n",
        "tables.csv": _csv([table for section in sections for table in section.tables]),
        "runs.csv": _csv([runs]),
    }
    files: dict[str, str | bytes] = {**contents}
    for name, figure in (pair for section in sections for pair in section.figures.items()):
        files[f"{name}.svg"] = as_svg(figure)
        if pdf:
            files[f"{name}.pdf"] = as_pdf(figure)
    for name, content in files.items():
        write_atomically(out / name, content)
    return [out / name for name in contents]


def write_sections(grid: Grid, results: Results) -> Iterator[Section]:
    """Yield the sections of a grid's report; if a section function has a bug, print a traceback and raise UserError."""
    for name in grid.file.sections:
        try:
            yield from [*_function(grid, name)(grid, results)]
        except Exception as error:
            if mistake_in(error) is not None:
                raise
            in_function = error.__traceback__ and error.__traceback__.tb_next  # leaves out the frame of this function
            say("".join(format_exception(error.with_traceback(in_function))))
            raise UserError(f"section {name} of {grid.name} failed: {type(error).__name__}: {error}") from error


def require_report(grid: Grid) -> None:
    """Raise UserError if a grid has an invalid entry for its report. A study calls this before its first run."""
    for name in grid.file.sections:
        _function(grid, name)
    for check in (tables_of, curves_of, against_of, swept_setting):
        check(grid)


def swept_setting(grid: Grid) -> str | None:
    """Return a grid's `best_of`; raise UserError if it names a setting that is not an axis of every run."""
    setting = grid.file.best_of
    if setting is not None and (strange := [run for run in grid.of_all_scales if setting not in run.settings]):
        raise unknown(f"axis in best_of of {grid.name}:", setting, strange[0].settings)
    return setting


def _function(grid: Grid, name: str) -> Callable[[Grid, Results], Iterable[Section]]:
    """Return the function of a section by its name in `OURS` or its import path; raise UserError if there is none."""
    flag, known = f"section of {grid.name}:", [*OURS, "my_sections.slowest"]
    if name not in OURS and "." not in name:
        raise unknown(flag, name, known)
    function = import_object(f"kvt.reports.sections.{name}" if name in OURS else name, flag, known)
    if not callable(function):
        found = "there is no such name in that file" if function is None else "expected a function of (grid, results)"
        raise UserError(f"{flag} {name!r}: {found}")
    return function


def _score(run: Run, outcomes: Outcomes) -> float | None:
    """Return a score from `monitor`: larger is better, -inf if not finite. None if unfinished, or without a value."""
    outcome = outcome_of(run, outcomes)
    task = run.config.classes["model"]
    if outcome.state != State.FINISHED or (value := outcome.result.get(task.monitor)) is None:
        return None
    score = float(value) if task.monitored().better == "more" else -float(value)
    return score if isfinite(score) else -inf


def _parts(section: Section) -> list[str]:
    heading = [Markdown("## {}").format(section.title)] if section.title else []
    images = [Markdown("![{}]({}.svg)").format(name.replace("-", " "), name) for name in section.figures]
    return [*heading, *section.text, *images]


def _csv(tables: Sequence[pd.DataFrame]) -> str:
    return pd.concat(tables or [pd.DataFrame()]).to_csv(index=False, float_format="%.6g")
