"""A run of any length holds no more than a short one: memory, open files, threads and checkpoints stop growing."""

import ctypes
import gc
import os
import sys
import threading
from functools import _lru_cache_wrapper
from pathlib import Path
from typing import ClassVar, NamedTuple

import lightning as L
import pytest
import torch

from kvt.training.history import remember
from tests.conftest import SMALL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc says what is allocated"),
]
STEPS = {"reverse": 2400, "cifar10": 960, "anomaly": 960, "characters": 960, "translation": 960}
VALIDATIONS = 24
ROWS = 8  # of the history, so that it is full before anything is measured


class Allocated(ctypes.Structure):
    """What mallinfo2(3) says, in bytes."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    ]


class Holdings(NamedTuple):
    """What a process holds.

    Attributes:
        objects: of Python, counted in blocks of memory.
        memory: in use by all libraries, in bytes.
        files: open.
        threads: of Python.
        checkpoint: the last one's bytes.
    """

    objects: int
    memory: int
    files: int
    threads: int
    checkpoint: int

    @classmethod
    def now(cls, checkpoint: Path) -> "Holdings":
        for held in gc.get_objects():  # a cache that has a limit grows up to it and no further
            if isinstance(held, _lru_cache_wrapper) and held.cache_parameters()["maxsize"] is not None:
                held.cache_clear()
        gc.collect()
        (ask := ctypes.CDLL(None).mallinfo2).restype = Allocated
        allocated = ask()
        return cls(
            sys.getallocatedblocks(),
            allocated.uordblks + allocated.hblkhd,
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            checkpoint.stat().st_size if checkpoint.is_file() else 0,
        )


class Watch(L.Callback):
    """Notes what the process holds after each validation."""

    seen: ClassVar[list[Holdings]] = []

    def on_validation_end(self, trainer, pl_module):
        self.seen.append(Holdings.now(Path(trainer.log_dir) / "checkpoints" / "last.ckpt"))


class Hoard(L.Callback):
    """Keeps something of every step, and a file of every validation."""

    def __init__(self):
        self.hoarded = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.hoarded.append(torch.zeros(16))

    def on_validation_end(self, trainer, pl_module):
        self.hoarded.append(open(os.devnull))  # noqa: SIM115


@pytest.fixture
def growth(experiment, monkeypatch):
    """By how much more a run holds at most in its second half than in the quarter before, after so many steps."""
    monkeypatch.setattr(remember, "__defaults__", (ROWS,))
    monkeypatch.setattr(Watch, "seen", [])

    def make(task: str, steps: int, *callbacks: type) -> Holdings:
        words = ["--max_epochs=-1", f"--max_steps={steps}", f"--val_check_interval={steps // VALIDATIONS}"]
        words += [f"--trainer.callbacks+={__name__}.{callback.__name__}" for callback in (*callbacks, Watch)]
        experiment(task, *SMALL[task], *words, "--check_val_every_n_epoch=null")
        assert len(Watch.seen) == VALIDATIONS
        earlier, later = Watch.seen[VALIDATIONS // 4 : VALIDATIONS // 2], Watch.seen[VALIDATIONS // 2 :]
        most = [[max(column) for column in zip(*part, strict=True)] for part in (earlier, later)]
        return Holdings(*(b - a for a, b in zip(*most, strict=True)))

    return make


@pytest.mark.parametrize("task", STEPS)
def test_nothing_grows(growth, task):
    more = growth(task, STEPS[task])
    assert more.objects < 300
    assert more.memory < 2**16
    assert more.files <= 1
    assert more.threads <= 0
    assert more.checkpoint < 2**10


def test_what_is_hoarded_is_seen(growth):
    more = growth("reverse", 960, Hoard)
    assert more.objects > 300
    assert more.files > 1
