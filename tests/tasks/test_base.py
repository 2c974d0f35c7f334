"""What all tasks share."""

import torch

from kvt.tasks.base import WeightedMean


def test_a_nan_is_not_hidden():
    mean = WeightedMean()
    mean.update(torch.tensor(1.0), 3)
    mean.update(torch.tensor(float("nan")), 1)
    assert mean.compute().isnan()
