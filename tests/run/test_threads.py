"""With how many threads a run is trained."""

import json
import os

import pytest
import torch

import kvt
from kvt import tune as hardware
from tests.helpers.runs import REVERSE


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    """A machine of four, which torch may use all; it only says so, since this one may be busy."""
    number = 4

    def set_number(asked):
        nonlocal number
        number = asked

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(torch, "set_num_threads", set_number)
    monkeypatch.setattr(torch, "get_num_threads", lambda: number)


@pytest.mark.parametrize(("asked", "small", "used"), [(3, 10**6, 3), (1000, 10**6, 4), (None, 10**6, 1), (None, 1, 4)])
def test_a_run_uses_the_number_asked_for_else_one_for_a_small_model(in_tmp_dir, monkeypatch, asked, small, used):
    monkeypatch.setattr(hardware, "SMALL", small)
    config = REVERSE.changed(threads=asked)
    assert config.name == REVERSE.name
    result = json.loads((kvt.train(config).folder / "result.json").read_text())
    assert result["machine"]["threads"] == used
    assert torch.get_num_threads() == 4
