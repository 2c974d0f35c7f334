"""Estimates of a run's time from a few timed batches, for a dry run."""

import os
import random
from collections.abc import Mapping, Sequence
from math import ceil, inf, isfinite
from multiprocessing.connection import Connection
from pydoc import locate
from time import monotonic, perf_counter
from typing import Any, NamedTuple

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
LONG_ENOUGH = 0.3
"""Seconds of training batches to time for a shape."""
WARM_UP, MAX_STEPS = 2, 50
"""Training batches that are not timed, and the most that are."""
HELD_OUT = 2
"""Batches of validation to time."""


class Timed(NamedTuple):
    """Estimates by the name of the run.

    Attributes:
        seconds: that a run takes alone.
        reasons: why a run could not be timed.
    """

    seconds: dict[str, float]
    reasons: dict[str, str]


def calibrate(runs: Sequence[Run], data_dir: str, place: Place) -> Timed:
    """Time some batches of each run in another process, in random order, for at most `PATIENCE` seconds.

    Nothing is downloaded or written.

    Args:
        runs: one of each shape.
        data_dir: the folder of the data sets.
        place: of a worker.
    """
    timed, deadline = Timed({}, {}), monotonic() + PATIENCE
    context = context_of_workers()
    receive, send = context.Pipe(duplex=False)
    configs = {run.name: run.config for run in random.Random(0).sample(runs, len(runs))}
    process = context.Process(target=_work, args=(configs, data_dir, place, send), daemon=True)
    try:
        process.start()
        send.close()
        with tqdm(total=len(runs), desc="timing a few steps", leave=False) as bar:
            while receive.poll(max(0.0, deadline - monotonic())):
                name, found = receive.recv()
                (timed.reasons if isinstance(found, str) else timed.seconds)[name] = found
                bar.update()
    except (EOFError, OSError):  # it has ended, a run killed it, or no process can be started
        pass
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
    return timed


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
    begun = perf_counter()
    data: TaskData = _make(config["data"], data_dir=data_dir, seed=config["seed_everything"])
    data.prepare_data()
    data.setup("fit")
    seconds = perf_counter() - begun
    task: Task = _make(config["model"], spec=data.spec)
    clock = _Clock()
    _trainer(config, clock, limit_val_batches=0, min_epochs=None, min_steps=None).fit(task, datamodule=data)
    seconds += clock.batches * clock.seconds_a_batch
    _trainer(config, clock, limit_val_batches=HELD_OUT).validate(task, datamodule=data, verbose=False)
    for split, passes in {"val": clock.validations, "test": 1}.items():
        if split in data.splits:
            there = ceil(len(data.splits[split][0]) / data.batch_size)
            limit = config["trainer"].get(f"limit_{split}_batches")
            count = there if limit is None else min(limit, there) if isinstance(limit, int) else int(limit * there)
            seconds += passes * count * clock.seconds_a_held_out_batch
    return seconds


def _make(section: Mapping[str, Any], **settings: Any) -> Any:
    """Make the task or the data of a section of a configuration."""
    made: Any = locate(section["class_path"])
    return made(**section["init_args"], **settings)


def _trainer(config: Config, clock: "_Clock", **changes: Any) -> L.Trainer:
    """Return the Trainer of a run, without logger and checkpoints."""
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    alone = {"devices": 1, "num_sanity_val_steps": 0, "callbacks": [clock]}
    return L.Trainer(**{**TRAINER, **config["trainer"], **off, **alone, **changes})


class _Clock(L.Callback):
    """Stops training after enough timed batches, and times a validation.

    Attributes:
        batches: training batches of the whole run.
        validations: of the whole run.
    """

    batches = 0
    validations = 0

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

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        steps = trainer.estimated_stepping_batches
        if not isfinite(steps):
            raise UserError("they have no end: set max_epochs or max_steps")
        self.batches = int(steps) * trainer.accumulate_grad_batches
        epoch, interval = trainer.num_training_batches, trainer.val_check_batch or inf
        if trainer.check_val_every_n_epoch is None:
            validations = self.batches / interval
        else:
            validations = self.batches / epoch * (epoch // interval) / trainer.check_val_every_n_epoch
            validations += interval < epoch and epoch % interval > 0  # at the end of the run
        self.validations = max(1, ceil(validations))
        self._ends.append(_now(trainer))

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._ends.append(_now(trainer))
        timed = self._ends[WARM_UP:]
        trainer.should_stop |= len(timed) > MAX_STEPS or (len(timed) > 1 and timed[-1] - timed[0] > LONG_ENOUGH)

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._held_out.append(_now(trainer))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._held_out.append(_now(trainer))
        self._validated = sum(trainer.num_val_batches)


def _now(trainer: L.Trainer) -> float:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter()
