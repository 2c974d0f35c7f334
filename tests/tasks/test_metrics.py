"""The weighted mean against its definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvt.tasks.base import WeightedMean

BATCHES = st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(1, 1000)), min_size=1, max_size=8)


@given(BATCHES)
def test_every_prediction_counts_alike(batches):
    mean = WeightedMean()
    for value, weight in batches:
        mean.update(torch.tensor(value), weight)
    expected = sum(value * weight for value, weight in batches) / sum(weight for _, weight in batches)
    assert mean.compute().item() == pytest.approx(expected, abs=1e-3)


def test_a_nan_is_not_hidden():
    mean = WeightedMean()
    mean.update(torch.tensor(1.0), 3)
    mean.update(torch.tensor(float("nan")), 1)
    assert mean.compute().isnan()
