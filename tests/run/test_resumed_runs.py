"""A run that was killed after a validation, or asked to stop, and resumed equals one that was not, bit for bit.

Runs that are killed at any moment stand in `test_killed_runs.py`.
"""

import errno
import json
import os
import shutil
import signal
from pathlib import Path

import lightning as L
import pytest
import torch

import kvt
from kvt.run.cli import KvtCLI
from kvt.run.fit import validate
from tests.conftest import slow
from tests.helpers.runs import REVERSE, checkpoint, equal, read_history, read_result, weights
from tests.helpers.small_tasks import TASKS, small_task

LISTS = REVERSE.changed(threads=1, log_every_n_steps=1, max_epochs=3)


def callback(name: str, **settings) -> dict[str, object]:
    return {"callbacks": {"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": settings}}


EMA = callback("EMAWeightAveraging", decay=0.9, use_buffers=False)
EARLY = {"max_epochs": 4} | callback("EarlyStopping", monitor="val/loss", patience=2, min_delta=10)
RUNS = {
    "several validations an epoch": {"val_check_interval": 2},
    "validation within an accumulation": {"accumulate_grad_batches": 4, "val_check_interval": 5},
    "early stopping": EARLY,
    "early stopping by training": EARLY | callback("EarlyStopping", monitor="train/loss", patience=2, min_delta=10),
    "early stopping within an epoch": EARLY | {"val_check_interval": 0.25},  # at its third validation
    "bf16-mixed": {"precision": "bf16-mixed"},
    "64-true": {"precision": "64-true"},
    "averaged weights": {"attn": "kv+phase", **EMA},
    "averaged weights, bf16-true": {"precision": "bf16-true", **EMA},
    "averaged weights, 64-true": {"precision": "64-true", **EMA},
    "overfitted batches": {"overfit_batches": 2, "dropout": 0.2},
}
"""Settings of runs of three epochs, or more, of six steps."""
RARE = ("early stopping by training", "64-true", "averaged weights, bf16-true", "averaged weights, 64-true")


class Keep(L.Callback):
    """Keeps a copy of a run's folder after its first validation, as if the run had been killed there."""

    def __init__(self, folder: Path, copy: Path) -> None:
        self.folder, self.copy = folder, copy

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (self.folder / "checkpoints" / "last.ckpt").exists() and not self.copy.exists():
            shutil.copytree(self.folder, self.copy)


class Send(L.Callback):
    """Sends signals to its own process at a hook, such as on_train_batch_end, after a step."""

    def __init__(self, hook: str, *signals: int, step: int) -> None:
        self.signals, self.step = signals, step
        setattr(self, hook, self.send)

    def send(self, trainer, *_):
        if trainer.global_step == self.step:
            for number in self.signals:
                os.kill(os.getpid(), number)


def require_same(resumed: Path, whole: Path) -> None:
    assert {**read_result(resumed), "config": None} == {**read_result(whole), "config": None}  # with defaults
    assert read_history(resumed) == read_history(whole)
    assert all(equal(weights(resumed, name), weights(whole, name)) for name in ("best", "last"))


@pytest.mark.parametrize("name", [*(name for name in RUNS if name not in RARE), *slow(*RARE)])
def test_a_killed_run_resumes_exactly(in_tmp_dir, name):
    config = LISTS.changed(**RUNS[name])
    kvt.train(config, "whole", callbacks=[Keep(Path("whole"), Path("killed"))])
    kvt.train(kvt.RunConfig.from_run("killed"), "killed", resume=True)
    require_same(Path("killed"), Path("whole"))


@pytest.mark.parametrize(
    ("hook", "number"),
    [
        ("on_train_batch_end", signal.SIGUSR1),
        ("on_validation_start", signal.SIGTERM),
        ("on_test_start", signal.SIGTERM),
        *slow(("on_train_batch_end", signal.SIGUSR2), ("on_train_batch_end", signal.SIGINT)),
    ],
)
@pytest.mark.parametrize("settings", [{}, *slow(EARLY)], ids=["plain", "early stopping"])
def test_a_signal_stops_a_run_resumably(in_tmp_dir, capfd, hook, number, settings):
    config = LISTS.changed(**settings)
    steps = {"on_train_batch_end": 8, "on_validation_start": 12, "on_test_start": 18}[hook]
    with pytest.raises(SystemExit) as ended:
        kvt.train(config, "mine", callbacks=[Send(hook, number, step=steps)])
    assert ended.value.code == 128 + number
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("stopped at step ")
    assert last.endswith(": resume with --resume mine")
    for folder in ("mine", "whole"):
        kvt.train(config, folder, resume=folder == "mine")
    require_same(Path("mine"), Path("whole"))


def test_a_full_disk_keeps_the_last_good_checkpoint(in_tmp_dir, monkeypatch):
    kvt.train(LISTS, "whole")
    save, calls = torch.save, iter(range(100))

    def full(content, file):
        save(content, file)
        if next(calls) == 3:  # the last checkpoint of the second epoch
            file.truncate(1000)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        kvt.train(LISTS, "mine")
    assert checkpoint(Path("mine"), "last")["epoch"] == 0
    assert not [*Path("mine").rglob("*.tmp")]
    kvt.train(LISTS, "mine", resume=True)
    require_same(Path("mine"), Path("whole"))


@pytest.mark.parametrize("name", TASKS)
def test_an_average_changes_no_constant(name):
    """Constants, such as the mean of the pixels, are no buffers; an average would change them in the last digit."""
    assert all(buffer.is_floating_point() for buffer in small_task(name).buffers())


@pytest.mark.parametrize("interval", [1.0, 4])
def test_a_run_with_averaged_weights_reports_what_its_checkpoint_has(in_tmp_dir, capsys, interval):
    result = kvt.train(LISTS.changed(**EMA, val_check_interval=interval), "mine")
    saved = checkpoint(Path("mine"), "last")
    assert saved["global_step"] == 18
    assert not equal(saved["state_dict"], saved["current_model_state"])
    config = LISTS.changed(ckpt_path=str(result.checkpoint))
    capsys.readouterr()
    validate(KvtCLI(config.as_dict()))
    reported = json.loads(Path("mine/result.json").read_text())
    lines = dict(line.strip("│ ").split("│") for line in capsys.readouterr().out.splitlines() if "val/" in line)
    shown = {name.strip(): float(value) for name, value in lines.items()}
    assert shown == {name: pytest.approx(reported[name], rel=1e-6) for name in shown}
