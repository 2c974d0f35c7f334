"""Every run ends with a validation: its checkpoints and its result are of all that was trained."""

import json
from pathlib import Path

import pytest

from tests.conftest import SMALL_LISTS, slow
from tests.helpers.runs import checkpoint, read_history

LISTS = [*SMALL_LISTS, "--lr=0.02"]  # six batches an epoch
ENDS = {
    "epochs, an interval of batches": ("--max_epochs=2 --val_check_interval=4", 12),
    "epochs, an interval of a share": ("--max_epochs=2 --val_check_interval=0.7", 12),
    "epochs, an interval across them": ("--max_epochs=2 --val_check_interval=5 --check_val_every_n_epoch=null", 12),
    "epochs, of which every third": ("--max_epochs=4 --check_val_every_n_epoch=3", 24),
    "epochs of fewer batches": ("--max_epochs=1 --limit_train_batches=5 --val_check_interval=3", 5),
    "epochs, steps of several batches": ("--max_epochs=2 --accumulate_grad_batches=4 --val_check_interval=5", 4),
    "steps": ("--max_steps=7", 7),
    "steps, of every third epoch": ("--max_steps=7 --check_val_every_n_epoch=3", 7),
    "steps before the least epochs": ("--max_steps=7 --min_epochs=2", 7),
    "time": ("--max_epochs=100000 --max_time=00:00:00:01 --check_val_every_n_epoch=100000", None),
}
"""Flags, and the step at which the run ends."""
DEFAULT = ["epochs, an interval of batches", "epochs, of which every third", "steps"]


def require_validated_last(folder: Path, steps: int | None) -> None:
    """Make sure that a run has validated its last step once, and keeps and reports the metrics of that validation."""
    rows = read_history(folder)
    validated = {int(row["step"]): float(row["val/acc"]) for row in rows if row.get("val/acc")}
    last, best = (checkpoint(folder, name) for name in ("last", "best"))
    assert last["global_step"] == (steps or int(rows[-1]["step"]))
    assert [int(row["step"]) for row in rows if row.get("val/acc")] == list(validated), "validated twice"
    assert last["metrics"]["val/acc"] == validated[last["global_step"]]
    result = json.loads((folder / "result.json").read_text())
    assert result["val/acc"] == max(validated.values()) == validated[best["global_step"]]
    assert any(row["train/loss"] for row in rows if int(row["step"]) == last["global_step"])


@pytest.mark.parametrize("name", [*DEFAULT, *slow(*(name for name in ENDS if name not in DEFAULT))])
def test_a_run_ends_with_a_validation(experiment, name):
    flags, steps = ENDS[name]
    require_validated_last(experiment("reverse", *LISTS, *flags.split())["path"].parent, steps)
