"""Available memory, limits on it, and building modules without using any."""

from functools import cache
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from kvt.system.errors import UserError

OBJECT_BYTES = 2048
"""Approximate size of a layer's or parameter's Python and torch objects, besides its numbers."""


def free_memory() -> int:
    """Return the bytes that can be allocated without swapping."""
    return int(psutil.virtual_memory().available)


def require_memory(needed: int, what: str) -> None:
    """Raise UserError if fewer than `needed` bytes are available; the message begins with `what`, e.g. a flag."""
    if needed > (free := free_memory()):
        raise UserError(f"{what} needs {needed // 2**20:,} MiB of memory, there are {free // 2**20:,}: choose less")


@cache
def limit_memory() -> None:
    """Limit this process to the memory available now: a larger allocation then fails, and no process is killed.

    Linux only, and without a GPU only: CUDA reserves address space for all memory that the machine might have.
    """
    process = psutil.Process()
    if torch.cuda.is_available() or not hasattr(process, "rlimit"):
        return
    soft, hard = process.rlimit(psutil.RLIMIT_DATA)
    most = process.memory_info().data + free_memory()
    if soft == psutil.RLIM_INFINITY or most < soft:
        process.rlimit(psutil.RLIMIT_DATA, (most, hard))


def footprint(module: nn.Module) -> int:
    """Return the bytes of a module: parameters, buffers and the objects that hold them."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.nbytes for tensor in tensors) + OBJECT_BYTES * (len(tensors) + sum(1 for _ in module.modules()))


class MetaParameters(TorchFunctionMode):
    """Context manager: `torch.empty`, and thus every layer's parameters, go to the meta device and take no memory.

    Unlike `torch.device("meta")` it leaves other factory functions alone, whose values a constructor may need: Swin
    computes its drop rates by `torch.linspace(...)`.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}) | ({"device": "meta"} if func is torch.empty else {}))
