"""Measure attention layers of one size against each other."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvt.attention import AttentionFactory
from kvt.bench.measure import cache_bytes_per_token, count_flops, paper_formulas, peak_bytes, quartiles, steps, timed
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
    calls: dict[tuple[int, str], Callable[[], object]] = {}
    for line, variant in enumerate(variants):
        row = common | {"attention": variant.name, "heads": variant.heads, "kv_heads": variant.kv_heads}
        rows.append(row)
        try:
            x = torch.randn(batch, n, d, device=device, requires_grad=True)
            layer = variant.make(d, n, pos_dim).to(device)
            row |= _count(layer, x[:1].detach())
            forward, training = steps(layer, x)
            training()  # warms up, or runs out of memory
            row["training_peak_bytes"] = peak_bytes(training, device)
            calls |= {(line, "forward_ms"): forward, (line, "training_ms"): training}
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            row["note"] = "out of memory"
    samples = timed(calls, repeats)
    first = samples.get((0, "training_ms"))
    for (line, time), seconds in samples.items():
        rows[line] |= _summary(time, [1000 * sample for sample in seconds])
        if first and time == "training_ms":
            rows[line] |= _summary("training_ratio", [own / firsts for own, firsts in zip(seconds, first, strict=True)])
    return rows


def _count(layer: nn.Module, example: Tensor) -> dict[str, Any]:
    parameters, multiply_adds = paper_formulas(layer, example.shape[1])
    return {
        "parameters": sum(p.numel() for p in layer.parameters()),
        "paper_parameters": parameters,
        "forward_flops_per_example": count_flops(lambda: layer(example)),
        "paper_multiply_adds_per_example": multiply_adds,
        "cache_bytes_per_token": cache_bytes_per_token(layer, example),
    }


def _summary(name: str, samples: Sequence[float]) -> dict[str, float]:
    return dict(zip((f"{name}_q1", name, f"{name}_q3"), quartiles(samples), strict=True))
