"""CPU settings for speed: the fastest exact float32 matmul, and a malloc that keeps freed pages."""

import ctypes
from contextlib import suppress
from functools import cache

import torch

from kvt.system.memory import limit_memory

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Options of mallopt, from glibc's malloc.h."""
FLOAT32_ERROR = 3e-6
"""Largest relative error accepted for a float32 product. Rounding grows with √2048 · 2⁻²⁴; bfloat16 is off by 2e-3,
TF32 by 3e-4."""


def tune() -> None:
    """Set this process's matmul precision, malloc and memory limit."""
    torch.set_float32_matmul_precision(fast_matmul())
    keep_memory()
    limit_memory()


@cache
def fast_matmul() -> str:
    """Return the fastest float32 matmul precision whose relative error stays below FLOAT32_ERROR.

    "medium" selects oneDNN, on many CPUs twice as fast as the default. On some CPUs it may compute in bfloat16, so its
    error is measured once. With a GPU the current setting is returned: there it decides about TF32, which is left to
    the user.
    """
    before = torch.get_float32_matmul_precision()
    if torch.cuda.is_available():
        return before
    try:
        torch.set_float32_matmul_precision("medium")
        return "medium" if _matmul_error() < FLOAT32_ERROR else "highest"
    finally:
        torch.set_float32_matmul_precision(before)


def keep_memory() -> bool:
    """Make glibc keep large freed buffers instead of returning them to the kernel, which costs page faults every step.

    The process then holds its peak memory until it ends. Returns whether a glibc accepted the settings.
    """
    with suppress(AttributeError, OSError, TypeError):  # another operating system or C library
        libc = ctypes.CDLL(None)
        return bool(libc.mallopt(M_MMAP_MAX, 0) and libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
    return False


def _matmul_error() -> float:
    """The largest relative error of float32 products of typical shapes, against float64."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for left, right in (((256, 512), (512, 512)), ((64, 2048), (2048, 64)), ((8, 65, 64), (8, 64, 65))):
        a, b = torch.randn(left, generator=generator), torch.randn(right, generator=generator)
        exact = a.double() @ b.double()
        worst = max(worst, float((a @ b - exact).norm() / exact.norm()))
    return worst
