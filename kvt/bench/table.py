"""Measured numbers as CSV and as Markdown."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from kvt.system.files import atomically
from kvt.system.hardware import environment

Row = Mapping[str, Any]

COLUMNS = (
    *("attention", "heads", "kv_heads", "n", "d", "batch", "pos_dim", "device"),
    *("parameters", "paper_parameters", "forward_flops_per_example", "paper_multiply_adds_per_example"),
    *("forward_ms", "forward_ms_q1", "forward_ms_q3", "training_ms", "training_ms_q1", "training_ms_q3"),
    *("training_ratio", "training_ratio_q1", "training_ratio_q3", "training_peak_bytes"),
    *("cache_bytes_per_token", "note"),
)
"""The columns of the CSV. q1 and q3 are quartiles; unknown values are empty."""

HEADINGS = (
    *("attention", "heads / kv", "parameters", "paper", "forward MFLOP", "paper, M mult-adds"),
    *("forward ms", "training ms", "× first", "peak MiB", "cache B/token"),
)

TITLE = "# What a layer of attention costs"

NOTES = """\
Times are of a whole batch: medians, with quartiles in brackets. *training* is forward and backward; *× first* is its
time relative to the first line's, computed round by round; *peak* is the memory it holds at once beyond weights and
input. *FLOP* (of matrix products, two per multiply-add) and *cache* are per example. *paper*: the formulas of Borji
2023, Table 1: parameters and multiply-adds of what the scores are made of, without value and output."""


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    with atomically(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for row in rows:
            writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})


def markdown(rows: Sequence[Row], repeats: int) -> str:
    """Return how the rows were measured, and one table for each n and d."""
    layer = f"One self-attention layer, float32, batch {rows[0]['batch']}, m = {rows[0]['pos_dim']}"
    measured = f"{repeats} samples each, taken in turns, on {machine(rows[0]['device'])}."
    parts = [TITLE, f"{layer}; {measured}", NOTES]
    for (n, d), of_size in groupby(rows, key=lambda row: (row["n"], row["d"])):
        parts += [f"## n = {n}, d = {d}", table(HEADINGS, map(_cells, of_size))]
    return "\n\n".join(parts)


def _cells(row: Row) -> list[str]:
    return [
        *(row["attention"], heads_of(row), number(row["parameters"]), number(row["paper_parameters"])),
        *(number(row[name], 1e6) for name in ("forward_flops_per_example", "paper_multiply_adds_per_example")),
        *(
            row["note"] or spread(row[f"{time}{q}"] for q in ("_q1", "", "_q3"))
            for time in ("forward_ms", "training_ms")
        ),
        *(number(row["training_ratio"]), number(row["training_peak_bytes"], 2**20)),
        number(row["cache_bytes_per_token"]),
    ]


def heads_of(row: Row) -> str:
    return str(row["heads"]) if row["kv_heads"] is None else f"{row['heads']} / {row['kv_heads']}"


def machine(device: str) -> str:
    """Return one line about the machine: the GPU, or processor, threads and float32 products; and torch's version."""
    found = environment()
    cpu = "{processor}, threads: {threads}, float32 products: {float32_matmul}".format(**found["machine"])
    return f"{found['machine']['gpus'][0] if device == 'cuda' else cpu}, torch {found['packages']['torch']}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, [":--", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def spread(quartiles: Iterable[float]) -> str:
    first, median, third = map(number, quartiles)
    return f"{median} ({first}–{third})"


def number(value: float | None, unit: float = 1) -> str:
    """Format counts in full, measured values with three digits.

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
