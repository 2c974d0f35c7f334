"""How long runs will take, from a few timed batches of each shape of them, where the data are there."""

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, inf, isfinite
from multiprocessing.connection import Connection
from pydoc import locate
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import lightning as L
import torch
from tqdm import tqdm

from kvt.data.tensor_cache import read_only
from kvt.study.config import TRAINER, Config
from kvt.study.grid import Run
from kvt.study.local import Place, context_of_workers, settle
from kvt.study.run import reason
from kvt.system.errors import UserError
from kvt.system.hardware import tune
from kvt.tasks import Task, TaskData

PATIENCE = 60.0
"""Seconds that it may take, all in all."""
LONG_ENOUGH = 0.3
"""Seconds of training batches of a shape after which no more are timed."""
WARM_UP, MAX_STEPS = 2, 50
"""Training batches that are not timed, and those that are, at most."""
HELD_OUT = 2
"""Batches that a validation is timed by."""

Sample = tuple[str, float | str]
"""The name of a run, and the seconds that it will take, or why that cannot be known."""


class Timed(NamedTuple):
    """What was found out.

    Attributes:
        seconds: that a run will take alone, by its name.
        reasons: why that cannot be known, by the name of the run.
    """

    seconds: dict[str, float]
    reasons: dict[str, str]


def calibrate(runs: Sequence[Run], data_dir: str, place: Place) -> Timed:
    """Times some batches of runs in a worker's place, with a progress bar, for `PATIENCE` seconds at the most.

    Nothing is downloaded, prepared or written. Of each data set at least one run is timed where there is time for that;
    which others is left to chance.

    Args:
        runs: one of each shape.
        data_dir: where data sets lie.
        place: where a worker would run.
    """
    timed, deadline = Timed({}, {}), monotonic() + PATIENCE
    context = context_of_workers()
    receive, send = context.Pipe(duplex=False)
    groups = [[(run.name, run.config) for run in group] for group in _by_data(runs)]
    process = context.Process(target=_work, args=(groups, data_dir, place, deadline, send), daemon=True)
    try:
        process.start()
        send.close()
        with tqdm(total=len(runs), desc="timing a few steps", leave=False) as bar:
            while receive.poll(max(0.0, deadline - monotonic())):
                name, found = receive.recv()
                (timed.reasons if isinstance(found, str) else timed.seconds)[name] = found
                bar.update()
    except (EOFError, OSError):  # it is done, or has died of a run, or none can be started here
        pass
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
    return timed


def _by_data(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that can share their data, in no order."""
    groups: dict[frozenset[object], list[Run]] = {}
    for run in random.Random(0).sample(runs, len(runs)):
        data = frozenset(setting for setting in run.shape if setting[0].startswith("data."))
        groups.setdefault(data, []).append(run)
    return [*groups.values()]


def _work(
    groups: Sequence[Sequence[tuple[str, Config]]], data_dir: str, place: Place, deadline: float, answer: Connection
) -> None:
    """The life of the process that times: each group of runs has its share of the time that is left."""
    settle(place)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(nowhere, output)
    tune()
    with read_only():
        for number, group in enumerate(groups):
            until = monotonic() + (deadline - monotonic()) / (len(groups) - number)
            for sample in _samples(group, data_dir):
                answer.send(sample)
                if monotonic() > until:
                    break


def _samples(group: Sequence[tuple[str, Config]], data_dir: str) -> Iterator[Sample]:
    """Times runs of one data set, which is loaded once."""
    try:
        begun = perf_counter()
        first = group[0][1]
        data: TaskData = _make(first["data"], data_dir=data_dir, seed=first["seed_everything"])
        data.prepare_data()
        data.setup("fit")
        loading = perf_counter() - begun
    except Exception as error:
        yield from ((name, reason(error)) for name, _ in group)
        return
    for name, config in group:
        try:
            yield name, loading + _seconds(config, data)
        except Exception as error:
            yield name, reason(error)


def _seconds(config: Config, data: TaskData) -> float:
    """How long a run will take, but for the loading of its data.

    Raises:
        Exception: whatever the run would fail of.
    """
    task: Task = _make(config["model"], spec=data.spec)
    clock = _Clock()
    _trainer(config, clock, limit_val_batches=0, min_epochs=None, min_steps=None).fit(task, datamodule=data)
    seconds = clock.batches * clock.seconds_a_batch
    _trainer(config, clock, limit_val_batches=HELD_OUT).validate(task, datamodule=data, verbose=False)
    for split, passes in {"val": clock.validations, "test": 1}.items():
        if split in data.splits:
            there = ceil(len(data.splits[split][0]) / data.batch_size)
            limit = config["trainer"].get(f"limit_{split}_batches")
            count = there if limit is None else min(limit, there) if isinstance(limit, int) else int(limit * there)
            seconds += passes * count * clock.seconds_a_held_out_batch
    return seconds


def _make(section: Mapping[str, Any], **settings: Any) -> Any:
    """The task, or its data, that a section of a configuration describes."""
    made: Any = locate(section["class_path"])
    return made(**section["init_args"], **settings)


def _trainer(config: Config, clock: "_Clock", **changes: Any) -> L.Trainer:
    """The Trainer of a run, which leaves nothing behind."""
    nothing = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    alone = {"devices": 1, "num_sanity_val_steps": 0, "callbacks": [clock]}
    return L.Trainer(**{**TRAINER, **config["trainer"], **nothing, **alone, **changes})


class _Clock(L.Callback):
    """Times training batches until there are enough of them, and those of a validation.

    Attributes:
        batches: training batches of the whole run.
        validations: likewise.
    """

    batches = 0
    validations = 0

    def __init__(self) -> None:
        self._ends: list[float] = []  # of training batches, after the start of the first
        self._held_out: list[float] = []  # start and end of a validation

    @property
    def seconds_a_batch(self) -> float:
        """Of training."""
        skipped = max(0, min(WARM_UP, len(self._ends) - 2))
        return (self._ends[-1] - self._ends[skipped]) / (len(self._ends) - 1 - skipped)

    @property
    def seconds_a_held_out_batch(self) -> float:
        """Of validation, and of a test."""
        return (self._held_out[1] - self._held_out[0]) / self._validated

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Finds out how long the run is.

        Raises:
            UserError: it has no end.
        """
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

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stops when there are enough."""
        self._ends.append(_now(trainer))
        timed = self._ends[WARM_UP:]
        trainer.should_stop |= len(timed) > MAX_STEPS or (len(timed) > 1 and timed[-1] - timed[0] > LONG_ENOUGH)

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts."""
        self._held_out.append(_now(trainer))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stops."""
        self._held_out.append(_now(trainer))
        self._validated = sum(trainer.num_val_batches)


def _now(trainer: L.Trainer) -> float:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter()
