"""Writes the report of a study: a Markdown file with pictures, and two CSV files.

A report is a list of sections. A grid lists the functions that return its sections by name, or by import path.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from traceback import format_exception
from types import MappingProxyType
from typing import NamedTuple

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from kvt.markdown import Markdown
from kvt.reports.best_of import best_of, swept_setting
from kvt.reports.comparisons import Compared, comparisons, with_means
from kvt.reports.figures import as_pdf, as_svg
from kvt.reports.tables import Table, against_of, curves_of, tables_of
from kvt.study.grid import Grid
from kvt.study.outcomes import Outcomes, State, table_of_histories, table_of_repeats, table_of_results, tally
from kvt.system import UserError, import_object, mistake_in, say, unknown, write_atomically

OURS = ("tables", "curves", "notes")
PARAGRAPHS = Markdown("\n\n")
HEAD = Markdown("""\
# {title}

Scale **{scale}**: {about} {runs}.""")


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


class Section(NamedTuple):
    """A part of a report.

    Attributes:
        title: the heading. If it is empty, the text continues the previous section.
        text: paragraphs and tables as `Markdown`. A plain string is escaped, so that readers see it unchanged.
        tables: the numbers of the section's tables, for tables.csv.
        figures: a mapping from file name to figure. The figures are shown below the text.
    """

    title: str = ""
    text: Sequence[str] = ()
    tables: Sequence[pd.DataFrame] = ()
    figures: Mapping[str, Figure] = MappingProxyType({})


SectionFunction = Callable[[Grid, Results], Iterable[Section]]


def measure(grid: Grid, outcomes: Outcomes, root: Path | None = None) -> tuple[Grid, Results]:
    """Return the grid reduced to the best run of each sweep over `best_of`, and the results of these runs."""
    grid, swept = best_of(grid, outcomes)
    histories, tables = table_of_histories(grid, outcomes), tables_of(grid, outcomes)
    runs = with_means(table_of_results(grid, outcomes), histories, tables)
    repeats, compared = table_of_repeats(grid, outcomes), comparisons(runs, tables)
    return grid, Results(runs, repeats, histories, tables, compared, swept, root)


@rc_context({"text.parse_math": False})  # a $ in a name is not the start of a formula
def write_report(grid: Grid, outcomes: Outcomes, out: Path, root: Path | None = None, pdf: bool = False) -> list[Path]:
    """Write report.md, tables.csv, runs.csv and pictures; return the paths without the pictures.

    Args:
        grid: the grid, which lists the sections.
        outcomes: the outcomes of the grid's runs.
        out: the folder of the report. The function creates a missing folder.
        root: the folder of the runs, for pictures that need checkpoints.
        pdf: whether to write each picture as PDF, too.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:  # for example, nobody can create a folder in /proc
        raise UserError(f"{out}: cannot create this folder: choose another folder") from error
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
    """Yield the sections of a grid's report. If a function fails, print its traceback and raise UserError."""
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
    """Raise UserError if a report key of a grid is invalid. A study calls this function before the first run."""
    for name in grid.file.sections:
        _function(grid, name)
    for check in (tables_of, curves_of, against_of, swept_setting):
        check(grid)


def _function(grid: Grid, name: str) -> SectionFunction:
    """Return the function of a section: one of `OURS`, or the function at an import path such as my_sections.slowest.

    Raises:
        UserError: the function does not exist.
    """
    flag, known = f"section of {grid.name}:", [*OURS, "my_sections.slowest"]
    if name not in OURS and "." not in name:
        raise unknown(flag, name, known)
    function = import_object(f"kvt.reports.sections.{name}" if name in OURS else name, flag, known)
    if not callable(function):
        found = "there is no such name in that file" if function is None else "expected a function of (grid, results)"
        raise UserError(f"{flag} {name!r}: {found}")
    return function


def _parts(section: Section) -> list[str]:
    heading = [Markdown("## {}").format(section.title)] if section.title else []
    images = [Markdown("![{}]({}.svg)").format(name.replace("-", " "), name) for name in section.figures]
    return [*heading, *section.text, *images]


def _csv(tables: Sequence[pd.DataFrame]) -> str:
    return pd.concat(tables or [pd.DataFrame()]).to_csv(index=False, float_format="%.6g")
