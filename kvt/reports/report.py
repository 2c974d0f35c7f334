"""Writes the report of a study: a Markdown file with pictures, an HTML page, the explorer and two CSV files."""

from collections.abc import Collection, Sequence
from pathlib import Path

import pandas as pd
from matplotlib import rc_context

from kvt.reports.explorer import explorer_page
from kvt.reports.figures import as_pdf, as_svg
from kvt.reports.notes import scope
from kvt.reports.page import html_page, latex_tables
from kvt.reports.results import measure
from kvt.reports.section import Section, write_sections
from kvt.study.grid import Grid
from kvt.study.outcomes import Outcomes
from kvt.system.errors import UserError
from kvt.system.files import write_atomically
from kvt.system.quoting import Markdown

FORMATS = ("latex", "pdf")  # formats for papers: tables as LaTeX, pictures as PDF
PARAGRAPHS = Markdown("\n\n")


@rc_context({"text.parse_math": False})  # a $ in a name is not the start of a formula
def write_report(
    grid: Grid, outcomes: Outcomes, out: Path, root: Path | None = None, formats: Collection[str] = ()
) -> list[Path]:
    """Write report.md, report.html, explorer.html, two CSV files and pictures; return the paths without the pictures.

    Args:
        grid: the grid, which lists the sections.
        outcomes: the outcomes of the grid's runs.
        out: the folder of the report. The function creates a missing folder.
        root: the folder of the runs, for pictures that need checkpoints.
        formats: additional formats, each one of `FORMATS`.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:  # for example, nobody can create a folder in /proc
        raise UserError(f"{out}: cannot create this folder: choose another folder") from error
    grid, results = measure(grid, outcomes, root)
    sections = [*write_sections(grid, results)]
    figures = {name: figure for section in sections for name, figure in section.figures.items()}
    head = Markdown("# {}").format(grid.title)
    findings = [sentence for section in sections for sentence in section.findings]
    parts = [*findings, *scope(grid, results), *(part for section in sections for part in _parts(section))]
    text = PARAGRAPHS.join([head, *parts])
    runs = results.runs.drop(columns=["setting", "packages", "machine", "notes"], errors="ignore")
    contents = {
        "report.md": f"{text}\n",
        "explorer.html": explorer_page(grid, outcomes),
        "tables.csv": _csv([table for section in sections for table in section.tables]),
        "runs.csv": _csv([runs]),
    }
    if "latex" in formats:
        contents["tables.tex"] = latex_tables(text)
    links = Markdown("Files: ") + Markdown(", ").join(Markdown("[{}]({})").format(name, name) for name in contents)
    svgs = {name: as_svg(figure) for name, figure in figures.items()}
    contents["report.html"] = html_page(grid.title, PARAGRAPHS.join([head, links, *parts]), svgs)
    files: dict[str, str | bytes] = {**contents, **{f"{name}.svg": svg for name, svg in svgs.items()}}
    if "pdf" in formats:
        files |= {f"{name}.pdf": as_pdf(figure) for name, figure in figures.items()}
    for name, content in files.items():
        write_atomically(out / name, content)
    return [out / name for name in contents]


def _parts(section: Section) -> list[str]:
    heading = [Markdown("## {}").format(section.title)] if section.title else []
    images = [Markdown("![{}]({}.svg)").format(name.replace("-", " "), name) for name in section.figures]
    return [*heading, *section.text, *images]


def _csv(tables: Sequence[pd.DataFrame]) -> str:
    return pd.concat(tables or [pd.DataFrame()]).to_csv(index=False, float_format="%.6g")
