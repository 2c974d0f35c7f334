"""Runs that get signals at chosen moments: in the middle of a step, of a validation, of writing a checkpoint …"""

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lightning as L

from kvt.commands import run_words
from kvt.run.callbacks import AtomicCheckpointIO, RunCallback
from kvt.run.results import save_results
from kvt.system import run
from kvt.view.pictures import Shown
from tests.helpers.drivers import fork_server, redirect_output

BEGINS: dict[CodeType, str] = {
    RunCallback.on_train_batch_start.__code__: "step",
    RunCallback.on_train_batch_end.__code__: "boundary",
    RunCallback.on_validation_start.__code__: "validation",
    RunCallback.on_train_epoch_end.__code__: "boundary",
    Shown.on_train_end.__code__: "trained",  # a run that resumes here trains no more
    L.Trainer.test.__code__: "end",
    save_results.__code__: "end",
}
"""The phase of a process by the function that begins it. Before all others it is "start"."""
WITHIN: dict[CodeType, str] = {
    AtomicCheckpointIO.save_checkpoint.__code__: "checkpoint",
    RunCallback._stop_if_asked.__code__: "agreement",
}
"""A phase that lasts as long as a function."""


class Moments:
    """A profiler that counts the calls of functions, Python's and C's, by phase.

    At moments written "phase:call:signal", separated by spaces, it sends the signal to its process group.
    """

    def __init__(self, signals: str) -> None:
        moments = [word.split(":") for word in signals.split()]
        self.signals = {(phase, int(call)): int(number) for phase, call, number in moments}
        self.calls: Counter[str] = Counter()
        self.phase = "start"
        self.within: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            self.phase = BEGINS.get(frame.f_code, self.phase)
            if frame.f_code in WITHIN:
                self.within = frame
        elif event == "return" and frame is self.within:
            self.within = None
        if event in ("call", "c_call"):
            phase = WITHIN[self.within.f_code] if self.within else self.phase
            self.calls[phase] += 1
            if (number := self.signals.get((phase, self.calls[phase]))) is not None:
                os.killpg(0, number)


def fit(words: list[str], signals: str, calls: Path) -> None:
    """Run `fit` and its test, and write how many calls each phase had."""
    moments = Moments(signals)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.setprofile(moments)
    run(lambda: run_words(["run", *words]))
    sys.setprofile(None)
    calls.write_text(json.dumps(moments.calls))


def forked(words: list[str], signals: str, calls: Path) -> int:
    """Call `fit` in a process that is forked from one that has everything imported; return its exit code."""
    process = fork_server().Process(target=_in_folder, args=(Path.cwd(), dict(os.environ), words, signals, calls))
    process.start()
    process.join()
    return int(process.exitcode)


def _in_folder(folder: Path, environment: dict[str, str], *args: Any) -> None:
    os.environ.update(environment)  # a fork server has that of the test that started it
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a fork server ignores it
    os.chdir(folder)
    redirect_output(Path("printed.txt"))
    fit(*args)


if __name__ == "__main__":  # started again by torch's own launcher of processes
    fit(sys.argv[3:], sys.argv[1], Path(sys.argv[2]))
