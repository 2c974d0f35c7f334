"""The runs of a fleet, each in a thread that pauses where its training would begin."""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from torch import Tensor

from kvt.system.errors import UserError
from kvt.training.callbacks import Throughput, without_plots
from kvt.training.lightning_cli import CLI
from kvt.training.load_checkpoint import TRAINER, read_checkpoint


class FleetState:
    def __init__(self) -> None:
        self.runs: list[FleetRun] = []  # started so far
        self.results: list[Mapping[str, Any]] = []  # what each run shows at its end
        self.throughput = Throughput()  # the clock of all runs

    @property
    def members(self) -> list["FleetRun"]:
        return [run for run in self.runs if run.joined]


class FleetRun(CLI):
    """A run of a fleet, whose Trainer pauses at the start of training until `fleet` has trained it.

    It has no plots, which would take longer than the training of a small model.
    """

    def __init__(self, *args: Any, fleet: FleetState, **settings: Any) -> None:
        self.fleet = fleet
        fleet.runs.append(self)
        self.joined = False  # stays False if the run resumes after its last step
        self.tested: dict[str, float] = {}
        self._ended = False  # diverged, and validated once more
        super().__init__(*args, **settings)

    @property
    def trainer_settings(self) -> dict[str, Any]:
        return {**vars(self.config.trainer), **{name: self.settings["trainer"][name] for name in TRAINER}}

    def callbacks_of_fit(self, config: Mapping[str, Any]) -> list[Callback]:
        self.throughput = self.history.clock = self.fleet.throughput
        callbacks = without_plots(super().callbacks_of_fit(config))
        return [*(each for each in callbacks if each is not self.stop), LambdaCallback(on_train_start=self._join)]

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        self.config_init.trainer["enable_progress_bar"] = False  # the fleet shows one
        return super().instantiate_trainer(**kwargs)

    def prepare_fit(self) -> None:
        if self.trainer.num_devices * self.trainer.num_nodes > 1:
            raise UserError("--fleet trains on one device: --devices 1")
        if str(self.trainer.precision).startswith("16"):
            raise UserError("--fleet: --precision 16 scales all losses alike: choose bf16-mixed or 32")
        if self.config.compile:
            raise UserError("--compile: a fleet's steps are not compiled: leave out --compile or --fleet")
        super().prepare_fit()

    def _join(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Pause until the fleet has trained this run; then there is nothing left to train."""
        self.joined = True
        cast(PausingThread, threading.current_thread()).pause()
        trainer.should_stop = True

    @property
    def to_test(self) -> bool:
        return self.test_after_fit and "test" in self.datamodule.splits and not self.history.diverged

    def test_best(self, best: str) -> Mapping[str, float]:
        return self.tested if self.joined else super().test_best(best)

    @property
    def speed(self) -> dict[str, Any]:
        return {**super().speed, **({"fleet": len(self.fleet.members)} if self.joined else {})}

    def show(self, rows: Mapping[str, Any]) -> None:
        self.fleet.results.append(rows)

    def record(self, means: Mapping[str, float], step: int) -> None:
        training = any(name.startswith("train/") for name in means)
        if self._ended or (training and self.history.diverged):
            return
        for name, mean in means.items():
            self.history.add(name, mean, step)
            self.trainer.callback_metrics[name] = torch.tensor(mean, dtype=torch.float64)
        speed = {f"train/{name}": number for name, number in super().speed.items()} if training else {}
        self._log({**means, **speed}, step - 1)

    def call_callbacks(self, hook: str) -> None:
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            getattr(callback, hook)(self.trainer, self.model)
        self._ended = self.history.diverged is not None

    def take_test(self, means: dict[str, float]) -> None:
        self.tested = means
        self._log(means, self.trainer.global_step)

    def best_weights(self) -> Mapping[str, Tensor]:
        """Return the state dict of the best checkpoint, or the current one if there is none."""
        path = self.best.best_model_path if self.best else ""
        return read_checkpoint(path)["state_dict"] if path else self.model.state_dict()

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        if self.trainer.logger:
            self.trainer.logger.log_metrics({**numbers, "epoch": self.trainer.current_epoch}, step)


class PausingThread(threading.Thread):
    """A thread that works only while another one waits for it in `go_on`."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._work, self._turn, self._stopped = work, threading.Semaphore(0), threading.Semaphore(0)
        self._ended = False
        self._error: BaseException | None = None  # of the work
        self._cancelled: BaseException | None = None

    def run(self) -> None:
        self._turn.acquire()
        try:
            self._work()
        except BaseException as error:
            self._error = error
        self._ended = True
        self._stopped.release()

    def go_on(self) -> None:
        """Start or continue the work, wait until it pauses or ends, and raise what it raised."""
        if self._ended:
            return
        if self.ident is None:
            self.start()
        self._turn.release()
        self._stopped.acquire()
        if self._error:
            raise self._error

    def pause(self) -> None:
        """Wait, within the work, for the next `go_on`; raise the error of `cancel`."""
        self._stopped.release()
        self._turn.acquire()
        if self._cancelled:
            raise self._cancelled

    def cancel(self, error: BaseException) -> None:
        """End work that has begun with an error."""
        self._cancelled = error
        if self.ident is not None:
            with suppress(BaseException):
                self.go_on()
