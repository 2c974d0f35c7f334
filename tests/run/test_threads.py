"""With how many threads a run is trained."""

import json
import os

import pytest
import torch

import kvt
from kvt import tune as hardware
from kvt.run.fit import Result

CONFIG = kvt.RunConfig.from_name("reverse").changed(
    **{"train_size": 96, "val_size": 20, "test_size": 20, "batch_size": 16, "dim": 16, "max_epochs": 2},
    **{"enable_progress_bar": False, "accelerator": "cpu", "logger": "none"},
)


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


def threads_of(result: Result) -> int:
    return json.loads((result.folder / "result.json").read_text())["machine"]["threads"]


@pytest.mark.parametrize(("asked", "small", "used"), [(3, 10**6, 3), (1000, 10**6, 4), (None, 10**6, 1), (None, 1, 4)])
def test_a_run_uses_the_number_asked_for_else_one_for_a_small_model(in_tmp_dir, monkeypatch, asked, small, used):
    monkeypatch.setattr(hardware, "SMALL", small)
    config = CONFIG.changed(threads=asked)
    assert config.name == CONFIG.name
    assert threads_of(kvt.train(config)) == used
    assert torch.get_num_threads() == 4
