"""Writes the report of a study: a Markdown file with pictures, and two CSV files."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib import rc_context

from kvt.markdown import Markdown
from kvt.reports.figures import as_pdf, as_svg
from kvt.reports.notes import scope
from kvt.reports.section import Section, measure, write_sections
from kvt.study.grid import Grid
from kvt.study.outcomes import Outcomes
from kvt.system import UserError, write_atomically

PARAGRAPHS = Markdown("\n\n")


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
    figures = {name: figure for section in sections for name, figure in section.figures.items()}
    head = Markdown("# {}").format(grid.title)
    findings = [sentence for section in sections for sentence in section.findings]
    parts = [*findings, *scope(grid, results), *(part for section in sections for part in _parts(section))]
    runs = results.runs.drop(columns=["setting", "packages", "machine", "notes"], errors="ignore")
    contents = {
        "report.md": f"{PARAGRAPHS.join([head, *parts])}\n",
        "tables.csv": _csv([table for section in sections for table in section.tables]),
        "runs.csv": _csv([runs]),
    }
    files: dict[str, str | bytes] = {**contents, **{f"{name}.svg": as_svg(figure) for name, figure in figures.items()}}
    if pdf:
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
