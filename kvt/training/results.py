"""What a finished run leaves behind: result.json, history.csv, predictions.csv, a table to read."""

import csv
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvt import __version__
from kvt.system.files import atomically

PACKAGES = ("torch", "lightning", "torchmetrics", "torchvision", "torchtext", "spacy", "sacrebleu")


def environment() -> dict[str, Any]:
    """On what a result was measured: versions, machine, and the commit of the code where that can be known."""
    return {
        "python": platform.python_version(),
        "packages": {"kvt": __version__} | {name: version(name) for name in PACKAGES},
        "commit": _git_commit(),
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "processor": _processor(),
            "threads": torch.get_num_threads(),
            "float32_matmul": torch.get_float32_matmul_precision(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a result."""
    with atomically(path) as part:
        part.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def write_history(path: Path, history: Sequence[Mapping[str, float]]) -> None:
    """Writes one line a step that something was logged at, one column a metric."""
    columns = dict.fromkeys(name for row in history for name in row)
    with atomically(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(history)


def write_predictions(path: Path, batches: Sequence[Mapping[str, Tensor | list[str]]]) -> None:
    """Writes one line a prediction, one column a name, four decimals; lists of numbers share a cell."""
    columns = {}
    for name in batches[0]:
        columns[name] = [cell for batch in batches for cell in _cells(batch[name])]
    with atomically(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["example", *columns])
        writer.writerows([example, *row] for example, row in enumerate(zip(*columns.values(), strict=True)))


def _cells(column: Tensor | list[str]) -> list[Any]:
    if isinstance(column, list):
        return column
    cells: list[Any] = (column.double().round(decimals=4) if column.is_floating_point() else column).tolist()
    return cells


def table(rows: Mapping[str, Any]) -> str:
    """Names and values in two columns.

    >>> print(table({"test/acc": 0.98765, "parameters": 12345}))
    test/acc    0.9877
    parameters  12,345
    """
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {_readable(value)}" for name, value in rows.items())


def _readable(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 100 else f"{value:,.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_readable(part)}" for name, part in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def _git_commit() -> str | None:
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():
        return None  # installed: whatever repository lies around it is not ours
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
        return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
