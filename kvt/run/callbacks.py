"""Callbacks that keep a run's history, save its checkpoints, print its progress and end it."""

import os
import signal
import threading
from math import inf, isfinite
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from kvt.system import atomically, say, tell, write_csv

Row = dict[str, float]
"""A row of the history, {"step": …, "seconds": …, metric: …}. "seconds" is the training time up to this step."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Ctrl-C, and the signals by which clusters announce that they will end a process."""


class RunCallback(L.Callback):
    """Keeps the history of a run, saves the state that Lightning leaves out of checkpoints, and ends the run.

    * The history has a row for each step at which the run logs metrics. A logged loss that is not finite ends the run.
    * Learning rate, gradient norm, training time (without validation, kvt's pictures and checkpoints) and speed are
      logged every `log_every_n_steps` steps.
    * A checkpoint also has history, training time, running means of the metrics, `trainer.callback_metrics`, and
      accumulated gradients. It has no random states: `Batches` seeds torch's generators before each training batch.
    * The run ends with a validation, if it validates at all, so that last.ckpt and the result cover the whole training.
    * Ctrl-C or another signal in `STOP_SIGNALS` stops the run after the current batch or, if a validation follows,
      after the validation. `Last` then saves last.ckpt. Several processes tell each other of signals only at logs,
      validations and ends of epochs, so that all stop after the same batch. A further Ctrl-C ends the process at once.

    Args:
        resumes: whether this process resumes a run. If the run had been told to stop before, for instance by
            `EarlyStopping`, the resumed run is told to stop again.
    """

    def __init__(self, resumes: bool = False) -> None:
        self.resumes = resumes
        self.folder: Path | None = None  # the run's folder; None: the run writes no history.csv
        self.rows: list[Row] = []
        self.diverged: str | None = None  # name, value and step of the first loss that was not finite
        self.seconds = 0.0
        self.count = 0  # number of tokens, images, … (see `Task.unit`) that all processes have read in training
        self.received = 0  # number of the signal that stops the run; 0: none
        self._read: int | Tensor = 0  # what this process has read since the last `_tick`
        self._since: float | None = None  # `seconds` counts up to this time; None while the clock is stopped
        self._step: dict[str, float | Tensor] = {}  # learning rate and gradient norm to log after this step
        self._saved: dict[str, Any] = {}  # the entry "run" of the loaded checkpoint

    @property
    def rate(self) -> float:
        """The training speed so far, in `Task.unit` per second."""
        return self.count / self.seconds if self.seconds else 0.0

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._tick(trainer)
        shown = {name: value.detach().cpu() for name, value in trainer.callback_metrics.items()}
        means = {name: (mean.total, mean.weight) for name, mean in pl_module.means.items() if mean.update_called}
        weights = pl_module.named_parameters() if trainer.accumulate_grad_batches > 1 else ()
        gradients = {name: weight.grad for name, weight in weights if weight.grad is not None}
        if trainer.world_size > 1:
            gradients = {name: trainer.strategy.reduce(one, reduce_op="mean") for name, one in gradients.items()}
        checkpoint["run"] = {
            **{name: vars(self)[name] for name in ("rows", "diverged", "seconds", "count")},
            **{"logged_step": pl_module.logged_step, "should_stop": trainer.should_stop},
            **{"callback_metrics": shown, "means": means, "gradients": gradients},
        }
        now = self.rows[-1] if self.rows and self.rows[-1]["step"] == trainer.global_step else {}
        validated = any(name.startswith("val/") for name in now)
        measured = {name: float(value) for name, value in shown.items() if name.startswith("val/")}
        checkpoint["metrics"] = measured if validated else {}  # the metrics of the validation at this step

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._saved = checkpoint.get("run", {})
        for name in ("rows", "diverged", "seconds", "count"):
            setattr(self, name, self._saved.get(name, vars(self)[name]))

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Restore gradients and metrics, end a run that had diverged or been told to stop; handle signals."""
        saved, self._saved = self._saved, {}
        pl_module.logged_step = saved.get("logged_step", 0)
        for name, gradient in saved.get("gradients", {}).items():
            parameter = pl_module.get_parameter(name)
            parameter.grad = gradient.to(parameter)
        for name, (total, weight) in saved.get("means", {}).items():
            mean = pl_module.means[name].to(pl_module.device)
            mean.reset()
            mean.update(total.to(mean.device), weight.to(mean.device))
        shown = saved.get("callback_metrics", {})
        trainer.callback_metrics.update({name: value.to(pl_module.device) for name, value in shown.items()})
        if self.diverged or (self.resumes and saved.get("should_stop")):
            self._end(trainer)
        if threading.current_thread() is threading.main_thread():
            self._stop_trainer: Any = signal.getsignal(signal.SIGTERM)  # Lightning's handler: ends `fit` after a batch
            for number in STOP_SIGNALS:  # Lightning restores all handlers after training
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, self._on_signal)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._since = self._since or perf_counter()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Optimizer) -> None:
        """If this step is logged, keep its learning rate, and the norm of the gradients before clipping."""
        if (trainer.global_step + 1) % max(trainer.log_every_n_steps, 1) == 0:  # type: ignore[attr-defined]
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            norm = get_total_norm([weight.grad for weight in weights if weight.grad is not None])
            self._step = {"train/lr": optimizer.param_groups[0]["lr"], "train/grad_norm": norm}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._read += pl_module.num_read(batch)
        is_last = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        if (at_limit := trainer.global_step == trainer.max_steps) or is_last or trainer.should_stop:
            self._end(trainer, at_once=at_limit)
        if logs := pl_module.logs_now:
            self._tick(trainer)
            for name, value in self._step.items():
                pl_module.record(name, value)
            self._step = {}
            pl_module.log("train/seconds", self.seconds)
            pl_module.log(f"train/{pl_module.unit}_per_second", self.rate, prog_bar=True)
        may_stop = self.received if trainer.world_size == 1 else logs
        if may_stop and not self._may_validate(trainer, batch_idx):
            self._stop_if_asked(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._tick(trainer, goes_on=False)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.write()
            self._stop_if_asked(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._tick(trainer, goes_on=False)
        self._stop_if_asked(trainer)

    def on_record(self, trainer: L.Trainer, name: str, value: float) -> None:
        """In `fit`, add a metric from `Task.record` to the history. A loss that is not finite ends the run."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        if not self.rows or self.rows[-1]["step"] != trainer.global_step:
            self.rows.append({"step": trainer.global_step, "seconds": self.seconds})
        self.rows[-1][name] = value
        if name.endswith("/loss") and not isfinite(value):
            self.diverged = self.diverged or f"{name} is {value} at step {trainer.global_step}"
            self._end(trainer, at_once=True)

    def write(self) -> None:
        """Write history.csv into `folder`, unless it is None."""
        if self.folder is not None:
            write_csv(self.folder / "history.csv", dict.fromkeys(name for row in self.rows for name in row), self.rows)

    def _end(self, trainer: L.Trainer, at_once: bool = False) -> None:
        """Tell the Trainer to validate and end after this batch; `at_once` overrides --min_epochs and --min_steps."""
        trainer.should_stop = True
        if at_once:
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
        if trainer.check_val_every_n_epoch is not None:
            trainer.check_val_every_n_epoch = 1

    def _may_validate(self, trainer: L.Trainer, batch_idx: int) -> bool:
        """Return whether a signal must wait, because a validation or the end of the epoch may follow this batch."""
        batches = trainer.fit_loop.total_batch_idx if trainer.check_val_every_n_epoch is None else batch_idx
        is_due = (batches + 1) % (trainer.val_check_batch or inf) == 0
        return trainer.should_stop or trainer.is_last_batch or is_due

    def _tick(self, trainer: L.Trainer, goes_on: bool = True) -> None:
        """Bring `count`, a sum over all processes, and `seconds` up to date. Unless `goes_on`, stop the clock."""
        read = torch.as_tensor(self._read, device=trainer.strategy.root_device)
        self.count += int(trainer.strategy.reduce(read, reduce_op="sum"))
        self._read = 0
        if self._since is not None:
            now = perf_counter()  # a GPU has finished its steps by now, because `int` above has waited for the sum
            self.seconds += now - self._since
            self._since = now if goes_on else None

    def _on_signal(self, number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a further Ctrl-C ends a process, even one that waits for others
        if not self.received:
            self.received = number
            say("\nstopping after this step; press Ctrl-C again to stop at once")

    def _stop_if_asked(self, trainer: L.Trainer) -> None:
        agreed = self.received
        if trainer.world_size > 1:  # all processes must agree, even if a signal arrives during `reduce`
            mine = torch.tensor(self.received, device=trainer.strategy.root_device)
            agreed = int(trainer.strategy.reduce(mine, reduce_op="max"))
        if agreed and not trainer.received_sigterm:
            self.received = agreed
            self._stop_trainer(signal.SIGTERM, None)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Checkpoint IO that writes a temporary file beside the path, and renames the file when it is complete.

    Lightning's own IO writes a file into the system's temporary folder, and then moves the file to the path. Between
    two disks, the move is a copy, and a process that is killed during the copy leaves half a checkpoint at the path.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with atomically(Path(path)) as part, part.open("wb") as file:
            torch.save(checkpoint, file)  # torch.save(checkpoint, path) would hide the OSError of a full disk


class Best(ModelCheckpoint):
    """Saves best.ckpt, the checkpoint with the best value of the task's `monitor`; of equal values, the latest.

    `state_key` is constant: Lightning reads the key about ten times a step, and would make a new string each time.
    """

    state_key = "best"
    on_train_batch_end = L.Callback.on_train_batch_end  # saves only after validations
    run: RunCallback

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best score if a run is resumed, even in a moved folder. A new run starts without a best score."""
        path = os.path.join(str(self.dirpath), "best.ckpt")
        if self.run.resumes and state_dict["best_k_models"]:
            paths = {"dirpath": self.dirpath, "best_model_path": path, "kth_best_model_path": path}
            super().load_state_dict({**state_dict, **paths, "best_k_models": {path: state_dict["best_model_score"]}})

    def check_monitor_top_k(self, trainer: L.Trainer, current: Tensor | None = None) -> bool:
        """Return whether to save: no earlier value is better, and the run has not diverged."""
        equal = bool(current == self.best_model_score)
        return self.run.diverged is None and (super().check_monitor_top_k(trainer, current) or equal)


class Last(ModelCheckpoint):
    """Saves last.ckpt, to resume from, after each validation (or epoch, if the run never validates) and on a signal."""

    state_key = "last"
    on_train_batch_end = L.Callback.on_train_batch_end

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore nothing: the state has only paths of an earlier last.ckpt."""

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Save if a signal has stopped the run between two steps; other exceptions may leave a step incomplete."""
        if isinstance(exception, SIGTERMException):
            super().on_exception(trainer, pl_module, exception)


class Lines(L.Callback):
    """Prints a line of metrics after each epoch and each validation within an epoch, above any progress bar."""

    printed = -1  # step of the last line; each step gets at most one line

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._print(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.is_last_batch:
            self._print(trainer)

    def _print(self, trainer: L.Trainer) -> None:
        shown = trainer.progress_bar_metrics  # empty if the run resumes at the end of an epoch
        if trainer.is_global_zero and shown and self.printed != trainer.global_step:
            self.printed, bar = trainer.global_step, trainer.progress_bar_callback
            names = {name: name.removeprefix("train/").replace("_per_second", "/s") for name in shown}
            metrics = ", ".join(f"{names[name]} {shown[name]:.4g}" for name in shown)
            (bar.print if bar else tell)(f"epoch {trainer.current_epoch}, step {trainer.global_step}: {metrics}")
