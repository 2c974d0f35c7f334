"""What makes this processor fast, turned on where it costs no accuracy."""

import ctypes
from contextlib import suppress
from functools import cache

import torch

from kvt.system.memory import limit_memory

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""mallopt's names, from glibc's malloc.h."""
FLOAT32_ERROR = 3e-6
"""The greatest relative error of a product that still is one of float32: it grows with the root of 2048 · 2⁻²⁴, while
bfloat16 is off by 2e-3 and TF32 by 3e-4."""


def tune() -> None:
    """Chooses the fastest exact matrix product, keeps memory that was given back, sets it the machine's limit."""
    torch.set_float32_matmul_precision(fast_matmul())
    keep_memory()
    limit_memory()


@cache
def fast_matmul() -> str:
    """The fastest setting of `torch.set_float32_matmul_precision` that leaves products as accurate as they are.

    "medium" multiplies with oneDNN, which on many processors is twice as fast as the default; but the name promises
    bfloat16 only, and some processors take it at its word. So it is tried out, once. Where there is a GPU the setting
    stays as it is: there it means TF32, which is for the user to choose.
    """
    if torch.cuda.is_available():
        return torch.get_float32_matmul_precision()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        return "medium" if _error() < FLOAT32_ERROR else "highest"
    finally:
        torch.set_float32_matmul_precision(before)


def keep_memory() -> bool:
    """Tells glibc to keep large buffers that were given back, where it would return them to the kernel at each step.

    What a process needs at most it then keeps until its end. Returns whether there is a glibc to tell.
    """
    with suppress(AttributeError, OSError, TypeError):  # another operating system, another C library
        library = ctypes.CDLL(None)
        return bool(library.mallopt(M_MMAP_MAX, 0) and library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
    return False


def _error() -> float:
    """The greatest relative error of products of the shapes that models are made of."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for left, right in (((256, 512), (512, 512)), ((64, 2048), (2048, 64)), ((8, 65, 64), (8, 64, 65))):
        a, b = torch.randn(left, generator=generator), torch.randn(right, generator=generator)
        exact = a.double() @ b.double()
        worst = max(worst, float((a @ b - exact).norm() / exact.norm()))
    return worst
