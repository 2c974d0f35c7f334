"""A report is a list of sections, which a grid names: kvt's own by name, others by import path."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from traceback import format_exception
from types import MappingProxyType
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from kvt.reports.best_of import swept_setting
from kvt.reports.results import Results
from kvt.reports.tables import against_of, curves_of, tables_of
from kvt.study.grid import Grid
from kvt.system.console import say, user_error
from kvt.system.errors import UserError, import_object, unknown

OURS = ("differences", "tables", "curves", "notes")


class Section(NamedTuple):
    """A part of a report.

    Attributes:
        title: its heading; without one it goes on with what stands before it.
        text: paragraphs and tables, Markdown; a plain string is shown as it is, whatever it holds.
        tables: the numbers of its tables, for tables.csv.
        figures: by the names of their files; they are shown below the text.
        findings: sentences for the head of the report.
    """

    title: str = ""
    text: Sequence[str] = ()
    tables: Sequence[pd.DataFrame] = ()
    figures: Mapping[str, Figure] = MappingProxyType({})
    findings: Sequence[str] = ()


SectionFunction = Callable[[Grid, Results], Iterable[Section]]
"""What a grid names: it gives sections, none where there is nothing to say."""


def sections_of(grid: Grid) -> list[SectionFunction]:
    """Return the functions of the sections that a grid asks for; raise UserError if it names one that does not exist.

    A name without a dot is one of `OURS`, any other an import path: "my_sections.slowest".
    """
    return [_function(name, f"section of {grid.name}:") for name in grid.file.sections]


def write_sections(grid: Grid, results: Results) -> Iterator[Section]:
    """Yield the sections of a grid's report; raise UserError if a function fails, after printing its traceback."""
    for name, function in zip(grid.file.sections, sections_of(grid), strict=True):
        try:
            yield from [*function(grid, results)]
        except Exception as error:
            if user_error(error) is not None:
                raise
            in_function = error.__traceback__ and error.__traceback__.tb_next  # without what has called it
            say("".join(format_exception(error.with_traceback(in_function))))
            raise UserError(f"section {name} of {grid.name} failed: {type(error).__name__}: {error}") from error


def require_report(grid: Grid) -> None:
    """Raise UserError if what a grid says of its report is wrong; before its runs are made."""
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
