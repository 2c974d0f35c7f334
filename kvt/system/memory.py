"""The memory that there is, and asking for it before it is used."""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from kvt.system.errors import UserError

GROUPS = Path("/sys/fs/cgroup")
"""Where Linux says what a container or a job of a cluster may use …"""
USAGE = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
"""… by version 2 and version 1, and what is used of it."""
OBJECT = 2048
"""Bytes that a layer or a parameter takes besides its numbers: Python's dictionaries, torch's headers."""


def free_memory() -> int:
    """The bytes that this process may still take: of the machine, of its control group, of its own limit.

    A number beyond all memories where the operating system does not say.
    """
    return max(0, min(_of_machine(), *_of_groups(), _of_process()))


def require_memory(needed: int, what: str) -> None:
    """Makes sure that there is so much memory, before it is taken piece by piece.

    Args:
        needed: bytes.
        what: needs it, as the user asked for it.

    Raises:
        UserError: there is less.
    """
    if needed > (free := free_memory()):
        raise UserError(f"{what} needs {needed // 2**20:,} MiB of memory, there are {free // 2**20:,}: choose less")


def footprint(module: nn.Module) -> int:
    """The bytes of a module, its numbers and all that is around them."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.nbytes for tensor in tensors) + OBJECT * (len(tensors) + sum(1 for _ in module.modules()))


class WithoutMemory(TorchFunctionMode):
    """Makes tensors that wait for their values, parameters of layers among them, without memory.

    Unlike `with torch.device("meta")` it leaves alone what a network computes its shape from.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}) | ({"device": "meta"} if func is torch.empty else {}))


@cache
def limit_memory() -> None:
    """Lets an allocation fail that is greater than the memory there is, where Linux would kill some process later.

    Shared memory and files do not count. On a machine with a GPU nothing is limited: there CUDA reserves addresses for
    all the memory that the machine might have.
    """
    if torch.cuda.is_available():
        return
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = _used() + min(_of_machine(), *_of_groups())
        if soft == resource.RLIM_INFINITY or most < soft:
            resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _of_machine() -> int:
    with suppress(OSError, KeyError):
        found = _numbers(Path("/proc/meminfo"))
        return 1024 * (found["MemAvailable:"] + found["SwapFree:"])
    with suppress(AttributeError, OSError, ValueError):  # not Linux: all that it has
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return sys.maxsize


def _of_groups() -> Iterator[int]:
    """What each control group leaves that this process is in; what files take of it is given back when it is needed."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers in ("", "memory"):
                group = GROUPS / controllers / name.removeprefix("/")
                for folder in (group, *group.parents):
                    yield from _of_group(folder)


def _of_group(folder: Path) -> Iterator[int]:
    for limit, usage in USAGE.items():
        with suppress(OSError, ValueError):  # no such file; "max"
            files = _numbers(folder / "memory.stat")
            cached = sum(files.get(f"total_{name}", files.get(name, 0)) for name in ("active_file", "inactive_file"))
            yield int((folder / limit).read_text()) - int((folder / usage).read_text()) + cached


def _of_process() -> int:
    with suppress(ImportError, OSError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
        if soft != resource.RLIM_INFINITY:
            return soft - _used()
    return sys.maxsize


def _used() -> int:
    """The bytes of this process that count for its limit."""
    return 1024 * _numbers(Path("/proc/self/status"))["VmData:"]


def _numbers(path: Path) -> dict[str, int]:
    """The lines "name number …" of a file."""
    words = [line.split() for line in path.read_text().splitlines()]
    return {name: int(number) for name, number, *_ in (w for w in words if len(w) > 1) if number.isdigit()}
