"""The one mean that all tasks report, and its exponential."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torchmetrics import Metric

EXACT = torch.float32 if torch.backends.mps.is_available() else torch.float64
"""What sums are kept in. In float32 a prediction more is lost among 2²⁴, but Apple's GPUs have nothing wider."""


class WeightedMean(Metric):
    """Σ weight · value / Σ weight over all batches, of all processes. NaN stays NaN.

    torchmetrics' MeanMetric looks for NaN in every update, which makes the host wait for a GPU, and drops the weights
    where it is told not to (nan_strategy="disable", version 1.9).
    """

    full_state_update = False
    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=EXACT), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, value: Tensor, weight: int | Tensor) -> None:
        """Adds the mean `value` of `weight` predictions."""
        # in place: assigning to a metric takes longer than the sum; widened first: a product of halves overflows
        self.total.add_(value.to(self.total.dtype) * weight)
        self.weight.add_(weight)

    def compute(self) -> Tensor:
        """The mean so far."""
        return self.total / self.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        # goes where the model goes, but stays what it is: of a model in half precision even the sums would be
        device = fn(torch.empty(0, device=self.device)).device
        return super()._apply(lambda tensor: tensor.to(device), exclude_state)


class MeanPerplexity(WeightedMean):
    """exp(Σ weight · value / Σ weight), the values being means of −log p."""

    def compute(self) -> Tensor:
        """The perplexity so far."""
        return super().compute().exp()
