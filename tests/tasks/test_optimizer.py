"""Fused Adam of every task against torch's unfused Adam."""

import copy

import pytest
import torch
from torch.optim import Adam
from torch.testing import assert_close

from kvt.tasks import ListTask
from kvt.tasks.base import adam
from tests.conftest import SMALL_LISTS

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


@pytest.mark.slow
def test_gradients_are_clipped_in_mixed_precision(experiment):
    result = experiment("reverse", *SMALL_LISTS, "--max_steps", "2", "--precision", "bf16-mixed")
    assert result["config"]["trainer"]["gradient_clip_val"] == 5
