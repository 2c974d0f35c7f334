"""The measured table, as CSV and as Markdown."""

import csv
from collections.abc import Mapping, Sequence
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
    parts = [_measured_on(rows[0], repeats), NOTES]
    for (n, d), of_size in groupby(rows, key=lambda row: (row["n"], row["d"])):
        table = [HEADINGS, [":--", *["--:"] * (len(HEADINGS) - 1)], *map(_cells, of_size)]
        parts += [f"### n = {n}, d = {d}", "\n".join(f"| {' | '.join(cells)} |" for cells in table)]
    return "\n\n".join(parts)


def _measured_on(row: Row, repeats: int) -> str:
    found = environment()
    machine = found["machine"]
    processor = f"{machine['processor']}, threads: {machine['threads']}, products: {machine['float32_matmul']}"
    where = machine["gpus"][0] if row["device"] == "cuda" else processor
    layer = f"One self-attention layer, float32, batch {row['batch']}, m = {row['pos_dim']}"
    return f"{layer}; {repeats} samples each, taken in turns, on {where}, torch {found['packages']['torch']}."


def _cells(row: Row) -> list[str]:
    heads = str(row["heads"]) if row["kv_heads"] is None else f"{row['heads']} / {row['kv_heads']}"
    return [
        *(row["attention"], heads, _number(row["parameters"]), _number(row["paper_parameters"])),
        *(_number(row[name], 1e6) for name in ("forward_flops_per_example", "paper_multiply_adds_per_example")),
        *(row["note"] or _spread(row, time) for time in ("forward_ms", "training_ms")),
        *(_number(row["training_ratio"]), _number(row["training_peak_bytes"], 2**20)),
        _number(row["cache_bytes_per_token"]),
    ]


def _spread(row: Row, name: str) -> str:
    return f"{_number(row[name])} ({_number(row[f'{name}_q1'])}–{_number(row[f'{name}_q3'])})"


def _number(value: float | None, unit: float = 1) -> str:
    """Format counts in full, measured values with three digits.

    >>> _number(12345), _number(12345, 1e6), _number(1234.5), _number(1.0), _number(None)
    ('12,345', '0.0123', '1,234', '1.00', '')
    """
    if value is None:
        return ""
    if isinstance(value, int) and unit == 1:
        return f"{value:,}"
    value /= unit
    digits = next((places for limit, places in ((0.1, 4), (1, 3), (10, 2), (100, 1)) if abs(value) < limit), 0)
    return f"{value:,.{digits}f}"
