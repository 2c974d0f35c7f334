"""The timing of runs for a dry run."""

import time
from pathlib import Path

import pytest
import yaml

from kvt.study import forecast
from kvt.study.forecast import _Clock, _length, _trainer, calibrate
from kvt.study.grid import read_grid
from kvt.study.workers import places
from kvt.tasks import DigitLists, ListTask
from kvt.training.callbacks import FinalValidation
from tests.study.test_command import TINY

OWN = """
import os, signal, time
from kvt.attention import KV

class Wrong(KV):
    def forward(self, *args, **kwargs):
        raise RuntimeError("this attention does not work")

class Deadly(KV):
    def forward(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

class Slow(KV):
    def forward(self, *args, **kwargs):
        time.sleep(1000)
"""


@pytest.fixture
def runs(in_tmp_dir, monkeypatch):
    """The runs of a grid with these tasks and attentions."""
    (in_tmp_dir / "timed.py").write_text(OWN)
    monkeypatch.syspath_prepend(in_tmp_dir)

    def read(*attentions: str, tasks=("sort",)):
        axes = {"dim": 16, "heads": 2, "depth": 1, "attn": [*attentions]}
        content = TINY | {"tasks": [*tasks], "axes": axes}
        Path("grid.yaml").write_text(yaml.safe_dump(content))
        return read_grid(Path("grid.yaml")).runs

    return read


class Count(FinalValidation):
    batches = validations = 0

    def on_train_batch_end(self, trainer, *args):
        self.batches += 1
        super().on_train_batch_end(trainer, *args)

    def on_validation_end(self, *args):
        self.validations += 1
        super().on_validation_end(*args)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_epochs": 2, "val_check_interval": 0.25},
        {"max_epochs": 3, "val_check_interval": 4},
        {"max_epochs": 4, "check_val_every_n_epoch": 2},
        {"max_epochs": 4, "limit_train_batches": 5},
        {"max_epochs": 2, "accumulate_grad_batches": 2},
        {"max_epochs": -1, "max_steps": 10, "val_check_interval": 4, "check_val_every_n_epoch": None},
    ],
    ids=str,
)
def test_a_run_is_as_long_as_the_clock_says(settings):
    data = DigitLists(train_size=128, val_size=16, test_size=16, batch_size=16)
    config = {"trainer": {"accelerator": "cpu", **settings}}
    clock, count = _Clock(), Count()
    part, whole = _trainer(config, clock, limit_val_batches=0), _trainer(config, count)
    for trainer in (part, whole):
        trainer.fit(ListTask(data.spec, dim=16, depth=1, heads=2), datamodule=data)
    assert _length(part) == (count.batches, count.validations)
    assert len(clock.times) > 1


@pytest.mark.slow
def test_an_estimate_for_what_can_be_timed_and_a_reason_for_what_cannot(runs, tmp_path):
    all_runs = runs("kv", "timed.Wrong", tasks=("sort", "characters"))
    wrong_text, wrong, text, fine = sorted(all_runs, key=lambda run: (run.attention == "kv", run.task == "sort"))
    (closed := tmp_path / "closed").touch()  # a file, in which no data can lie
    found = {run.name: found for run, found in calibrate(all_runs, str(closed), places(1)[0])}
    assert found[fine.name] > 0
    assert found[wrong.name] == "RuntimeError: this attention does not work"
    assert "cannot write in" in found[text.name]
    assert found[text.name] == found[wrong_text.name]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["closed", "grid.yaml", "timed.py"]


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["timed.Deadly", "timed.Slow"])
def test_a_run_that_ends_or_blocks_the_process_has_no_estimate(runs, monkeypatch, attention):
    calibrate(runs("kv"), "data", places(1)[0])  # from now on no imports
    monkeypatch.setattr(forecast, "PATIENCE", 3.0)
    begun = time.monotonic()
    assert calibrate(runs(attention), "data", places(1)[0]) == []
    assert time.monotonic() - begun < 30
