"""What a finished run leaves behind: result.json, a table to read, an entry among TensorBoard's hyperparameters."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvt import __version__

PACKAGES = ("torch", "lightning", "torchmetrics", "torchvision")


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
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a whole file or none: a killed process leaves no half of it."""
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    part.write_text(json.dumps(content, indent=2, default=str) + "\n")
    os.replace(part, path)


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
    return f"{value:,}" if isinstance(value, int) else str(value)


def _git_commit() -> str | None:
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
