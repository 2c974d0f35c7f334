"""What all tasks share."""

import torch

from kvt.attention import KV, Attention
from kvt.tasks import ListTask
from kvt.tasks.base import WeightedMean

SPEC = {"vocab_size": 10, "length": 6}


def test_a_nan_is_not_hidden():
    mean = WeightedMean()
    mean.update(torch.tensor(1.0), 3)
    mean.update(torch.tensor(float("nan")), 1)
    assert mean.compute().isnan()


def test_a_subclass_may_pass_other_settings_on_than_its_own():
    class Wide(ListTask):
        def __init__(self, spec, heads=1):
            super().__init__(spec, attn="kv", dim=16, depth=1, heads=2 * heads)

    attention = next(part for part in Wide(SPEC).modules() if isinstance(part, Attention))
    assert (type(attention), attention.heads) == (KV, 2)
