"""The parts of benchmarks/gpu.py and their report; a part is a table whose rows are measured one after the other."""

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import unescape
from pathlib import Path
from typing import NamedTuple

from kvt.system.files import write_atomically
from kvt.system.quoting import markdown_table

CHECKOUT = Path(__file__).parents[1]
sys.path.insert(0, str(CHECKOUT))  # some parts call functions of the tests, which are not installed

Row = tuple[str, ...]
Rows = Mapping[str, Sequence[Row]]
"""Rows by part."""
FAILED, SO_FAR, WRONG = "failed: ", "so far: ", "WRONG: "
"""Prefixes of a cell's text; the next call of benchmarks/gpu.py measures rows with such a cell again."""


class Setting(NamedTuple):
    """Arguments of a part: device, folder for files, time of its end (`time.monotonic`), and all rows so far.

    On a CPU, all sizes are tiny: a rehearsal.
    """

    device: str
    out: Path
    ends: float
    rows: Rows

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


class Case(NamedTuple):
    """A row: the cells that name it, and a function that measures the other cells."""

    key: Row
    measure: Callable[[], Sequence[str]]


class Part(NamedTuple):
    """A table of the report: description, columns, rows, and share of the time relative to the other parts.

    On an H200, all parts together take nine minutes. A share of 1 is about a sixtieth of this time.
    """

    about: str
    head: Row
    cases: Callable[[Setting], Iterator[Case]]
    share: float


def is_done(row: Row) -> bool:
    return not any(cell.startswith((FAILED, SO_FAR, WRONG)) for cell in row)


def failure(error: Exception) -> str:
    """Print an error's traceback; return its last line as the text of a cell."""
    traceback.print_exception(error)
    return FAILED + traceback.format_exception_only(error)[-1].strip().splitlines()[0].replace("|", "/")


class Report:
    """The file report.md: a line about the machine, then a section for each part. It is rewritten after every row.

    To measure a row again, delete the row, and the line "complete" of its part.
    """

    def __init__(self, path: Path, machine: str, parts: Mapping[str, Part]) -> None:
        self._path, self.machine, self.parts = path, machine, parts
        self.rows: dict[str, list[Row]] = {}
        self.status: dict[str, str] = {}
        if path.exists():
            self.machine, *sections = path.read_text(encoding="utf-8").split("\n\n## ")
            for section in sections:
                name, _, *blocks, status = section.strip().split("\n\n")
                lines = [line for block in blocks for line in block.splitlines()[2:]]
                self.rows[name] = [tuple(map(unescape, line[2:-2].split(" | "))) for line in lines]
                self.status[name] = status

    def is_complete(self, part: str) -> bool:
        return self.status.get(part, "").startswith("complete")

    def add(self, part: str, case: Row, cells: Row) -> None:
        """Add a row, or replace the row with the same key."""
        others = [row for row in self.rows.get(part, ()) if row[: len(case)] != case]
        self.rows[part] = [*others, (*case, *cells)]

    def end(self, part: str, problem: str) -> None:
        """Set the status of a part: its problem, or "complete" if there is none and all rows are done."""
        undone = sum(not is_done(row) for row in self.rows.get(part, ()))
        problem = problem or (f"{undone} of its rows failed or are wrong" if undone else "")
        self.status[part] = f"not complete: {problem}; the same command goes on" if problem else "complete"

    def write(self) -> None:
        sections = [self.machine]
        for name in (name for name in self.parts if name in self.status):
            part, rows = self.parts[name], self.rows.get(name, [])
            filled = [[*row, *[""] * (len(part.head) - len(row))] for row in rows]
            tables = [markdown_table([part.head, *filled])] if filled else []
            sections += [f"## {name}", " ".join(part.about.split()), *tables, self.status[name]]
        write_atomically(self._path, "\n\n".join(sections) + "\n")
