"""Runs that are killed at a moment of their own: in the middle of a step, of a validation, of writing a checkpoint …"""

import json
import os
import signal
import sys
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from kvt.cli.main import run_lightning
from kvt.system.console import run
from kvt.training.callbacks import StopOnSignal
from kvt.training.checkpointing import AtomicCheckpointIO
from kvt.training.lightning_cli import CLI

PHASES: dict[CodeType, str] = {
    _TrainingEpochLoop.advance.__code__: "step",
    _EvaluationLoop.run.__code__: "validation",
    AtomicCheckpointIO.save_checkpoint.__code__: "checkpoint",
    StopOnSignal._agree.__code__: "agreement",
    _FitLoop.on_advance_end.__code__: "boundary",
    _FitLoop.on_advance_start.__code__: "boundary",
    CLI._conclude.__code__: "end",
}
"""What a process does while it is in one of these; the innermost counts. Before and between, it starts."""


class Moments:
    """Counts the calls of functions, Python's and C's, by phase; at some of them its process group gets a signal.

    Args:
        signals: phase:call:signal, one or more, or none.
    """

    def __init__(self, signals: str) -> None:
        moments = [word.split(":") for word in signals.split()]
        self.signals = {(phase, int(call)): int(number) for phase, call, number in moments}
        self.calls: Counter[str] = Counter()
        self._within: list[tuple[FrameType | None, str]] = [(None, "start")]

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code in PHASES:
            self._within.append((frame, PHASES[frame.f_code]))
        elif event == "return" and frame is self._within[-1][0]:
            self._within.pop()
        if event in ("call", "c_call"):
            phase = self._within[-1][1]
            self.calls[phase] += 1
            if (number := self.signals.get((phase, self.calls[phase]))) is not None:
                os.killpg(0, number)


def fit(words: list[str], signals: str, calls: Path) -> None:
    """Runs `fit` and its test, and writes how many calls each phase had."""
    moments = Moments(signals)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.setprofile(moments)
    run(lambda: run_lightning(["fit", *words], test=True))
    sys.setprofile(None)
    calls.write_text(json.dumps(moments.calls))


def forked(words: list[str], signals: str, calls: Path) -> int:
    """The same in a process of its own, forked from one that has everything imported; returns its exit code."""
    context: Any = get_context("forkserver")
    context.set_forkserver_preload(["kvt.training.lightning_cli", "kvt.fleet.launch"])
    process = context.Process(target=_in_folder, args=(Path.cwd(), words, signals, calls))
    process.start()
    process.join()
    return int(process.exitcode)


def _in_folder(folder: Path, *args: Any) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which what forks the workers of a study ignores
    os.chdir(folder)
    with open("printed.txt", "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    fit(*args)


if __name__ == "__main__":  # what torch's own launcher of processes starts again
    fit(sys.argv[3:], sys.argv[1], Path(sys.argv[2]))
