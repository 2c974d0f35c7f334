"""Computes the results of a grid once, and calls the functions that write the sections of its report.

A grid lists the functions by name or by import path.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from traceback import format_exception
from types import MappingProxyType
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from kvt.markdown import Markdown
from kvt.reports.best_of import best_of, swept_setting
from kvt.reports.comparisons import Compared, comparisons, with_means
from kvt.reports.tables import Table, against_of, curves_of, tables_of
from kvt.study.grid import Grid
from kvt.study.outcomes import Outcomes, State, table_of_histories, table_of_repeats, table_of_results
from kvt.system import UserError, import_object, mistake_in, say, unknown

OURS = ("differences", "tables", "curves", "notes")


class Results(NamedTuple):
    """The results of a grid. Of each sweep over `best_of`, only the best run is included.

    Attributes:
        runs: a row for each run, with its settings, `state` and metrics (see `table_of_results`).
        repeats: a row for each repetition of a run.
        histories: a row for each step that a finished run logged (see `table_of_histories`).
        tables: the tables that the grid names.
        compared: the `comparisons` of all tables.
        swept: a sentence about the sweeps; None for a grid without `best_of`.
        root: the folder of the runs; None if the results come from records.
    """

    runs: pd.DataFrame
    repeats: pd.DataFrame
    histories: pd.DataFrame
    tables: Sequence[Table]
    compared: Sequence[Compared]
    swept: Markdown | None = None
    root: Path | None = None

    @property
    def finished(self) -> pd.DataFrame:
        return self.runs[self.runs.state == State.FINISHED]

    @property
    def first(self) -> str:
        """The first attention of the grid. Reports compare all other attentions with it."""
        return str(self.runs.attention.iloc[0])

    def compared_in(self, number: int) -> list[Compared]:
        """Return the comparisons of the table with this index."""
        return [one for one in self.compared if one.table == number]


def measure(grid: Grid, outcomes: Outcomes, root: Path | None = None) -> tuple[Grid, Results]:
    """Return the grid reduced to the best run of each sweep over `best_of`, and the results of these runs."""
    grid, swept = best_of(grid, outcomes)
    histories, tables = table_of_histories(grid, outcomes), tables_of(grid, outcomes)
    runs = with_means(table_of_results(grid, outcomes), histories, tables)
    repeats, compared = table_of_repeats(grid, outcomes), comparisons(runs, tables)
    return grid, Results(runs, repeats, histories, tables, compared, swept, root)


class Section(NamedTuple):
    """A part of a report.

    Attributes:
        title: the heading. If it is empty, the text continues the previous section.
        text: paragraphs and tables as `Markdown`. A plain string is escaped, so that readers see it unchanged.
        tables: the numbers of the section's tables, for tables.csv.
        figures: a mapping from file name to figure. The figures are shown below the text.
        findings: sentences for the beginning of the report.
    """

    title: str = ""
    text: Sequence[str] = ()
    tables: Sequence[pd.DataFrame] = ()
    figures: Mapping[str, Figure] = MappingProxyType({})
    findings: Sequence[str] = ()


SectionFunction = Callable[[Grid, Results], Iterable[Section]]
"""A function that a grid lists under `sections`. The function returns any number of sections."""


def sections_of(grid: Grid) -> list[SectionFunction]:
    """Return the functions that a grid lists in `sections`.

    A name without a dot is one of `OURS`. Any other name is an import path, such as "my_sections.slowest".

    Raises:
        UserError: a function does not exist.
    """
    return [_function(name, f"section of {grid.name}:") for name in grid.file.sections]


def write_sections(grid: Grid, results: Results) -> Iterator[Section]:
    """Yield the sections of a grid's report. If a function fails, print its traceback and raise UserError."""
    for name, function in zip(grid.file.sections, sections_of(grid), strict=True):
        try:
            yield from [*function(grid, results)]
        except Exception as error:
            if mistake_in(error) is not None:
                raise
            in_function = error.__traceback__ and error.__traceback__.tb_next  # leaves out the frame of this function
            say("".join(format_exception(error.with_traceback(in_function))))
            raise UserError(f"section {name} of {grid.name} failed: {type(error).__name__}: {error}") from error


def require_report(grid: Grid) -> None:
    """Raise UserError if a report key of a grid is invalid. A study calls this function before the first run."""
    for check in (sections_of, tables_of, curves_of, against_of, swept_setting):
        check(grid)


def _function(name: str, flag: str) -> SectionFunction:
    known = [*OURS, "my_sections.slowest"]
    if name not in OURS and "." not in name:
        raise unknown(flag, name, known)
    function = import_object(f"kvt.reports.sections.{name}" if name in OURS else name, flag, known)
    if not callable(function):
        found = "there is no such name in that file" if function is None else "expected a function of (grid, results)"
        raise UserError(f"{flag} {name!r}: {found}")
    return function
