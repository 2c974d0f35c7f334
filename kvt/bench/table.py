"""Formats measurements as CSV and as Markdown tables."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from kvt.bench.costs import Column, Cost
from kvt.system.hardware import environment
from kvt.system.quoting import markdown_table

Row = Mapping[str, Any]

ASKED = ("attention", "heads", "kv_heads", "n", "d", "batch", "pos_dim", "device")


def csv_columns(cost: Cost) -> list[str]:
    """Return the columns of the CSV. A name with the ending _q1 or _q3 is the first or the third quartile."""
    measured = (column.name + q for column in cost.columns for q in ("", "_q1", "_q3")[: 3 if column.sampled else 1])
    return [*ASKED, *measured, "note"]


def csv_row(row: Row) -> dict[str, Any]:
    return {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()}


def markdown(cost: Cost, rows: Sequence[Row], repeats: int) -> str:
    """Return Markdown: a title, the method, notes, and one table for each combination of n, d and batch size."""
    layer = f"One self-attention layer, float32, m = {rows[0]['pos_dim']}"
    measured = f"{repeats} samples each, taken in turns, on {machine(rows[0]['device'])}."
    head = ["attention", "heads / kv", *(column.heading for column in cost.columns)]
    parts = [cost.title, f"{layer}; {measured}", cost.notes]
    for size, of_size in groupby(rows, key=itemgetter("n", "d", "batch")):
        lines = ([row["attention"], heads_of(row), *(_cell(row, column) for column in cost.columns)] for row in of_size)
        parts += ["## n = {}, d = {}, batch {}".format(*size), markdown_table([head, *lines])]
    return "\n\n".join(parts)


def _cell(row: Row, column: Column) -> str:
    if not column.sampled:
        return number(row[column.name], column.unit)
    if row[column.name] is None:
        return row["note"] or ""
    return spread(row[column.name + q] for q in ("_q1", "", "_q3"))


def heads_of(row: Row) -> str:
    return str(row["heads"]) if row["kv_heads"] is None else f"{row['heads']} / {row['kv_heads']}"


def machine(device: str) -> str:
    """Describe the device in one line: the GPU, or the processor with threads and float32 precision; then torch."""
    found = environment()
    cpu = "{processor}, threads: {threads}, float32 products: {float32_matmul}".format(**found["machine"])
    return f"{found['machine']['gpus'][0] if device == 'cuda' else cpu}, torch {found['packages']['torch']}"


def spread(quartiles: Iterable[float]) -> str:
    first, median, third = map(number, quartiles)
    return f"{median} ({first}–{third})"


def number(value: float | None, unit: float = 1) -> str:
    """Format a count with all digits, and a measured value with three digits.

    >>> number(12345), number(12345, 1e6), number(1234.5), number(1.0), number(None)
    ('12,345', '0.0123', '1,234', '1.00', '')
    """
    if value is None:
        return ""
    if isinstance(value, int) and unit == 1:
        return f"{value:,}"
    value /= unit
    digits = next((places for limit, places in ((0.1, 4), (1, 3), (10, 2), (100, 1)) if abs(value) < limit), 0)
    return f"{value:,.{digits}f}"
