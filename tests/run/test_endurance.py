"""A long run holds no more than a short one: memory, open files, threads and checkpoints stop growing."""

import ctypes
import gc
import os
import sys
import threading
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import lightning as L
import pytest

from tests.conftest import SMALL

LIBC = ctypes.CDLL(None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(LIBC, "mallinfo2"), reason="only glibc says what is allocated"),
]
STEPS = {"reverse": 2400, "cifar10": 960, "anomaly": 960, "characters": 960, "translation": 960}
VALIDATIONS = 24
CACHE = type(lru_cache(len))
ROWS = 8  # of the history, so that it is full before anything is measured


class Allocated(ctypes.Structure):
    """The result of mallinfo2(3), in bytes."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keep"
    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in names.split()]


def holdings(checkpoint: Path) -> dict[str, int]:
    """Return the blocks of Python objects, bytes in all libraries, open files, threads, and bytes of the checkpoint."""
    for held in gc.get_objects():  # a cache that has a limit grows up to it and no further
        if isinstance(held, CACHE) and held.cache_parameters()["maxsize"] is not None:
            held.cache_clear()
    gc.collect()
    LIBC.mallinfo2.restype = Allocated
    allocated = LIBC.mallinfo2()
    return {
        "objects": sys.getallocatedblocks(),
        "memory": allocated.uordblks + allocated.hblkhd,
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "checkpoint": checkpoint.stat().st_size if checkpoint.is_file() else 0,
    }


class Watch(L.Callback):
    """Notes what the process holds after each validation."""

    seen: ClassVar[list[dict[str, int]]] = []

    def on_validation_end(self, trainer, pl_module):
        self.seen.append(holdings(Path(trainer.log_dir) / "checkpoints" / "last.ckpt"))


@pytest.fixture
def growth(experiment, monkeypatch):
    """Train and return by how much more a run holds, at the least, in its last quarter than in its second one.

    Minima leave out what is held for a moment, such as events that TensorBoard's thread has still to write.
    """
    monkeypatch.setattr("kvt.run.recorder.MAX_ROWS", ROWS)
    monkeypatch.setattr(Watch, "seen", [])

    def train(task: str, steps: int) -> dict[str, int]:
        words = ["--max_epochs=-1", f"--max_steps={steps}", f"--val_check_interval={steps // VALIDATIONS}"]
        words += [f"--trainer.callbacks+={__name__}.{Watch.__name__}"]
        experiment(task, *SMALL[task], *words, "--check_val_every_n_epoch=null")
        assert len(Watch.seen) == VALIDATIONS
        quarter = VALIDATIONS // 4
        early, late = Watch.seen[quarter : 2 * quarter], Watch.seen[-quarter:]
        return {name: min(now[name] for now in late) - min(now[name] for now in early) for name in late[0]}

    return train


@pytest.mark.parametrize("task", STEPS)
def test_nothing_grows(growth, task):
    more = growth(task, STEPS[task])
    assert more["objects"] < 300
    assert more["memory"] < 2**16
    assert more["files"] <= 1
    assert more["threads"] <= 0
    assert more["checkpoint"] < 2**10
