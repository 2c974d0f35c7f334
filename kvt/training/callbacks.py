"""Callbacks of every run: history, clock, running state, last validation, stopping, pictures and sample texts."""

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from math import isfinite
from time import perf_counter
from typing import Any

import torch
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from kvt.system.console import say
from kvt.tasks import Task, TaskData
from kvt.training import attention_plots
from kvt.training.lightning_internals import (
    end_of_validation_after_training,
    stop_after_this_batch,
    validate_after_training,
)


class Throughput(Callback):
    """Measures the seconds of training alone, without validation, pictures and checkpoints.

    Logs `train/seconds` and `train/<unit>_per_second` with the training metrics. Its totals are saved in checkpoints.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.count: int | Tensor = 0  # stays on the device until it is read
        self.has_trained = False  # in this process
        self._since: float | None = None  # None while the clock is stopped

    @property
    def rate(self) -> float:
        """Predictions per second, over all training so far."""
        return int(self.count) / self.seconds if self.seconds else 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._since = perf_counter() if self._since is None else self._since

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.has_trained = True
        self.count += pl_module.num_predictions(batch) * trainer.world_size
        if pl_module.logs_now:
            self._tick()
            pl_module.log("train/seconds", self.seconds)
            pl_module.log(f"train/{pl_module.unit}_per_second", self.rate)
            pl_module.log(f"{pl_module.unit}/s", self.rate, prog_bar=True, logger=False)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._stop(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._stop(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "count": int(self.count)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds, self.count = state_dict["seconds"], state_dict["count"]

    def _stop(self, trainer: Trainer) -> None:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()  # queued kernels are training, too
        self._tick()
        self._since = None

    def _tick(self) -> None:
        if self._since is not None:
            now = perf_counter()
            self.seconds += now - self._since
            self._since = now


Row = dict[str, float]
"""A step, the seconds of training until then, and the metrics that were logged."""
MAX_ROWS = 2**15  # of a history: every checkpoint holds it


class History(Callback):
    """Keeps the metrics of training and validation by step, and stops a run that diverges."""

    def __init__(self, clock: Throughput) -> None:
        self.clock = clock
        self.rows: list[Row] = []
        self.diverged: str | None = None  # which loss was not finite, and at which step

    def add(self, name: str, value: float, step: int) -> None:
        """Add a metric to the row of a step."""
        if not self.rows or self.rows[-1]["step"] != step:
            self.rows = thinned(self.rows) if len(self.rows) >= MAX_ROWS else self.rows
            self.rows.append({"step": step, "seconds": self.clock.seconds})
        self.rows[-1][name] = value
        if name.endswith("/loss") and not isfinite(value):
            self.diverged = self.diverged or f"{name} is {value} at step {step}"

    def on_metric_logged(self, trainer: Trainer, task: Task, name: str, value: float) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.add(name, value, trainer.global_step)
            trainer.should_stop |= self.diverged is not None

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """End a resumed run that has diverged: it was killed before it could end."""
        trainer.should_stop |= self.diverged is not None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the current validation metrics: those of the run, if this checkpoint is its best."""
        metrics = trainer.callback_metrics.items()
        checkpoint["metrics"] = {name: float(value) for name, value in metrics if name.startswith("val/")}

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "diverged": self.diverged}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows, self.diverged = [*state_dict["rows"]], state_dict["diverged"]


def thinned(rows: list[Row]) -> list[Row]:
    """Keep the first row with the same metrics in every 2, 4, 8 … steps: as many as leave at most half of the rows."""
    kept, steps = rows, 1
    while len(kept) > len(rows) // 2:
        steps *= 2
        first: dict[Any, Row] = {}
        for row in rows:
            first.setdefault((row["step"] // steps, *row), row)
        kept = [*first.values()]
    return kept


def has_diverged(trainer: Trainer) -> bool:
    """Return whether the run's history has a loss that is not finite."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return any(isinstance(callback, History) and callback.diverged is not None for callback in callbacks)


class RunningState(Callback):
    """Saves and restores running training means and accumulated gradients, so that a run resumes between two logs.

    Each process has its own; a checkpoint holds those of all, by rank.
    """

    def __init__(self) -> None:
        self._gradients: dict[str, Tensor] = {}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        weights = pl_module.named_parameters() if trainer.accumulate_grad_batches > 1 else ()
        gradients = {name: weight.grad for name, weight in weights if weight.grad is not None}
        own = {"metrics": metric_state(pl_module), "gradients": gradients}
        processes: list[Any] = [own] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(processes, own)
        checkpoint["processes"] = processes

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        processes = checkpoint.get("processes", ())
        own = processes[trainer.global_rank] if trainer.global_rank < len(processes) else {}
        load_metric_state(pl_module, own.get("metrics", {}))
        self._gradients = own.get("gradients", {})

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Restore the gradients, which the Trainer zeroes after it has loaded a checkpoint."""
        for name, gradient in self._gradients.items():
            parameter = pl_module.get_parameter(name)
            parameter.grad = gradient.to(parameter.device)
        self._gradients = {}


def metric_state(task: Task) -> dict[str, dict[str, Any]]:
    """Return the sums of the training means that are not logged yet, by metric."""
    means = {name: task.metrics[f"train/{name}"] for name in task.metric_names}
    return {name: metric.metric_state for name, metric in means.items() if metric.update_called}


def load_metric_state(task: Task, state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Restore the sums that `metric_state` returned."""
    for name in task.metric_names:
        metric = task.metrics[f"train/{name}"]
        metric.reset()
        if name in state:
            metric.update(torch.zeros((), device=metric.device), 0)
        for part, number in state.get(name, {}).items():
            setattr(metric, part, number.to(metric.device))


class FinalValidation(Callback):
    """Ends every run with a validation, so that its last checkpoint and its result cover all of its training.

    At `max_steps` it tells the Trainer to stop, which then validates first. Any other run whose last step falls between
    two validations is validated once more after its training.
    """

    def __init__(self) -> None:
        self.step = 0  # of the run's last validation
        self._training_is_over = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == trainer.max_steps:
            trainer.should_stop = True

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.step = trainer.global_step
        if self._training_is_over:
            end_of_validation_after_training(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.step != trainer.global_step:
            self._training_is_over = True
            validate_after_training(trainer)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Validate a run that is stopped after its last training step: resumed, it would train no more."""
        if isinstance(exception, SIGTERMException) and trainer.fit_loop.done:
            self.on_train_end(trainer, pl_module)

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.step = state_dict["step"]


class StopOnSignal(Callback):
    """Stops training on Ctrl-C or SIGTERM, after the current step or validation; the second signal ends the process.

    With several processes, all stop after the same step: they agree when they log and after each validation.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signal = 0  # the one that was received
        self._previous: dict[int, Any] = {}

    def launch(self) -> None:
        """Let Ctrl-C end this process at once while it waits for the others, when it could not handle a signal."""
        self._handle(signal.SIG_DFL, (signal.SIGINT,))

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self._restore()

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._handle(self._on_signal, self.SIGNALS)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.world_size == 1 or pl_module.logs_now:
            self._agree(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Keep the Trainer from stopping within a validation, where processes may have different numbers of batches."""
        stop_after_this_batch(trainer, False)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._agree(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Stop listening, unless a signal was received: then the second one must still end the process."""
        if not self.signal:
            self._restore()

    def _handle(self, handler: Any, numbers: Sequence[int]) -> None:
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
            self._previous = {number: signal.signal(number, handler) for number in heard}

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _on_signal(self, number: int, frame: object) -> None:
        if self.signal:
            os._exit(128 + number)
        self.signal = number
        say("\nstopping after this step; press Ctrl-C again to stop at once")

    def _agree(self, trainer: Trainer) -> None:
        agreed = self.signal
        if trainer.world_size > 1:  # a signal may arrive meanwhile, on which this process must not stop alone
            mine = torch.tensor(self.signal, device=trainer.strategy.root_device)
            agreed = int(trainer.strategy.reduce(mine, reduce_op="max"))
        if agreed:
            self.signal = agreed
            stop_after_this_batch(trainer)


class ProgressBar(TQDMProgressBar):
    """A progress bar that shows loss and score first and the rate last: a narrow terminal cuts off the end."""

    def get_metrics(self, trainer: Trainer, pl_module: Any) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        ordered = sorted(metrics, key=lambda name: (name.endswith("/s"), not name.startswith("train/")))
        return {name.removeprefix("train/"): metrics[name] for name in ordered}


class AttentionMaps(Callback):
    """Draws the attention maps of the first validation example in TensorBoard at every validation, like `kvt maps`."""

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero or not isinstance(trainer.logger, TensorBoardLogger):
            return
        data: TaskData = trainer.datamodule  # type: ignore[attr-defined]
        with torch.compiler.set_stance("force_eager"):  # hooks are not called in a compiled model
            layers = attention_plots.collect_maps(pl_module, data.example(0))
        if layers:
            picture = attention_plots.pixels(attention_plots.draw(layers, pl_module.hparams["attn"]))
            trainer.logger.experiment.add_image("attention", picture, trainer.global_step, dataformats="HWC")


class SampleText(Callback):
    """Shows text that the model generates in TensorBoard at every validation."""

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking or has_diverged(trainer) or not isinstance(trainer.logger, TensorBoardLogger):
            return
        if (text := pl_module.sample()) is not None:
            trainer.logger.experiment.add_text("sample", text, trainer.global_step)
