"""What a result depends on besides its settings: versions, machine, commit."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvt import __version__

PACKAGES = ("torch", "lightning", "torchmetrics", "torchvision", "torchtext", "spacy", "sacrebleu")


def environment() -> dict[str, Any]:
    """Return the versions, the machine, and the commit of the code if it is known."""
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


def _git_commit() -> str | None:
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():
        return None  # installed: a repository around it would be another one
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
