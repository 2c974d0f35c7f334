"""A run that is trained in a fleet: an ordinary one, from its command line to its result, but for the training."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ProgressBar, TQDMProgressBar
from torch import Tensor

from kvt.data.loader import Batches
from kvt.fleet.alike import require_alike, require_one_device
from kvt.fleet.fleet import Fleet
from kvt.fleet.loader import StackedLoader
from kvt.system.errors import UserError
from kvt.training.callbacks import FinalValidation, Throughput, without_plots
from kvt.training.lightning_cli import CLI
from kvt.training.load_checkpoint import read_checkpoint

FRAMES = 60
"""Calls on the stack, at most, from one member's beginning to the next one's."""


class FleetRun(CLI):
    """`fit` and its test, as the command line makes them: folder, logger, checkpoints and result are its own.

    Its Trainer sets everything up, waits where training begins until its fleet has trained it, and winds up. It draws
    no pictures, which take longer than to train a small model: `kvt maps` draws them from its checkpoints.

    Args:
        words: those of `CLI`.
        meeting: where the members of its fleet come together.
        settings: of the class beside this one that is derived from `CLI`, if there is one.
    """

    def __init__(self, *words: Any, meeting: "FleetTrainer", **settings: Any) -> None:
        self.meeting = meeting
        meeting.begun.append(self)
        self.tested: dict[str, float] = {}  # what the fleet's test says of this member
        self._ended = False  # whether it has diverged, and its last validation is over
        super().__init__(*words, **settings)

    @property
    def trainer_settings(self) -> dict[str, Any]:
        """The settings of the Trainer, as they were given."""
        return dict(vars(self.config.trainer))  # a Namespace as such has the keys of its parts

    def callbacks_of_fit(self, config: Mapping[str, Any]) -> list[Callback]:
        self.throughput = self.history.clock = self.meeting.throughput
        callbacks = without_plots(super().callbacks_of_fit(config))
        return [*(callback for callback in callbacks if callback is not self.stop), _Wait(self)]  # it takes no steps

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Without a progress bar: the fleet shows one."""
        trainer = super().instantiate_trainer(**kwargs)
        shown = [c for c in trainer.callbacks if not isinstance(c, ProgressBar)]  # type: ignore[attr-defined]
        trainer.callbacks = shown  # type: ignore[attr-defined]
        return trainer

    def prepare_fit(self) -> None:
        """Also refuses what no fleet can do."""
        require_one_device(self.trainer)
        if self.config.compile:
            raise UserError("--compile: a fleet's steps are not compiled: leave out --compile or --fleet")
        super().prepare_fit()

    @property
    def joined(self) -> bool:
        """Whether its fleet trains it: a run that was killed after its last step has nothing left to train."""
        return self in self.meeting.members

    @property
    def to_test(self) -> bool:
        """Whether its training ends with a test."""
        return self.test_after_fit and "test" in self.datamodule.splits and not self.history.diverged

    def test_best(self, best: str) -> Mapping[str, float]:
        return self.tested if self.joined else super().test_best(best)

    @property
    def speed(self) -> dict[str, Any]:
        """Also with how many others."""
        return {**super().speed, **({"fleet": len(self.meeting.members)} if self.joined else {})}

    def show(self, rows: Mapping[str, Any]) -> None:
        """Leaves it to the meeting."""
        self.meeting.results.append(rows)

    def record(self, means: Mapping[str, float | Tensor], step: int) -> None:
        """Adds means to what the run leaves: history, events, and the metrics that checkpoints are chosen by.

        A member that has diverged would have ended with a validation: that, where the fleet comes to it, is its last.
        """
        training = any(name.startswith("train/") for name in means)
        if self._ended or (training and self.history.diverged):
            return
        numbers = {name: float(mean) for name, mean in means.items()}
        for name, number in numbers.items():
            self.history.add(name, number, step)
        exact = {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}
        self.trainer.callback_metrics.update(exact)
        if training:
            numbers |= {f"train/{name}": number for name, number in super().speed.items()}
        self._log(numbers, step - 1)

    def notify(self, hook: str) -> None:
        """Lets the run's callbacks do what they do at the end of a validation, or of an epoch: keep checkpoints."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            getattr(callback, hook)(self.trainer, self.model)
        self._ended = self.history.diverged is not None

    def take_test(self, means: dict[str, float]) -> None:
        """Takes the means over its test data."""
        self.tested = means
        self._log(means, self.trainer.global_step)

    @property
    def best_weights(self) -> Mapping[str, Tensor]:
        """Those of its best checkpoint, or where there is none, its last ones."""
        path = self.best.best_model_path if self.best else ""
        weights: Mapping[str, Tensor] = read_checkpoint(path)["state_dict"] if path else self.model.state_dict()
        return weights

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        if self.trainer.logger:
            self.trainer.logger.log_metrics({**numbers, "epoch": self.trainer.current_epoch}, step)


class FleetTrainer:
    """Where the members of a fleet wait for each other.

    Each begins the next one from within its own `fit`, before its first step; the last trains all. So every run is set
    up, and wound up, by its own Trainer.

    Args:
        begin: makes and runs a member each.
    """

    def __init__(self, begin: "Iterable[Callable[[FleetTrainer], object]]") -> None:
        self.begun: list[FleetRun] = []  # all runs so far
        self.members: list[FleetRun] = []  # those that have come to their training
        self.results: list[Mapping[str, Any]] = []
        self._to_begin = deque(begin)
        self._trained = False
        sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000 + FRAMES * len(self._to_begin)))
        self.throughput = Throughput()  # one clock for all

    def hold(self) -> None:
        """Makes all runs."""
        while self._to_begin:
            self._to_begin.popleft()(self)

    def join(self, member: FleetRun) -> None:
        """Adds a run that has come to its first step; it is trained when this returns."""
        self.members.append(member)
        self.hold()
        if not self._trained:
            self._trained = True
            self._train()

    def _train(self) -> None:
        require_alike(self.members)
        first, fleet = self.members[0], Fleet(self.members)
        (validated,) = (each.step for each in first.trainer.callbacks if isinstance(each, FinalValidation))  # type: ignore[attr-defined]
        callbacks: list[Callback] = [self.throughput, FinalValidation(validated)]
        if first.trainer_settings["enable_progress_bar"] is not False:
            callbacks.append(TQDMProgressBar(refresh_rate=20))
        own = {"logger": False, "enable_checkpointing": False}
        trainer = L.Trainer(**{**first.trainer_settings, **own, "devices": 1, "callbacks": callbacks})
        self._go_on(trainer)
        training = StackedLoader([cast(Batches, member.trainer.train_dataloader) for member in self.members])
        validation = StackedLoader([member.datamodule.val_dataloader() for member in self.members])
        trainer.fit(fleet, training, validation)
        if any(member.to_test for member in self.members):
            fleet.take_up([member.best_weights for member in self.members])
            test = StackedLoader([member.datamodule.test_dataloader() for member in self.members])
            trainer.test(fleet, test, verbose=False)

    def _go_on(self, trainer: L.Trainer) -> None:
        """Lets the Trainer go on where its members' checkpoints were written.

        Raises:
            UserError: that is not the same step.
        """
        loops = [
            read_checkpoint(member.ckpt_path)["loops"]["fit_loop"] if member.ckpt_path else {}
            for member in self.members
        ]
        for state in loops:
            state.get("state_dict", {}).pop("combined_loader", None)  # of the loaders, each its own
        if any(state != loops[0] for state in loops):
            raise UserError("--fleet: the checkpoints of the members are not of the same step: let each go on alone")
        if loops[0]:
            trainer.fit_loop.load_state_dict(loops[0])


class _Wait(Callback):
    """Lets a Trainer wait where its training would begin; afterwards it has nothing left to do."""

    def __init__(self, member: FleetRun) -> None:
        self._member = member

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._member.meeting.join(self._member)
        trainer.should_stop = True
