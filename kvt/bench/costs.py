"""Defines the quantities that `kvt bench` measures for a layer in training or decoding, and the table columns."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from kvt.bench.measure import cache_bytes_per_token, count_flops, decoding, paper_formulas, peak_bytes, steps


class Column(NamedTuple):
    """A column of the CSV and of the Markdown tables, or a panel of the plot."""

    name: str  # name in the CSV
    heading: str  # heading in Markdown
    unit: float = 1  # Markdown and the plot show the value divided by this unit
    sampled: bool = False  # whether the CSV also has the columns {name}_q1 and {name}_q3 for the quartiles
    ratio_of: str = ""  # for a column of ratios to the first attention: the column of the numbers that are divided
    label: str = ""  # axis label in the plot; the plot leaves out columns without a label


class Cost(NamedTuple):
    """A benchmark of training or decoding: the title, notes and columns of its table, and the functions to time."""

    title: str
    notes: str
    columns: tuple[Column, ...]
    measure: Callable[[nn.Module, Tensor, dict[str, Any]], dict[str, Callable[[], object]]]
    """Adds counts of a layer for x, (B, N, dim), to a row; returns a dict from timed column to the function to time."""
    from_seconds: Callable[[NDArray[np.float64], int], NDArray[np.float64]]
    """Returns the values of the timed columns from the seconds of the calls and the batch size B."""


def _training(layer: nn.Module, x: Tensor, row: dict[str, Any]) -> dict[str, Callable[[], object]]:
    example = x[:1]
    row["parameters"] = sum(p.numel() for p in layer.parameters())
    row["paper_parameters"], row["paper_multiply_adds_per_example"] = paper_formulas(layer, x.shape[1])
    row["forward_flops_per_example"] = count_flops(lambda: layer(example))
    row["cache_bytes_per_token"] = cache_bytes_per_token(layer, example)
    forward, training = steps(layer, x.requires_grad_())
    training()  # a warm-up step, which raises an error if memory is too small
    row["training_peak_bytes"] = peak_bytes(training, x.device.type)
    return {"forward_ms": forward, "training_ms": training}


def _decoding(layer: nn.Module, x: Tensor, row: dict[str, Any]) -> dict[str, Callable[[], object]]:
    step, cache = decoding(layer, x)
    row["cache_bytes"] = cache.nbytes
    row["cache_bytes_per_token"] = cache.nbytes // (x.shape[0] * x.shape[1])
    return {"tokens_per_s": step}


TRAINING = Cost(
    "# What a layer of attention costs",
    """\
Times are for a whole batch: medians, with quartiles in brackets. *training* is a forward and a backward pass. *× first*
is its time divided by that of the first row, computed in each round. *peak* is the peak memory of a training step
without weights and input. *FLOP* counts matrix products, two per multiply-add. *FLOP* and *cache* are for one example.
*paper* has parameters and multiply-adds by the formulas of Borji 2023, Table 1, which count the scores only, without
value and output.""",
    (
        Column("parameters", "parameters"),
        Column("paper_parameters", "paper"),
        Column("forward_flops_per_example", "forward MFLOP", 1e6),
        Column("paper_multiply_adds_per_example", "paper, M mult-adds", 1e6),
        Column("forward_ms", "forward ms", sampled=True),
        Column("training_ms", "training ms", sampled=True, label="training step (ms)"),
        Column("training_ratio", "× first", sampled=True, ratio_of="training_ms"),
        Column("training_peak_bytes", "peak MiB", 2**20, label="peak memory of a step (MiB)"),
        Column("cache_bytes_per_token", "cache B/token"),
    ),
    _training,
    lambda seconds, batch: 1000 * seconds,
)

DECODING = Cost(
    "# What decoding with a layer of attention costs",
    """\
A step decodes the n-th token of every sequence of the batch: it adds key and value of the token to a cache and attends
to all n tokens. *tokens/s* are for the whole batch: medians, with quartiles in brackets. *× first* is tokens/s divided
by those of the first row, computed in each round. A value above 1 is faster. *cache* is the size of keys and values,
for one token of a sequence and for the whole batch. A tensor that is both key and value is stored once.""",
    (
        Column("tokens_per_s", "tokens/s", sampled=True, label="tokens per second"),
        Column("tokens_ratio", "× first", sampled=True, ratio_of="tokens_per_s"),
        Column("cache_bytes_per_token", "cache B/token"),
        Column("cache_bytes", "cache MiB", 2**20, label="cache (MiB)"),
        Column("cache_ratio", "cache × first", ratio_of="cache_bytes"),
    ),
    _decoding,
    lambda seconds, batch: batch / seconds,
)
