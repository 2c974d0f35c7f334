"""The one mean that all tasks report, and its exponential."""

import torch
from torch import Tensor
from torchmetrics import Metric


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
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, value: Tensor, weight: int | Tensor) -> None:
        """Adds the mean `value` of `weight` predictions."""
        self.total.add_(value * weight)  # in place: assigning to a metric takes longer than the sum
        self.weight.add_(weight)

    def compute(self) -> Tensor:
        """The mean so far."""
        return self.total / self.weight


class MeanPerplexity(WeightedMean):
    """exp(Σ weight · value / Σ weight), the values being means of −log p."""

    def compute(self) -> Tensor:
        """The perplexity so far."""
        return super().compute().exp()
