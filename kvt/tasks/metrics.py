"""The weighted mean that all tasks report, and perplexity."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torchmetrics import Metric

EXACT = torch.float32 if torch.backends.mps.is_available() else torch.float64
"""Type of sums: float32 stops counting at 2²⁴, but Apple's GPUs have nothing wider."""


class WeightedMean(Metric):
    """Σ weight · value / Σ weight over all batches and processes. NaN stays NaN.

    torchmetrics' MeanMetric searches every update for NaN, which makes the host wait for the GPU; told not to
    (nan_strategy="disable"), it ignores the weights (version 1.9).
    """

    full_state_update = False
    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=EXACT), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, value: Tensor, weight: int | Tensor) -> None:
        """Add the mean `value` of `weight` predictions."""
        # in place, because assigning to a metric is slow; converted first, because products of half floats overflow
        self.total.add_(value.to(self.total.dtype) * weight)
        self.weight.add_(weight)

    def compute(self) -> Tensor:
        return self.total / self.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        # follow the model to its device, but not to half precision
        device = fn(torch.empty(0, device=self.device)).device
        return super()._apply(lambda tensor: tensor.to(device), exclude_state)


class MeanPerplexity(WeightedMean):
    """exp(Σ weight · value / Σ weight), where values are means of −log p."""

    def compute(self) -> Tensor:
        return super().compute().exp()
