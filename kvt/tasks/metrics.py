"""Descriptions of metrics, and running means."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any, Literal

import numpy as np
import torch
import torchmetrics
from torch import Tensor

ACCUM_DTYPE = torch.float32 if torch.backends.mps.is_available() else torch.float64
"""Data type of sums: float64, since float32 cannot count beyond 2²⁴; float32 with an Apple GPU, which lacks float64."""


@dataclass(frozen=True)
class Metric:
    """Description of a metric of a task.

    >>> Metric("squared_error", better="less").label
    'squared error'
    >>> Metric("acc_{}_back", "accuracy {} places back").called("acc_4_back").label
    'accuracy 4 places back'

    Args:
        name: name in logs and tables, after the stage: val/NAME. If the name contains {}, there is one metric for each
            of the task's `bins`, with the bin in place of {}.
        label: name in the text of tables and figures; default: `name` with spaces instead of underscores.
        unit: unit of the values, such as nats.
        better: "more" or "less"; None: reports do not say which value is better.
        how: "mean": the mean over all predictions of a stage. "exp": e to the power of this mean; reports compare the
            logarithms of values. "recorded": the task computes the metric at the end of a stage, and calls `record`.
        highest: highest possible value. A point in reports is highest / 100, or 0.01 if highest is inf or at most 0.
        stages: stages in which the metric is computed.
    """

    name: str
    label: str = ""
    unit: str = ""
    better: Literal["more", "less"] | None = None
    how: Literal["mean", "exp", "recorded"] = "mean"
    highest: float = inf
    stages: Sequence[str] = ("train", "val", "test")

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or self.name.replace("_", " "))
        object.__setattr__(self, "stages", tuple(self.stages))

    def called(self, name: str) -> "Metric | None":
        """Return the metric called `name`: this metric, or the metric of one of its bins; else None."""
        same = re.fullmatch(re.escape(self.name).replace(r"\{\}", r"(\d+)"), name)
        return replace(self, name=name, label=self.label.format(*same.groups())) if same else None

    @property
    def point(self) -> float:
        """The size of a point, the unit of differences in reports."""
        return self.highest / 100 if 0 < self.highest < inf else 0.01

    def scaled(self, values: Any) -> Any:
        """Return the values from which differences are computed: logarithms if `how` is "exp", else `values`."""
        return np.log(values) if self.how == "exp" else values

    @property
    def point_in_words(self) -> str:
        if self.how == "exp":
            return f"one per cent of {self.words} (a hundredth of the difference of logarithms)"
        return f"{self.point:g} of {self.words}" if self.point != 1 else f"1 {self.words}"

    @property
    def words(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label

    def value(self, number: float) -> str:
        places = 2 if self.how == "exp" else 1 if self.point >= 1 else 3
        return f"{number:.{places}f}" if isfinite(number) else "–"

    def points(self, difference: float) -> str:
        """Format a difference of two `scaled` values in points; NaN and infinity give a dash."""
        if not isfinite(difference):
            return "–"
        text = f"{difference / self.point:+.2f}"
        return text if float(text) else "0.00"


LOSS = Metric("loss", unit="nats", better="less")
ACC = Metric("acc", "accuracy", better="more", highest=1)
PPL = Metric("ppl", "perplexity", better="less", how="exp", stages=("val", "test"))


class Mean(torchmetrics.Metric):
    """The ratio Σ total / Σ weight over all batches and processes: a scalar, or a tensor with one ratio for each bin.

    A NaN makes the result NaN. A check for NaN, as in torchmetrics' MeanMetric, would make the CPU wait for the GPU.
    """

    full_state_update = False
    total: Tensor
    weight: Tensor

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(shape, dtype=ACCUM_DTYPE), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros(shape, dtype=ACCUM_DTYPE), dist_reduce_fx="sum")

    def update(self, total: Tensor, weight: float | Tensor) -> None:
        # not in place: `trainer.validate` makes inference tensors, which training cannot change in place
        self.total = self.total + total
        self.weight = self.weight + weight

    def compute(self) -> Tensor:
        return self.total / self.weight


def by_bin(values: Tensor, bins: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the sum and the number of values in each bin 0 … count − 1. `bins`, int64 (n), has the bin of each value.

    >>> by_bin(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 2, 0]), 3)
    (tensor([2., 0., 0.], dtype=torch.float64), tensor([2, 0, 1]))
    """
    total = torch.zeros(count, dtype=ACCUM_DTYPE, device=values.device)
    total.index_add_(0, bins, values.to(ACCUM_DTYPE))
    return total, torch.zeros(count, dtype=torch.long, device=values.device).index_add_(0, bins, torch.ones_like(bins))
