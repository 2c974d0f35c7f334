"""A run that is trained in a fleet: an ordinary one, from its command line to its result, but for the training."""

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
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
from kvt.training.load_checkpoint import TRAINER, read_checkpoint


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
        given = dict(vars(self.config.trainer))  # dict(Namespace) would have the keys of its parts
        return given | {name: self.settings["trainer"][name] for name in TRAINER}  # a checkpoint's, too

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
    """Trains runs together: each is set up, and wound up, by its own Trainer; between, one Trainer trains all.

    Each run has a thread that pauses where its training would begin. One thread works at a time.

    Args:
        begin: makes and runs a member each.
    """

    def __init__(self, begin: "Iterable[Callable[[FleetTrainer], object]]") -> None:
        self.begun: list[FleetRun] = []  # all runs so far
        self.members: list[FleetRun] = []  # those that have something left to train
        self.results: list[Mapping[str, Any]] = []
        self.throughput = Throughput()  # one clock for all
        self._threads = [_PausingThread(partial(each, self)) for each in begin]

    def run(self) -> None:
        """Make all runs.

        Raises:
            Exception: what a run, or their training, has raised; the other runs end with it, too.
        """
        try:
            for thread in self._threads:
                thread.go_on()
            if self.members:
                self._train()
            for thread in self._threads:
                thread.go_on()
        except BaseException as error:
            for thread in self._threads:
                thread.cancel(error)
            raise

    def join(self, member: FleetRun) -> None:
        """Add a run that has come to its first step; it is trained when this returns."""
        self.members.append(member)
        thread = threading.current_thread()
        assert isinstance(thread, _PausingThread)
        thread.pause()

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


class _PausingThread(threading.Thread):
    """A thread that works only while another one waits for it in `go_on`."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._work, self._turn, self._stopped = work, threading.Event(), threading.Event()
        self._ended = False
        self._error: BaseException | None = None  # of the work
        self._cancelled: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
        self._ended = True
        self._stopped.set()

    def go_on(self) -> None:
        """Start or continue the work, and wait until it pauses or ends. Raises what it has raised."""
        if self._ended:
            return
        self._stopped.clear()
        if self.ident is None:
            self.start()
        else:
            self._turn.set()
        self._stopped.wait()
        if self._error:
            raise self._error

    def pause(self) -> None:
        """Wait, within the work, until it is continued. Raises the error that it is cancelled with."""
        self._stopped.set()
        self._turn.wait()
        self._turn.clear()
        if self._cancelled:
            raise self._cancelled

    def cancel(self, error: BaseException) -> None:
        """Let the work end with an error, if it has begun."""
        self._cancelled = error
        if self.ident is not None:
            with suppress(BaseException):
                self.go_on()


class _Wait(Callback):
    """Pauses a run where its training would begin; afterwards there is nothing left to train."""

    def __init__(self, member: FleetRun) -> None:
        self._member = member

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._member.meeting.join(self._member)
        trainer.should_stop = True
