"""Measure attention layers of one size against each other."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvt.attention import AttentionFactory
from kvt.bench import measure
from kvt.bench.table import COLUMNS
from kvt.system.errors import is_out_of_memory


class Variant(NamedTuple):
    """An attention with its heads: one line of each table."""

    name: str  # in the table
    attn: str  # name or import path
    heads: int
    kv_heads: int | None

    def make(self, d: int, n: int, pos_dim: int) -> nn.Module:
        settings = {} if self.kv_heads is None else {"kv_heads": self.kv_heads}
        return AttentionFactory(self.attn, settings, heads=self.heads, max_len=n, pos_dim=pos_dim)(d)


def compare(
    variants: Sequence[Variant], n: int, d: int, *, batch: int, pos_dim: int, repeats: int, device: str
) -> list[dict[str, Any]]:
    """Return a row of `COLUMNS` for each variant, for n tokens and width d. A note tells what ran out of memory."""
    common = dict.fromkeys(COLUMNS) | {"n": n, "d": d, "batch": batch, "pos_dim": pos_dim, "device": device}
    rows: list[dict[str, Any]] = []
    timed: list[tuple[dict[str, Any], measure.Stopwatch, measure.Stopwatch]] = []
    for variant in variants:
        row = common | {"attention": variant.name, "heads": variant.heads, "kv_heads": variant.kv_heads}
        rows.append(row)
        try:
            x = torch.randn(batch, n, d, device=device, requires_grad=True)
            layer = variant.make(d, n, pos_dim).to(device)
            row |= _count(layer, x[:1].detach())
            forward, training = measure.steps(layer, x)
            watches = measure.Stopwatch(forward, device), measure.Stopwatch(training, device)
            row["training_peak_bytes"] = measure.peak_bytes(training, device)
            timed.append((row, *watches))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            row["note"] = "out of memory"
    samples = measure.in_turns([watch.sample for _, *watches in timed for watch in watches], repeats)
    for (row, *_), forwards, trainings in zip(timed, samples[::2], samples[1::2], strict=True):
        row |= _summary("forward_ms", [1000 * seconds for seconds in forwards])
        row |= _summary("training_ms", [1000 * seconds for seconds in trainings])
        if rows[0]["note"] is None:
            row |= _summary("training_ratio", [ours / first for ours, first in zip(trainings, samples[1], strict=True)])
    return rows


def _count(layer: nn.Module, example: Tensor) -> dict[str, Any]:
    parameters, multiply_adds = measure.paper_formulas(layer, example.shape[1])
    return {
        "parameters": sum(p.numel() for p in layer.parameters()),
        "paper_parameters": parameters,
        "forward_flops_per_example": measure.count_flops(layer, example),
        "paper_multiply_adds_per_example": multiply_adds,
        "cache_bytes_per_token": measure.cache_bytes_per_token(layer, example),
    }


def _summary(name: str, samples: Sequence[float]) -> dict[str, float]:
    return dict(zip((f"{name}_q1", name, f"{name}_q3"), measure.quartiles(samples), strict=True))
