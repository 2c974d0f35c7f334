"""A model that blows up: its run stops and says so, reports nothing that is no number, and keeps what was good."""

import json
import os
import subprocess
import sys
from math import isfinite
from pathlib import Path

import pytest
import torch

from kvt.training.load_checkpoint import read_checkpoint
from tests.conftest import QUIET, REPOSITORY, SMALL
from tests.helpers.sandbox import command

BREAKING = ["--model", "tests.helpers.breaking.Breaking", *SMALL["reverse"]]
BATCHES = 6
"""Of training data in an epoch; of validation data it is two."""


@pytest.mark.parametrize("task", ["reverse", "characters", "translation"])
@pytest.mark.parametrize(
    "flags",
    [[], ["--accumulate_grad_batches", "2", "--precision", "bf16-mixed"], ["--precision", "16-true"]],
    ids=str,
)
def test_a_run_that_diverges_stops_and_says_so(experiment, task, flags):
    result = experiment(task, *SMALL[task], "--lr", "1e30", "--max_epochs", "50", *flags)
    assert "/loss is nan at step" in result["diverged"]
    require_untested(result)
    assert not [*Path().rglob("best.ckpt")]
    assert read_checkpoint(next(Path().rglob("last.ckpt")))["epoch"] < 10


@pytest.mark.parametrize("factor", ["inf", "nan"])
@pytest.mark.parametrize(("stage", "batch", "named"), [("validate", 4, "val/loss"), ("train", BATCHES + 2, "/loss")])
def test_one_batch_is_enough(experiment, monkeypatch, stage, batch, named, factor):
    monkeypatch.setenv("BREAKS", f"{stage}:0:{batch}:{factor}")
    result = experiment("reverse", *BREAKING, "--max_epochs", "50")
    assert result["diverged"].partition(" is ")[0].endswith(named)
    assert result["diverged"].endswith(f"at step {2 * BATCHES}")
    require_untested(result)
    require_good_until(result, 1)


def test_a_test_that_is_no_number_is_no_divergence(experiment, monkeypatch):
    """The model was chosen by its validation; what its test says is said."""
    monkeypatch.setenv("BREAKS", "test:0:1:inf")
    result = experiment("reverse", *BREAKING)
    assert "diverged" not in result
    assert result["test/loss"] == float("inf")


@pytest.mark.slow
@pytest.mark.parametrize("breaks", ["train:1:5:nan", "validate:1:2:inf", "validate:0:2:nan", None])
def test_two_processes_stop_together(in_tmp_dir, breaks):
    """Whichever of them meets it, and where both do."""
    words = [*BREAKING, "--max_epochs", "50", *QUIET, "--devices", "2", "--strategy", "ddp"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "BREAKS": breaks or "none:0:0:0"}
    ended = subprocess.run(
        [sys.executable, str(REPOSITORY / "experiments" / "synthetic.py"), *words, *([] if breaks else ["--lr=1e30"])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    (path,) = Path().rglob("result.json")
    result = {"path": path, **json.loads(path.read_text())}
    require_untested(result)
    if breaks:
        assert result["diverged"].endswith(f"at step {BATCHES}")  # of two epochs, a process has half of each
        require_good_until(result, 1)
    else:
        assert not [*Path().rglob("best.ckpt")]


def test_a_model_that_has_diverged_writes_nothing(in_tmp_dir, experiment):
    experiment("characters", *SMALL["characters"])
    path = next(Path().rglob("last.ckpt"))
    checkpoint = torch.load(path, weights_only=True)
    for weight in checkpoint["state_dict"].values():
        weight.mul_(torch.nan) if weight.is_floating_point() else None
    torch.save(checkpoint, "nan.ckpt")
    for temperature in ("0", "1"):
        command("generate", "--ckpt_path", "nan.ckpt", "--prompt", "To", "--temperature", temperature).refused(
            "diverged"
        )


def require_untested(result):
    """It has diverged, and what it reports is of before."""
    assert "diverged" in result
    assert not any(name.startswith("test/") for name in result)
    assert all(isfinite(value) for name, value in result.items() if "/" in name)


def require_good_until(result, epochs):
    """Its best checkpoint is of the last of these epochs, sound, and what the result reports."""
    run = result["path"].parent
    best = read_checkpoint(run / "checkpoints" / "best.ckpt")
    assert best["epoch"] == epochs - 1
    assert best["metrics"] == {name: value for name, value in result.items() if name.startswith("val/")}
    assert all(weight.isfinite().all() for weight in best["state_dict"].values())
    assert read_checkpoint(run / "checkpoints" / "last.ckpt")["epoch"] == epochs
    assert "has finished" in command("fit", "--resume", str(run), *QUIET[:2]).out
