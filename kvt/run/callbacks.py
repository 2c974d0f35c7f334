"""`EndRun`, the callback that ends a run with a validation, and `ProgressBar`."""

import os
import signal
import sys
from typing import Any

import torch
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from kvt.run.lightning_internals import (
    OutsideSteps,
    end_of_validation_after_training,
    stop_after_this_batch,
    validate_after_training,
)
from kvt.system.console import STOP_SIGNALS, restore_handlers, say, set_handler, tell


class EndRun(OutsideSteps, Callback):
    """A callback that ends every run with a validation, so that last.ckpt and the result cover the whole training.

    At `max_steps`, the callback sets `trainer.should_stop`, and the Trainer validates before it stops. If training ends
    for another reason between two validations, the callback validates once more after training.

    Ctrl-C or a signal of a cluster ends training after the current step or validation. A second Ctrl-C ends the process
    at once. A second signal of a cluster is ignored: SLURM sends SIGTERM at the end of the time limit, while the run
    may still be saving the checkpoint that an earlier signal has requested. If a run has several processes, all of them
    stop after the same step: the processes exchange signals at every log and after every validation.
    """

    state_key = "FinalValidation"  # the key of this callback in checkpoints

    def __init__(self) -> None:
        self.step = 0  # the step of the run's last validation
        self.signal = 0  # the number of the first signal that the process received
        self._training_is_over = self._validates = False
        self._previous: dict[int, Any] = {}

    def launch(self) -> None:
        """Let signals end this process at once while it waits for other processes, when no Python handler can run."""
        self._previous = set_handler(signal.SIG_DFL, STOP_SIGNALS)

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self._trainer = trainer
        self._restore()

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._previous = set_handler(self._on_signal, STOP_SIGNALS)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == trainer.max_steps:
            trainer.should_stop = True
        if trainer.world_size > 1 and pl_module.logs_now:
            self._agree(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Prevent a stop during validation, in which processes may have different numbers of batches."""
        self._validates = True
        stop_after_this_batch(trainer, False)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.step = trainer.global_step
        if self._training_is_over:
            end_of_validation_after_training(trainer)
        self._validates = False
        self._agree(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._validate(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Validate if a signal stops a run after its last training step, because a resumed run would not train again.

        Restore the signal handlers if there was no signal. After a signal, a second Ctrl-C must end the process.
        """
        if isinstance(exception, SIGTERMException) and trainer.fit_loop.done:
            self._validate(trainer)
        if not self.signal:
            self._restore()

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.step = state_dict["step"]

    def _validate(self, trainer: Trainer) -> None:
        if self.step != trainer.global_step and trainer.enable_validation:
            self._training_is_over = True
            validate_after_training(trainer)

    def _restore(self) -> None:
        restore_handlers(self._previous)
        self._previous = {}

    def _on_signal(self, number: int, frame: object) -> None:
        if self.signal:
            if number == signal.SIGINT:
                os._exit(128 + number)
            return
        self.signal = number
        if self._trainer.world_size == 1 and not self._validates:
            stop_after_this_batch(self._trainer)
        say("\nstopping after this step; press Ctrl-C again to stop at once")

    def _agree(self, trainer: Trainer) -> None:
        agreed = self.signal
        if trainer.world_size > 1:  # a signal during `reduce` must stop all processes, or none
            mine = torch.tensor(self.signal, device=trainer.strategy.root_device)
            agreed = int(trainer.strategy.reduce(mine, reduce_op="max"))
        if agreed:
            self.signal = agreed
            stop_after_this_batch(trainer)


class ProgressBar(OutsideSteps, TQDMProgressBar):
    """A progress bar that shows loss and score first and speeds last, because a narrow terminal cuts off the end.

    Without a terminal, the callback prints a line after each epoch and after each validation within an epoch. A
    notebook shows only the bar of training, without a second bar for validation.
    """

    BAR_FORMAT = "{l_bar}{n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}, {rate_noinv_fmt}]"

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        in_notebook = "ipykernel" in sys.modules
        self.shows_one = in_notebook and trainer.state.fn == TrainerFn.FITTING
        self.printed = -1  # the step at which the last line was printed
        self.prints_lines = trainer.is_global_zero and not (in_notebook or (sys.stdout and sys.stdout.isatty()))
        if self.prints_lines:
            self.disable()
        super().setup(trainer, pl_module, stage)

    def init_validation_tqdm(self) -> Tqdm:
        return Tqdm(disable=True) if self.shows_one else super().init_validation_tqdm()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self._print_line(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.state.fn == TrainerFn.FITTING and not trainer.is_last_batch:
            self._print_line(trainer, pl_module)

    def _print_line(self, trainer: Trainer, pl_module: Any) -> None:
        # no second line for the last step: a run may end with a validation within an epoch
        shown = self.get_metrics(trainer, pl_module)  # empty if the run resumes at the end of an epoch
        if self.prints_lines and shown and self.printed != trainer.global_step:
            self.printed = trainer.global_step
            metrics = ", ".join(f"{name} {value:.4g}" for name, value in shown.items())
            tell(f"epoch {trainer.current_epoch}, step {trainer.global_step}: {metrics}")

    def get_metrics(self, trainer: Trainer, pl_module: Any) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        shown = [name for name in ("train/loss", pl_module.monitor) if name in metrics]
        others = [name for name in metrics if name not in shown]
        others.sort(key=lambda name: (name.endswith("_per_second"), not name.startswith("train/")))
        short = {name: name.removeprefix("train/").replace("_per_second", "/s") for name in [*shown, *others]}
        return {title: metrics[name] for name, title in short.items()}
