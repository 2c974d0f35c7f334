"""A long run holds no more than a short one: memory, open files, threads and checkpoints stop growing."""

import ctypes
import gc
import os
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import ClassVar

import lightning as L
import pytest

from kvt.commands import run_words
from kvt.run.callbacks import RunCallback
from tests.conftest import CONFIGS, QUIET, SMALL

LIBC = ctypes.CDLL(None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(LIBC, "mallinfo2"), reason="only glibc says what is allocated"),
]
STEPS = {"reverse": 2400, "cifar10": 960, "anomaly": 960, "characters": 960, "translation": 960}
VALIDATIONS = 24
CACHE = type(lru_cache(len))


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
    """Notes what the process holds after each validation, without the history, which grows."""

    seen: ClassVar[list[dict[str, int]]] = []

    def on_validation_end(self, trainer, pl_module):
        next(one for one in trainer.callbacks if isinstance(one, RunCallback)).rows.clear()
        self.seen.append(holdings(Path(trainer.log_dir) / "checkpoints" / "last.ckpt"))


def growth(folder: Path, task: str) -> dict[str, int]:
    """Train and return by how much more a run holds, at the least, in its last quarter than in its second one.

    Minima leave out what is held for a moment, such as events that TensorBoard's thread has still to write.
    """
    os.chdir(folder)
    words = ["run", "--config", str(CONFIGS / f"{task}.yaml"), *QUIET, *SMALL[task], "--check_val_every_n_epoch=null"]
    words += ["--max_epochs=-1", f"--max_steps={STEPS[task]}", f"--val_check_interval={STEPS[task] // VALIDATIONS}"]
    run_words([*words, f"--trainer.callbacks+={__name__}.{Watch.__name__}"])
    assert len(Watch.seen) == VALIDATIONS
    quarter = VALIDATIONS // 4
    early, late = Watch.seen[quarter : 2 * quarter], Watch.seen[-quarter:]
    return {name: min(now[name] for now in late) - min(now[name] for now in early) for name in late[0]}


@pytest.mark.parametrize("task", STEPS)
def test_nothing_grows(in_tmp_dir, task):
    """In a process of its own: what other tests leave, such as records of a logger, grows too."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        more = process.submit(growth, in_tmp_dir, task).result()
    assert more["objects"] < 300
    assert more["memory"] < 2**16
    assert more["files"] <= 1
    assert more["threads"] <= 0
    assert more["checkpoint"] < 2**10
