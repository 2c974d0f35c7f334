"""A run that diverges stops, says so in its result, reports finite numbers only, and keeps its last good checkpoint."""

import json
import os
import subprocess
import sys
from collections import Counter
from math import isfinite
from pathlib import Path

import pytest

from kvt.tasks import ListTask
from tests.conftest import QUIET, REPOSITORY, SMALL, slow
from tests.helpers.commands import command
from tests.helpers.runs import checkpoint

BREAKING = ["--model", f"{__name__}.Breaking", *SMALL["reverse"]]
BATCHES = 6  # of training data in an epoch; of validation data it is two


class Breaking(ListTask):
    """Multiplies the loss of one batch, and with it its gradients, by a number.

    The environment variable BREAKS is stage:rank:batch:factor, as in train:1:4:nan; batches of a stage count from 1.
    """

    def on_train_start(self):
        super().on_train_start()
        self.batches = Counter()

    def compute_metrics(self, batch):
        measured = super().compute_metrics(batch)
        now = self.trainer.state.stage.value
        self.batches[now] += 1
        stage, rank, number, factor = os.environ["BREAKS"].split(":")
        if (now, self.global_rank, self.batches[now]) == (stage, int(rank), int(number)):
            measured["loss"] = measured["loss"] * float(factor)
        return measured


HALF = [["--accumulate_grad_batches", "2", "--precision", "bf16-mixed"], ["--precision", "16-true"]]


@pytest.mark.parametrize("task", ["reverse", *slow("characters", "translation")])
@pytest.mark.parametrize("flags", [[], *slow(*HALF)], ids=str)
def test_a_run_that_diverges_stops_and_says_so(experiment, task, flags):
    result = experiment(task, *SMALL[task], "--lr", "1e30", "--max_epochs", "50", *flags)
    assert "/loss is nan at step" in result["diverged"]
    require_untested(result)
    assert not [*Path().rglob("best.ckpt")]
    assert checkpoint(result["path"].parent, "last")["epoch"] < 10


@pytest.mark.parametrize(
    ("breaks", "named"),
    [
        ("validate:0:4:inf", "val/loss"),
        (f"train:0:{BATCHES + 2}:nan", "/loss"),
        *slow(("validate:0:4:nan", "val/loss"), (f"train:0:{BATCHES + 2}:inf", "/loss")),
    ],
)
def test_one_batch_is_enough(experiment, monkeypatch, breaks, named):
    monkeypatch.setenv("BREAKS", breaks)
    result = experiment("reverse", *BREAKING, "--max_epochs", "50")
    assert result["diverged"].partition(" is ")[0].endswith(named)
    assert result["diverged"].endswith(f"at step {2 * BATCHES}")
    require_untested(result)
    require_first_epoch_kept(result)


def test_an_infinite_test_loss_is_reported_and_no_divergence(experiment, monkeypatch):
    monkeypatch.setenv("BREAKS", "test:0:1:inf")
    result = experiment("reverse", *BREAKING)
    assert "diverged" not in result
    assert result["test/loss"] == float("inf")


@pytest.mark.slow
@pytest.mark.parametrize("breaks", ["train:1:5:nan", "validate:1:2:inf", "validate:0:2:nan", None])
def test_two_processes_stop_together(in_tmp_dir, breaks):
    """In one of them a loss is not finite; None: in both."""
    words = [*BREAKING, "--max_epochs", "50", *QUIET, "--devices", "2", "--strategy", "ddp"]
    words += [] if breaks else ["--lr=1e30"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "BREAKS": breaks or "none:0:0:0"}
    script = [sys.executable, str(REPOSITORY / "experiments" / "synthetic.py"), *words]
    ended = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    (path,) = Path().rglob("result.json")
    result = {"path": path, **json.loads(path.read_text())}
    require_untested(result)
    if breaks:
        assert result["diverged"].endswith(f"at step {BATCHES}")  # of two epochs: a process has half of each
        require_first_epoch_kept(result)
    else:
        assert not [*Path().rglob("best.ckpt")]


def require_untested(result):
    """Make sure that it has diverged, is not tested, and reports finite numbers only."""
    assert "diverged" in result
    assert not any(name.startswith("test/") for name in result)
    assert all(isfinite(value) for name, value in result.items() if "/" in name)


def require_first_epoch_kept(result):
    """Make sure that the best checkpoint is that of the first of two epochs, sound, and what the result reports."""
    run = result["path"].parent
    best = checkpoint(run, "best")
    assert best["epoch"] == 0
    assert best["metrics"] == {name: value for name, value in result.items() if name.startswith("val/")}
    assert all(weight.isfinite().all() for weight in best["state_dict"].values())
    assert checkpoint(run, "last")["epoch"] == 1
    assert "already finished" in command("fit", "--resume", str(run), *QUIET[:2]).out
