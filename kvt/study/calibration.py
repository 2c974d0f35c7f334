"""Estimates of a run's time from a few timed batches, for a dry run."""

import os
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import ceil, isfinite
from multiprocessing.connection import Connection
from pydoc import locate
from time import monotonic, perf_counter
from typing import Any

import lightning as L
import torch
from tqdm import tqdm

from kvt.data.tensor_files import read_only
from kvt.study.config import TRAINER, Config
from kvt.study.grid import Run
from kvt.study.local import Place, context_of_workers, settle
from kvt.study.run import reason
from kvt.system.errors import UserError
from kvt.system.hardware import tune
from kvt.tasks import Task, TaskData

PATIENCE = 60.0
"""Seconds that the timing of all runs may take."""
TIMED_SECONDS, MAX_BATCHES, WARM_UP = 0.3, 50, 2
"""Training batches to time for a shape: enough to take these seconds, at most so many, after some that do not count."""
HELD_OUT = 2
"""Batches of validation to time."""


def calibrate(runs: Sequence[Run], data_dir: str, place: Place) -> tuple[dict[str, float], dict[str, str]]:
    """Time some batches of each run in another process, in random order, for at most `PATIENCE` seconds.

    Nothing is downloaded or written.

    Returns:
        The seconds that a run takes alone, by name; and the reason by name of a run that cannot be timed.
    """
    seconds: dict[str, float] = {}
    reasons: dict[str, str] = {}
    deadline = monotonic() + PATIENCE
    context = context_of_workers()
    receive, send = context.Pipe(duplex=False)
    configs = {run.name: run.config for run in random.Random(0).sample(runs, len(runs))}
    process = context.Process(target=_work, args=(configs, data_dir, place, send), daemon=True)
    process.start()
    send.close()
    try:
        with tqdm(total=len(runs), desc="timing a few steps", leave=False) as bar, suppress(EOFError, OSError):
            while receive.poll(max(0.0, deadline - monotonic())):  # until it has ended, or a run has killed it
                name, found = receive.recv()
                (reasons if isinstance(found, str) else seconds)[name] = found
                bar.update()
    finally:
        process.kill()
        process.join()
    return seconds, reasons


def _work(configs: Mapping[str, Config], data_dir: str, place: Place, answer: Connection) -> None:
    """Run the process that times: it sends the name of each run with its seconds, or the reason why there are none."""
    settle(place)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(nowhere, output)
    tune()
    with read_only():
        for name, config in configs.items():
            try:
                answer.send((name, _seconds(config, data_dir)))
            except Exception as error:
                answer.send((name, reason(error)))


def _seconds(config: Config, data_dir: str) -> float:
    """Return the seconds that a run takes, or raise what the run would raise."""

    def make(section: str, **settings: Any) -> Any:
        made: Any = locate(config[section]["class_path"])
        return made(**config[section]["init_args"], **settings)

    begun = perf_counter()
    data: TaskData = make("data", data_dir=data_dir, seed=config["seed_everything"])
    data.prepare_data()
    data.setup("fit")
    seconds = perf_counter() - begun
    task: Task = make("model", spec=data.spec)
    clock = _Clock()
    _trainer(config, clock, limit_val_batches=0, min_epochs=None, min_steps=None).fit(task, datamodule=data)
    seconds += clock.batches * clock.seconds_a_batch
    _trainer(config, clock, limit_val_batches=HELD_OUT).validate(task, datamodule=data, verbose=False)
    for split, passes in {"val": clock.validations, "test": 1}.items():
        if split in data.splits:
            there = ceil(len(data.splits[split][0]) / data.batch_size)
            limit = config["trainer"].get(f"limit_{split}_batches", 1.0)
            count = min(limit, there) if isinstance(limit, int) else int(limit * there)
            seconds += passes * count * clock.seconds_a_held_out_batch
    return seconds


def _trainer(config: Config, clock: "_Clock", **changes: Any) -> L.Trainer:
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    alone = {"devices": 1, "num_sanity_val_steps": 0, "callbacks": [clock]}
    return L.Trainer(**{**TRAINER, **config["trainer"], **off, **alone, **changes})


class _Clock(L.Callback):
    """Stops training after enough timed batches, and times a validation."""

    batches, validations = 0, 0  # of the whole run

    def __init__(self) -> None:
        self._ends: list[float] = []  # of training batches, after the start of the first
        self._held_out: list[float] = []  # start and end of a validation

    @property
    def seconds_a_batch(self) -> float:
        skipped = max(0, min(WARM_UP, len(self._ends) - 2))
        return (self._ends[-1] - self._ends[skipped]) / (len(self._ends) - 1 - skipped)

    @property
    def seconds_a_held_out_batch(self) -> float:
        return (self._held_out[1] - self._held_out[0]) / self._validated

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        steps = trainer.estimated_stepping_batches
        if not isfinite(steps):
            raise UserError("they have no end: set max_epochs or max_steps")
        self.batches = int(steps) * trainer.accumulate_grad_batches
        interval = (trainer.val_check_batch or self.batches) * (trainer.check_val_every_n_epoch or 1)
        self.validations = ceil(self.batches / interval)  # one more at the end if the interval does not divide the run
        self._ends.append(_now(trainer))

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._ends.append(_now(trainer))
        timed = self._ends[WARM_UP:]
        trainer.should_stop |= len(timed) > MAX_BATCHES or (len(timed) > 1 and timed[-1] - timed[0] > TIMED_SECONDS)

    def on_validation_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._held_out.append(_now(trainer))

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._held_out.append(_now(trainer))
        self._validated = sum(trainer.num_val_batches)


def _now(trainer: L.Trainer) -> float:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter()
