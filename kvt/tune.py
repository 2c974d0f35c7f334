"""Tunes torch and malloc for this machine, and describes hardware, packages and commit."""

import ctypes
import os
import platform
import re
import subprocess
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvt.version import __version__

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # options of mallopt, from glibc's malloc.h
FLOAT32_ERROR = 3e-6  # largest accepted relative error of a product; float32 has √2048 · 2⁻²⁴, TF32 3e-4, bfloat16 2e-3
SMALL = 1_000_000  # number of parameters below which a model is trained with one thread
PACKAGES = ("torch", "lightning", "torchmetrics", "torchvision", "torchtext", "spacy", "sacrebleu")
PRODUCTS = (((256, 512), (512, 512)), ((64, 2048), (2048, 64)), ((8, 65, 64), (8, 64, 65)))  # shapes of factors

fast_products = False
"""Whether `tune` has chosen oneDNN for float32 matrix products."""


def tune() -> None:
    """Set options of torch and of glibc's malloc for speed, and disable cuDNN's attention for correct gradients."""
    global fast_products
    has_gpu = torch.cuda.is_available()
    # "medium" selects oneDNN. With AVX-512, oneDNN is about twice as fast as the default; with only AVX2 it is no
    # faster, and torch's fused attention becomes slower. On a GPU, the setting would control TF32.
    if not has_gpu and torch.backends.cpu.get_cpu_capability() != "AVX2":
        torch.set_float32_matmul_precision("medium")
        # measures the error, because "medium" computes in bfloat16 on some CPUs
        generator, fast_products = torch.Generator().manual_seed(0), True
        for left, right in PRODUCTS:
            a, b = torch.randn(left, generator=generator), torch.randn(right, generator=generator)
            exact = a.double() @ b.double()
            fast_products &= bool((a @ b - exact).norm() / exact.norm() < FLOAT32_ERROR)
        if not fast_products:
            torch.set_float32_matmul_precision("highest")
    with suppress(AttributeError, OSError, TypeError):  # raised on other operating systems and C libraries
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1)):
            ctypes.CDLL(None).mallopt(option, value)  # glibc keeps freed memory: fewer page faults
    # Lightning sets this variable so that torch counts GPUs without initialising CUDA, because a process forked later
    # could not use CUDA. Without a GPU, the variable only makes every optimiser step search the disk for libnvidia-ml.
    if not has_gpu:
        os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    # On an H200 with torch 2.11, the backward pass of cuDNN's attention gave the attention "q-kv-deepseek" bfloat16
    # gradients with a relative error of 120 %.
    torch.backends.cuda.enable_cudnn_sdp(False)


def cores() -> list[int]:
    """Return the indices of the cores that this process may use; on macOS and Windows, the indices of all cores."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


def use_threads(number: int | None, parameters: int) -> None:
    """Set torch's number of threads to `number`, or to the number of cores if there are fewer cores.

    If `number` is None, a model with fewer than `SMALL` parameters gets one thread, and a larger model keeps torch's
    number. All threads wait for the slowest thread in each operation: beside one busy process, two threads trained a
    small model three times more slowly than one thread.
    """
    if number is not None:
        torch.set_num_threads(min(number, len(cores())))
    elif parameters < SMALL:
        torch.set_num_threads(1)


class MetaParameters(TorchFunctionMode):
    """Context manager: create tensors of `torch.empty`, such as the weights of `nn.Linear`, on the meta device.

    `torch.device("meta")` puts the tensors of all factory functions on the meta device. This class changes only
    `torch.empty`, because a constructor may need the values of other tensors.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}) | ({"device": "meta"} if func is torch.empty else {}))


def environment() -> dict[str, Any]:
    """Return a dict that describes software and machine, for JSON files; "commit" is None if unknown."""
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
    checkout = Path(__file__).parents[1]
    if (checkout / ".git").exists():  # an installed kvt might lie in another project's repository
        with suppress(OSError, subprocess.CalledProcessError):
            command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
            # GIT_DIR and the like may name another repository, and are dropped; GIT_CONFIG_* may set safe.directory
            env = {name: value for name, value in os.environ.items() if not re.match("GIT_(?!CONFIG)", name)}
            done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, check=True)
            return done.stdout.strip()
    return None


def _processor() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return platform.processor()
