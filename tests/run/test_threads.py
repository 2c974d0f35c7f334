"""With how many threads a run is trained."""

import json
import os
import signal

import pytest
import torch
from lightning import Callback

import kvt
from kvt.run.run import Result
from kvt.system import hardware
from kvt.system.errors import UserError

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


@pytest.mark.parametrize(
    ("seconds", "most", "fastest"),
    [
        ({1: 1.0, 2: 3.0, 4: 0.1}, 4, 1),  # another process is busy
        ({1: 1.0, 2: 0.9, 4: 0.2}, 4, 1),  # not clearly
        ({1: 1.0, 2: 0.6, 4: 0.58}, 4, 2),
        ({1: 1.0, 2: 0.6, 4: 0.35}, 4, 4),
        ({1: 1.0, 2: 0.6, 3: 0.45}, 3, 3),
        ({1: 1.0}, 1, 1),  # as in a worker of a study
    ],
)
def test_there_are_more_threads_than_one_if_they_are_clearly_faster(monkeypatch, seconds, most, fastest):
    now = 0.0
    monkeypatch.setattr(hardware, "perf_counter", lambda: now)

    def work():
        nonlocal now
        now += seconds[torch.get_num_threads()] / 1000

    torch.set_num_threads(most)
    assert hardware.fastest_threads(work) == fastest
    assert torch.get_num_threads() == most


def threads_of(result: Result) -> int:
    return json.loads((result.folder / "result.json").read_text())["machine"]["threads"]


@pytest.mark.parametrize(("asked", "used"), [(3, 3), (1000, 4), (None, 2)])
def test_a_run_is_trained_with_the_number_that_is_asked_for_else_the_fastest(in_tmp_dir, monkeypatch, asked, used):
    monkeypatch.setattr("kvt.run.start.fastest_threads", lambda work: work().ndim)
    config = CONFIG.changed(threads=asked)
    assert config.name == CONFIG.name
    assert threads_of(kvt.train(config)) == used
    assert torch.get_num_threads() == 4


def test_where_the_system_does_not_say_which_cores_one_may_use_it_is_all(in_tmp_dir, monkeypatch):
    for name in ("sched_getaffinity", "sched_setaffinity"):  # as on macOS
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr("kvt.run.start.fastest_threads", lambda work: 3)
    assert threads_of(kvt.train(CONFIG)) == 3
    assert threads_of(kvt.train(CONFIG.changed(threads=1000))) == 4


def test_a_resumed_run_keeps_its_number(in_tmp_dir, monkeypatch):
    class Stop(Callback):
        def on_validation_end(self, trainer, pl_module):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("kvt.run.start.fastest_threads", lambda work: 3)
    with pytest.raises(SystemExit):
        kvt.train(CONFIG, "mine", callbacks=[Stop()])
    monkeypatch.setattr("kvt.run.start.fastest_threads", lambda work: 2)
    assert threads_of(kvt.train(CONFIG, "mine", resume=True)) == 3
    assert threads_of(kvt.train(CONFIG, "another")) == 2


@pytest.mark.parametrize("number", [0, -1])
def test_there_is_at_least_one(number):
    with pytest.raises(UserError, match="--threads"):
        CONFIG.changed(threads=number)
