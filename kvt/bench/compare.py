"""Compares attention layers of the same size."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from kvt.attention import AttentionFactory
from kvt.bench.costs import Column, Cost
from kvt.bench.measure import quartiles, timed
from kvt.bench.table import csv_columns
from kvt.system.errors import is_out_of_memory


class Variant(NamedTuple):
    """An attention with numbers of heads and other arguments: one row of each table."""

    name: str  # shown in the table
    attn: str  # name or import path
    heads: int
    kv_heads: int | None
    settings: Mapping[str, Any] = MappingProxyType({})  # other arguments of the attention's class

    def make(self, d: int, n: int, pos_dim: int) -> nn.Module:
        settings = {**self.settings} if self.kv_heads is None else {**self.settings, "kv_heads": self.kv_heads}
        return AttentionFactory(self.attn, settings, heads=self.heads, max_len=n, pos_dim=pos_dim)(d)


def compare(
    cost: Cost, variants: Sequence[Variant], n: int, d: int, *, batch: int, pos_dim: int, repeats: int, device: str
) -> list[dict[str, Any]]:
    """Measure each variant with n tokens of width d; return a row for each variant, with the columns `csv_columns`.

    If a variant needs too much memory, the column "note" of its row is "out of memory".
    """
    common = dict.fromkeys(csv_columns(cost)) | {"n": n, "d": d, "batch": batch, "pos_dim": pos_dim, "device": device}
    rows: list[dict[str, Any]] = []
    calls: dict[tuple[int, str], Callable[[], object]] = {}
    for line, variant in enumerate(variants):
        row = common | {"attention": variant.name, "heads": variant.heads, "kv_heads": variant.kv_heads}
        rows.append(row)
        try:
            x = torch.randn(batch, n, d, device=device)
            layer = variant.make(d, n, pos_dim).to(device)
            calls |= {(line, name): call for name, call in cost.measure(layer, x, row).items()}
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            row["note"] = "out of memory"
    for (line, name), seconds in timed(calls, repeats).items():
        rows[line][name] = cost.from_seconds(np.array(seconds), batch)
    _finish(cost.columns, rows)
    return rows


def _finish(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> None:
    """Add to each row its ratios to the first row, one ratio per round; replace samples and ratios by quartiles."""
    for name, of in ((column.name, column.ratio_of) for column in columns if column.ratio_of):
        for row in rows:
            if row[of] is not None and rows[0][of] is not None:
                row[name] = row[of] / rows[0][of]
    for row, name in product(rows, (column.name for column in columns if column.sampled)):
        if row[name] is not None:
            row |= zip((f"{name}_q1", name, f"{name}_q3"), quartiles(row[name]), strict=True)
