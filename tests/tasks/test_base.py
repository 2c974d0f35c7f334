"""The weighted mean against its definition; fused Adam against torch's unfused Adam."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import Adam
from torch.testing import assert_close

from kvt.attention import KV, Attention
from kvt.tasks import ListTask
from kvt.tasks.base import WeightedMean, adam

SPEC = {"vocab_size": 10, "length": 6}


def task() -> ListTask:
    torch.manual_seed(0)
    return ListTask(SPEC, dim=16, depth=1, heads=2, dropout=0.0)


def unfused(task: ListTask) -> Adam:
    return Adam(task.parameters(), lr=task.hparams["lr"])


def step(task: ListTask, optimizer: Adam) -> None:
    digits = torch.arange(24).view(4, 6) % 10
    optimizer.zero_grad()
    task.compute_metrics((digits, digits.flip(1)))["loss"].backward()
    optimizer.step()


def test_it_is_adam():
    ours, theirs = task(), task()
    fast, slow = adam(ours), unfused(theirs)
    assert fast.defaults["fused"]
    for _ in range(5):
        step(ours, fast)
        step(theirs, slow)
    for parameter, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_close(parameter, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [adam, unfused], ids=["fused", "unfused"])
def test_the_state_of_either_resumes_exactly(make):
    whole = task()
    optimizer = make(whole)
    step(whole, optimizer)
    resumed, state = copy.deepcopy(whole), copy.deepcopy(optimizer.state_dict())
    loaded = adam(resumed)
    loaded.load_state_dict(state)
    for _ in range(3):
        step(whole, optimizer)
        step(resumed, loaded)
    for expected, got in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, got)


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


def test_a_subclass_may_pass_other_settings_on_than_its_own():
    class Wide(ListTask):
        def __init__(self, spec, heads=1):
            super().__init__(spec, attn="kv", dim=16, depth=1, heads=2 * heads)

    attention = next(part for part in Wide(SPEC).modules() if isinstance(part, Attention))
    assert (type(attention), attention.heads) == (KV, 2)
