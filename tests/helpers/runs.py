"""What runs leave in their folders, without clock times, so that two runs can be compared."""

import csv
import json
from pathlib import Path
from typing import Any

import torch

from kvt import RunConfig
from kvt.run.load_checkpoint import read_checkpoint

REVERSE = RunConfig.from_name("reverse").changed(
    **{"train_size": 96, "val_size": 20, "test_size": 20, "batch_size": 16, "dim": 16, "max_epochs": 1},
    **{"accelerator": "cpu", "enable_progress_bar": False},
)
"""A run of six steps."""
CLOCKS = ("seconds", "started", "finished", "_per_second")


def read_result(run: Path) -> dict[str, Any]:
    result = json.loads((run / "result.json").read_text())
    return {name: value for name, value in result.items() if not name.endswith(CLOCKS)}


def read_history(run: Path) -> list[dict[str, str]]:
    with (run / "history.csv").open(newline="") as file:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]


def checkpoint(run: Path, name: str) -> dict[str, Any]:
    return read_checkpoint(run / "checkpoints" / f"{name}.ckpt")


def weights(run: Path, name: str) -> dict[str, torch.Tensor]:
    return checkpoint(run, name)["state_dict"]


def equal(one: Any, other: Any) -> bool:
    """Return whether tensors, or lists and mappings of tensors and plain data, are equal bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def contents(folder: Path) -> dict[Path, bytes]:
    """Return every file below a folder."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
