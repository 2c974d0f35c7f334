"""Ctrl-C, and a cluster that takes the machine back: training stops between two steps, where it can go on exactly."""

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch

from kvt.system.console import say
from kvt.tasks import Task

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop(L.Callback):
    """Stops training after the step, or the validation, in which the process is asked to; asked twice, at once.

    Several processes agree where they log, and after a validation: each must stop after the same step.
    """

    def __init__(self) -> None:
        self.asked = 0
        """The signal that asked; 0 while none did."""
        self._before: dict[int, Any] = {}

    def launch(self) -> None:
        """Lets Ctrl-C end this process at once until it has met the others: it hears nothing while it waits for them.

        Only the system itself can end it there, and there is nothing to lose yet.
        """
        self._answer(signal.SIG_DFL, (signal.SIGINT,))

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """All processes of the run have met."""
        self._as_before()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listens, unless this process was told to ignore the signal."""
        self._answer(self._ask, SIGNALS)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Lets the Trainer stop when it is done with this batch."""
        assert isinstance(pl_module, Task)
        if trainer.world_size == 1 or pl_module.logs_now:
            self._agree(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keeps the Trainer from stopping amid a validation: of its batches, one process may have more than another."""
        trainer._signal_connector.received_sigterm = False

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Lets the Trainer stop when it is done with this validation."""
        self._agree(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listens no longer."""
        self._as_before()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Listens no longer, unless it was asked: then the run is saved, and the process ends, or is asked again."""
        if not self.asked:
            self._as_before()

    def _answer(self, how: Any, numbers: Sequence[int]) -> None:
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, how) for number in heard}

    def _as_before(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _ask(self, number: int, frame: object) -> None:
        if self.asked:
            os._exit(128 + number)
        self.asked = number
        say("\nstopping after this step; once more stops at once")

    def _agree(self, trainer: L.Trainer) -> None:
        agreed = self.asked
        if trainer.world_size > 1:  # this process may be asked in the meantime, and must not stop alone
            mine = torch.tensor(self.asked, device=trainer.strategy.root_device)
            agreed = int(trainer.strategy.reduce(mine, reduce_op="max"))
        if agreed:
            self.asked = agreed
            trainer._signal_connector.received_sigterm = True  # what Lightning stops at, once its books are closed
